"""Steps in pieces of fixed shape, as a GPU captures them, give what steps of their own shape give."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch

from flashspark.engine.graph_runner import EagerRunner
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.step_graphs import PieceKey, StepGraphs, reachable_pieces
from flashspark.speculative.tiers import TierGrid, TierKey, TierRule
from harness import Harness, Job
from unit.test_lossless_adaptive import (  # noqa: F401 - fixtures
    LINEAR,
    SMALL_POOL,
    WIDTH,
    check_schedule,
    drafts,
    make,
    one_to_32,
)
from unit.test_lossless_tiny import assert_same, folders, plain, prompts  # noqa: F401 - fixtures


class ReplayRunner:
    """As treacherous as captured graphs: every piece leaves its results where it left them the first time."""

    def __init__(self) -> None:
        self.outputs: dict[PieceKey, object] = {}

    def run(self, key, body):
        new = body()
        if key not in self.outputs:
            self.outputs[key] = new
        else:
            for old_tensor, new_tensor in zip(tensors(self.outputs[key]), tensors(new), strict=True):
                old_tensor.copy_(new_tensor)
        return self.outputs[key]


def tensors(value) -> list[torch.Tensor]:
    """All tensors inside of nested tuples and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors(part)]
    if is_dataclass(value):
        return [tensor for part in fields(value) for tensor in tensors(getattr(value, part.name))]
    return []


def in_pieces(harness: Harness, runner=None, **rule) -> StepGraphs:
    """Gives the worker pieces to run, with few buckets, so that most steps have absent slots."""
    worker = harness._worker
    max_reqs = harness.scheduler.limits.max_running_requests
    grid = TierGrid(
        TierRule(worker.width, max_reqs, **({"finest_reqs": 3, "finest_tokens": 4, "relative": 4} | rule))
    )
    source = None if worker.adaptive is None else worker.adaptive.source
    eps = 0.0 if worker.adaptive is None else worker.adaptive.planner.settings.survival_eps
    worker.graphs = StepGraphs(
        worker.runner,
        worker.sampling,
        worker.drafter,
        source,
        grid,
        eps,
        runner or ReplayRunner(),
        worker.rule,
    )
    return worker.graphs


def test_the_buckets_that_are_told_are_those_of_the_pieces(folders):  # noqa: F811
    harness = Harness(folders["target"], folders["dflash2"], max_running_requests=48)
    harness._worker.graphs = None  # as on a CPU
    assert harness.scheduler.verify_request_buckets == list(range(1, 49))
    graphs = in_pieces(harness)
    assert harness.scheduler.verify_request_buckets == list(graphs.grid.buckets)
    assert 10 < len(graphs.grid.buckets) < 40 and graphs.grid.buckets[-1] == 48


@pytest.mark.parametrize("mode", [VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT], ids=lambda mode: mode.value)
@pytest.mark.parametrize("draft", ["dflash2", "dspark"])
def test_planned_steps(folders, drafts, plain, draft, mode):  # noqa: F811
    harness = make(folders, drafts[draft], mode, LINEAR)
    graphs = in_pieces(harness)
    jobs = one_to_32()
    assert_same(plain, jobs, harness.run(jobs))
    records = check_schedule(harness)
    assert sum(not record.plan.verify.full for record in records) >= 0.2 * len(records)
    used = set(graphs._step_runner.outputs)
    assert used <= set(reachable_pieces(graphs.grid, WIDTH, (False, True)))
    assert {key.kind for key in used} == {"draft", "verify", "accept"}


@pytest.mark.parametrize(("draft", "predicts_apart"), [("dflash2", False), ("dspark", True)])
def test_a_draft_piece_predicts_what_its_source_would(folders, drafts, draft, predicts_apart):  # noqa: F811
    """DFlash2's in the walk's own launch, without a call of the source; what outcomes are held against is the same."""
    harness = make(folders, drafts[draft], VerifyMode.COMPACT, LINEAR)
    graphs, source = in_pieces(harness), harness._worker.adaptive.source
    if not predicts_apart:
        source.slope.fill_(0.3)
        source.intercepts.copy_(torch.linspace(-1.0, 1.0, source.intercepts.numel()).view(2, -1))
    predict, run, calls, confidences = source.predict, graphs.draft, [], []

    def draft_and_compare(num_slots, sampled, signal):
        block = run(num_slots, sampled, signal)
        if signal:
            rows = graphs.rows(num_slots)
            present = rows[rows != harness._worker.runner.request_rows.scratch_row]
            left, confidence = source._log.values[present].clone(), graphs.confidence(num_slots).clone()
            assert torch.equal(confidence, predict(rows, block.signal))
            assert torch.equal(left, source._log.values[present])
            confidences.append(confidence)
        return block

    source.predict, graphs.draft = lambda *args: calls.append(args) or predict(*args), draft_and_compare
    sampling = [{}, {"temperature": 0.8}]
    harness.run([Job(p, 20, arrive=i, sampling=sampling[i % 2]) for i, p in enumerate(prompts(7))])
    assert len(confidences) > 10
    assert torch.cat(confidences).std() > 0.01
    assert len(calls) == (len(confidences) if predicts_apart else 0)


@pytest.mark.parametrize("draft", ["dflash2", "dspark", None])
def test_static_steps(folders, drafts, plain, draft):  # noqa: F811
    harness = Harness(folders["target"], None if draft is None else drafts[draft], **SMALL_POOL)
    in_pieces(harness)
    jobs = one_to_32()
    assert_same(plain, jobs, harness.run(jobs))
    check_schedule(harness)


@pytest.mark.parametrize("draft", ["dflash2", "dspark"])
def test_every_kind_of_request(folders, drafts, draft):  # noqa: F811
    """Draws, penalties, bias, minimum lengths and blocks that nobody speculates on, together: the same tokens."""
    sampling = [
        {"temperature": 1.0, "seed": 3},
        {},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.5},
        {"logit_bias": {3: 4.0}},
        {"min_new_tokens": 12},
    ]
    jobs = [Job(p, 30, arrive=i, sampling=sampling[i % 7]) for i, p in enumerate(prompts(21))]
    jobs[4].speculation = jobs[15].speculation = "off"
    jobs[6].max_verify_len = 3

    def run(pieces: bool) -> list[list[int]]:
        harness = Harness(folders["target"], drafts[draft])
        adaptive = harness.make_adaptive(
            VerifyMode.COMPACT, LINEAR, TierGrid(TierRule(WIDTH, 48)), draft_free=None
        )
        adaptive.source.num_refits = 100
        if pieces:
            in_pieces(harness)
        return [result.tokens for result in harness.run(jobs)]

    assert run(True) == run(False)


def test_full_budget_runs_the_same_pieces_in_every_mode(folders):  # noqa: F811
    """Static, cap-accept and compact with a full budget: the same launches, so the same bits."""
    used, outputs = [], []
    for mode in (None, VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT):
        harness = Harness(folders["target"], folders["dflash2"])
        if mode is not None:
            harness.make_adaptive(mode).planner.pin(1.0)
        graphs = in_pieces(harness)
        outputs.append([result.tokens for result in harness.run([Job(p, 20) for p in prompts(9)])])
        used.append({key for key in graphs._step_runner.outputs if key.kind != "draft"})
    assert used[0] == used[1] == used[2]
    assert outputs[0] == outputs[1] == outputs[2]


def test_cap_accept_runs_what_a_live_cap_does_not_verify(folders, drafts):  # noqa: F811
    """So that it knows what would have been accepted."""

    def run(pieces: bool) -> list[tuple[list[int], int | None]]:
        harness = make(folders, drafts["dspark"], VerifyMode.CAP_ACCEPT)
        harness._worker.adaptive.planner.limit(3)
        harness._worker.adaptive.planner.pin(1.0)
        if pieces:
            in_pieces(harness)
        results = harness.run([Job(p, 40) for p in prompts(7)])
        assert all(record.plan.verify.full for record in harness.scheduler.records if record.num_reqs)
        return [(result.tokens, result.stats.num_uncapped_tokens) for result in results]

    expected = run(False)
    assert run(True) == expected
    assert sum(uncapped for _, uncapped in expected) > 7 * 40


def test_records_of_shorter_blocks(folders):  # noqa: F811
    """Captured drafts fill their whole block; records tell of as many as the width has."""
    harness = Harness(folders["target"], folders["dflash2"])
    harness.scheduler.keep_records(("core", "reqs"))
    graphs = in_pieces(harness)
    assert harness.scheduler.set_internal_state({"speculative_num_draft_tokens": 3}) is None
    harness._worker.drafter.gamma = WIDTH - 1  # as it was captured
    graphs.serves = lambda width: True
    harness.run([Job(p, 20, sampling={"temperature": i % 2, "seed": i}) for i, p in enumerate(prompts(3))])
    drafted = [
        record.draft_tokens
        for step in harness.scheduler.records
        for record in step.reqs
        if record.draft_tokens is not None
    ]
    assert len(drafted) > 10
    assert {len(tokens) for tokens in drafted} == {2}


@pytest.mark.parametrize("width", [1, 2, 8])
def test_what_is_captured_is_what_steps_ask_for(width):
    """For every batch and every number of rows a plan may give it, and nothing beyond."""
    grid = TierGrid(TierRule(width, 40, finest_tokens=8, relative=8, relative_reqs=4))
    asked = set()
    for num_reqs in range(1, 41):
        shapes = {(grid.plain_key(num_reqs), 1)}
        if width > 1:
            shapes |= {(grid.key(num_reqs, rows), width) for rows in range(num_reqs, num_reqs * width + 1)}
        for shape, rows in shapes:
            asked |= {PieceKey("verify", shape, rows), PieceKey("accept", shape, rows)}
            if rows > 1:
                full = TierKey(shape.num_slots, shape.num_slots * width)
                asked |= {
                    PieceKey("draft", full, width, sampled, signal)
                    for sampled in (False, True)
                    for signal in (False, True)
                }
    pieces = list(reachable_pieces(grid, width, (False, True)))
    assert set(pieces) == asked and len(pieces) == len(asked)


@pytest.mark.parametrize("mean", [1.0, 2.5, 3.0])
def test_simulated_acceptance_commits_what_was_asked_for(folders, mean):  # noqa: F811
    """Whatever the target says: so many tokens per step, on average and within one of it."""
    from flashspark.speculative.accept import AcceptRule

    def run(pieces: bool):
        harness = Harness(folders["target"], folders["dflash2"])
        harness._worker.rule = AcceptRule(mean - 1.0)
        harness._worker.graphs = None  # a GPU's have the rule they were built with
        if pieces:
            in_pieces(harness, EagerRunner())
        return harness.run([Job(p, 61, sampling={"ignore_eos": True}) for p in prompts(5)])

    for result in run(True) + run(False):
        steps = result.steps[:-1]
        assert set(steps) <= {int(mean), -int(-mean // 1)}
        assert sum(steps[:20]) == 20 * mean
