"""Whole decode steps against what must hold of any: shapes, noise, shared layouts, and who waits for whom."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flashspark.attention.torch_native import TorchNativeBackend
from flashspark.speculative import layout as layout_stage
from flashspark.speculative.accept import accept
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.cost_table import CostCorrection
from flashspark.speculative.layout import full_rows, pack
from flashspark.speculative.relay import ConfidenceRelay
from flashspark.speculative.sampling import RowSampling, SamplingRows
from flashspark.speculative.tiers import TierGrid, TierRule
from flashspark.speculative.types import DraftBlock
from harness import Harness, Job
from planning import plan_input, planner_of
from unit.test_layout import CPU, GAMMA, GRID, MAX_REQS, batch_of, batches, check, packed, seeds
from unit.test_layout import WIDTH as LAYOUT_WIDTH
from unit.test_lossless_adaptive import DRAFTS, LINEAR, MODES, WIDTH, drafts, grid  # noqa: F401 - fixtures
from unit.test_lossless_tiny import folders, plain, prompts  # noqa: F401 - fixtures
from unit.test_plan_stages import verify_lens


def adaptive_harness(target, draft, mode, table=None, pin=None, **settings) -> Harness:
    harness = Harness(target, draft)
    adaptive = harness.make_adaptive(mode, table, grid(48), min_gain=0.0, draft_free=None, **settings)
    adaptive.source.num_refits = 100
    adaptive.planner.pin(pin)
    return harness


def mixed_jobs(length: int = 24) -> list[Job]:
    """Greedy and sampled, without seeds of their own, one after the other."""
    return [
        Job(p, length, arrive=i, sampling={"temperature": float(i % 2)}) for i, p in enumerate(prompts(12))
    ]


def decode_steps(harness: Harness):
    return [record for record in harness.scheduler.records if record.num_reqs]


# Static, and cap-accept with nothing cut


def logits_of(harness: Harness) -> list[torch.Tensor]:
    """Filled with what the target answers from now on."""
    seen, verify = [], harness._worker.runner.verify

    def watched(*args):
        seen.append(verify(*args))
        return seen[-1]

    harness._worker.runner.verify = watched
    return seen


@pytest.mark.parametrize("draft", DRAFTS)
def test_cap_accept_of_full_blocks_is_static_bit_for_bit(folders, drafts, draft, monkeypatch):  # noqa: F811
    static = Harness(folders["target"], drafts[draft])
    capped = adaptive_harness(folders["target"], drafts[draft], VerifyMode.CAP_ACCEPT, pin=1.0)
    calls = Counter()

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    answers = logits_of(static), logits_of(capped)
    expected = static.run(mixed_jobs())
    count(capped._worker.adaptive, "verify_lens")
    count(layout_stage, "full_rows")
    got = capped.run(mixed_jobs())
    assert [(r.tokens, r.steps, r.stats.accept_histogram) for r in got] == [
        (r.tokens, r.steps, r.stats.accept_histogram) for r in expected
    ]
    assert len(answers[0]) == len(answers[1])
    assert all(torch.equal(x, y) for x, y in zip(*answers, strict=True))
    records = decode_steps(capped)
    for record in records:
        pin = next(stage for stage in record.plan.record.stages if stage.name == "pin")
        assert (
            pin.ran or record.num_rows_run == record.num_reqs
        )  # the last token of everybody: nothing to pin
        assert record.plan.verify.full and record.plan.verify.budget is not None
        assert record.num_verify_tokens == record.num_rows_run == record.plan.verify.num_tokens
    assert calls["verify_lens"] == len(records)
    assert calls["full_rows"] == sum(r.num_rows_run == r.num_reqs * WIDTH for r in records) > 0
    assert sum(r.stats.num_verified for r in got) == sum(r.stats.num_verified for r in expected)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("draft", DRAFTS)
def test_two_runs_pinned_to_half_are_one(folders, drafts, draft, mode):  # noqa: F811
    runs = []
    for _ in range(2):
        harness = adaptive_harness(folders["target"], drafts[draft], mode, pin=0.5)
        results = harness.run(mixed_jobs())
        runs.append(
            (
                [(r.tokens, r.steps, r.stats) for r in results],
                [(r.num_reqs, r.num_verify_tokens, r.num_rows_run) for r in decode_steps(harness)],
            )
        )
    assert runs[0] == runs[1]
    assert sum(r.stats.num_verified for r in results) < sum(r.stats.num_drafted for r in results)


# What is shared between steps


def test_steps_leave_shared_layouts_as_they_were(folders, drafts):  # noqa: F811
    full_rows.cache_clear()
    made = {}
    original = layout_stage.full_rows

    def watched(*shape):
        packed = original(*shape)
        made.setdefault(shape, [t.clone() for t in vars(packed).values() if t is not None])
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_stage, "full_rows", watched)
        Harness(folders["target"], drafts["dflash2"]).run(mixed_jobs())
        adaptive_harness(folders["target"], drafts["dspark"], VerifyMode.COMPACT, LINEAR).run(mixed_jobs())
    assert len(made) > 3
    for shape, before in made.items():
        after = [t for t in vars(original(*shape)).values() if t is not None]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert full_rows.cache_info().misses == len(made)


def test_padding_rows_touch_nothing_but_the_scratch_page(folders, drafts):  # noqa: F811
    """Tiers of 16 rows: a trimmed step writes K/V at its own rows' slots, and in page 0."""
    harness = Harness(folders["target"], drafts["dflash2"])
    coarse = TierGrid(TierRule(WIDTH, 48, finest_tokens=16))
    harness.make_adaptive(VerifyMode.COMPACT, grid=coarse).planner.pin(0.3)
    runner, seen = harness._worker.runner, Counter()
    verify = runner.verify

    def watched(input_ids, queries):
        before = [pool.clone() for pool in (*runner.target_pool.k, *runner.draft_pool.v)]
        logits = verify(input_ids, queries)
        num_own = int(queries.qo_indptr[-1])
        written = queries.slots[:num_own]
        assert (written >= queries.page_size).all()
        for old, new in zip(before, (*runner.target_pool.k, *runner.draft_pool.v), strict=True):
            old[written], old[: queries.page_size] = new[written], new[: queries.page_size]
            assert torch.equal(old, new)
        seen["padding"] += len(input_ids) - num_own
        assert logits.isfinite().all()
        return logits

    runner.verify = watched
    harness.run([Job(p, 8) for p in prompts(3)])
    assert seen["padding"] > 20


# Acceptance and noise


def test_nan_past_the_cutoff_ends_no_request():
    """cap-accept computes rows that may not be accepted: whatever they hold, the answer is the same."""
    vocab_size, batch = 12, batch_of([(3, 2), (5, LAYOUT_WIDTH), (4, 1)], seed=1)
    sampling = SamplingRows(MAX_REQS, vocab_size, CPU)
    row_list = batch.rows.tolist()
    for row, temperature in zip(row_list, (0.0, 1.0, 1.0), strict=True):
        sampling.assign(row, RowSampling(seed=row, temperature=temperature, presence_penalty=0.5), [1], [], 0)
    step = sampling.begin_step(batch.rows, row_list, LAYOUT_WIDTH)
    tokens = batch.drafts % vocab_size
    draft = DraftBlock(tokens, tokens[..., None], torch.ones(3, GAMMA, 1))
    caps = torch.full((3,), LAYOUT_WIDTH)
    layout = pack(batch.state, batch.rows, tokens, caps, 3 * LAYOUT_WIDTH, full=True)
    logits = torch.randn(3 * LAYOUT_WIDTH, vocab_size, generator=torch.Generator().manual_seed(0))

    def answer():
        lens = batch.state.context_lens[batch.rows]
        return accept(logits, layout, draft, batch.lens, batch.rows, lens, sampling, step)

    before = answer()
    logits.view(3, LAYOUT_WIDTH, -1)[torch.arange(LAYOUT_WIDTH) >= batch.lens[:, None]] = float("nan")
    after = answer()
    assert before.is_finite.all() and after.is_finite.all()
    assert torch.equal(before.tokens, after.tokens) and torch.equal(before.num_tokens, after.num_tokens)
    logits[0] = float("nan")
    assert answer().is_finite.tolist() == [False, True, True]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_noise_of_the_next_step_does_not_depend_on_how_much_was_verified(data):
    rows, width = torch.tensor([2, 0]), 5
    uniforms = []
    committed = st.lists(st.integers(1, width), min_size=2, max_size=2)
    for lens in (data.draw(committed), data.draw(committed)):
        sampling = SamplingRows(3, 9, CPU)
        for row in (2, 0):
            sampling.assign(row, RowSampling(seed=7 + row), [1], [], 4)
        step = sampling.begin_step(rows, [2, 0], width)
        assert step.uniforms.shape == (2, width, 3)  # a whole block's, however much of it is verified
        sampling.commit(rows, step, torch.zeros(2, width, dtype=torch.int64), torch.tensor(lens))
        uniforms.append((step.uniforms, sampling.begin_step(rows, [2, 0], width).uniforms))
    for one, other in zip(*uniforms, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(*uniforms[0])


# Shapes


@settings(deadline=None, max_examples=80)
@given(
    lens=batches,
    seed=seeds,
    values=st.lists(
        st.sampled_from([0.0, 1e-9, 0.3, 0.9, 1.0, 7.0, float("nan")]),
        min_size=MAX_REQS * GAMMA,
        max_size=MAX_REQS * GAMMA,
    ),
)
def test_a_steps_shape_follows_from_its_plan_whatever_the_device_holds(lens, seed, values):
    """A rank whose confidence of this step went wrong runs the rows that were planned, no more and no fewer."""
    batch, n = batch_of(lens, seed), len(lens)
    planned = np.random.default_rng(seed).random((n, GAMMA), dtype=np.float32)
    plan = planner_of(GAMMA, table=LINEAR, grid=GRID, min_gain=0.0).plan(plan_input(planned))
    confidence = np.array(values[: n * GAMMA], dtype=np.float32).reshape(n, GAMMA)
    batch.lens = torch.tensor(verify_lens(plan, confidence))
    num_rows = plan.verify.num_tokens_run
    assert int(batch.lens.sum()) <= plan.verify.num_tokens <= num_rows == plan.verify.tier.num_tokens
    check(packed(batch, num_rows, padded=True), batch, num_rows)


def test_ranks_that_hear_rank_0s_times_plan_alike(folders, drafts):  # noqa: F811
    """Whatever a rank's own clock says. Its own times alone would change the shapes, which the last replica shows."""

    def replica(times=None):
        harness = adaptive_harness(folders["target"], drafts["dspark"], VerifyMode.COMPACT, LINEAR)
        planner = harness._worker.adaptive.planner
        planner.correction = CostCorrection(planner.grid.row_counts(), rate=0.1)
        observe, heard, handed = planner.observe_step, [], iter(times or [])

        def observe_step(plan, measured_seconds):
            heard.append(next(handed) if times else 1e-3 * (len(heard) % 3 + 1))
            observe(plan, heard[-1])

        planner.observe_step = observe_step
        harness.run(mixed_jobs())
        return heard, [(r.plan.verify, r.plan.record) for r in decode_steps(harness)]

    times, plans = replica()
    assert replica(times)[1] == plans
    assert any(not verify.full for verify, _ in plans)
    own = [seconds * (1 + i) for i, seconds in enumerate(times)]
    assert [v for v, _ in replica(own + own)[1]] != [v for v, _ in plans]


# Who waits for the device


READS = {
    *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "argwhere", "masked_select", "equal"),
    *("allclose", "bincount", "_unique2", "unique_dim", "unique_consecutive"),
}


class DeviceReads(TorchDispatchMode):
    """Counts, while `watching`, what would make the host wait for a device, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.watching = Counter(), False

    def note(self, name: str) -> None:
        if self.watching:
            self.counts[name] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        by_tensor = name == "repeat_interleave" and func._overloadname != "self_int"
        unknown_size = by_tensor and (kwargs or {}).get("output_size") is None
        if name in READS or (name == "where" and len(args) == 1) or by_mask or unknown_size:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def while_in(self, patch, owner, name: str, watching: bool) -> None:
        """Watches during calls of `owner.name`, or looks away during them."""
        function = getattr(owner, name)

        def wrapped(*args, **kwargs):
            before, self.watching = self.watching, watching
            try:
                return function(*args, **kwargs)
            finally:
                self.watching = before

        patch.setattr(owner, name, wrapped)


@contextmanager
def device_reads(harness: Harness):
    """Watches from the plan to where the tokens' copy has been started.

    Exempt are the wait for the relay, and the CPU's attention backend, which is made of host loops.
    """
    reads = DeviceReads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "cpu", "__array__"):
            original = getattr(torch.Tensor, name)

            def noted(*args, _name=name, _original=original, **kwargs):
                reads.note(_name)
                return _original(*args, **kwargs)

            patch.setattr(torch.Tensor, name, noted)
        for name in ("ragged", "block"):
            reads.while_in(patch, TorchNativeBackend, name, watching=False)
        reads.while_in(patch, ConfidenceRelay, "resolve", watching=False)
        reads.while_in(patch, harness.scheduler._decoding, "_launch", watching=True)
        with reads:
            yield reads.counts


def all_kinds_of_jobs() -> list[Job]:
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "logit_bias": {7: 1.0}},
        {"presence_penalty": 0.5, "min_new_tokens": 3, "stop_token_ids": (9,)},
    ]
    jobs = [Job(p, 24, arrive=i, sampling=kinds[i]) for i, p in enumerate(prompts(5))]
    return [*jobs, Job(prompts(3)[2], 24, speculation="off")]


@pytest.mark.parametrize("mode", [None, *MODES], ids=lambda mode: mode.value if mode else "static")
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_step_waits_for_the_device_before_its_tokens(folders, drafts, draft, mode):  # noqa: F811
    if mode is None:
        harness = Harness(folders["target"], drafts[draft])
    else:
        harness = adaptive_harness(folders["target"], drafts[draft], mode, LINEAR)
    with device_reads(harness) as counts:
        harness.run(all_kinds_of_jobs())
    assert counts == {}
    steps = decode_steps(harness)
    assert len(steps) >= 20  # among them steps that refit the estimator
    if mode is not None:
        assert any(not record.plan.verify.full for record in steps)


@pytest.mark.parametrize("read", [lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: t[t > 1]])
def test_a_step_that_waits_is_noticed(folders, drafts, read):  # noqa: F811
    harness = adaptive_harness(folders["target"], drafts["dflash2"], VerifyMode.COMPACT, LINEAR)
    honest = harness._worker.adaptive.verify_lens

    def verify_lens(plan, confidence):
        lens = honest(plan, confidence)
        read(lens)
        return lens

    harness._worker.adaptive.verify_lens = verify_lens
    with device_reads(harness) as counts:
        harness.run(mixed_jobs(4)[:2])
    assert sum(counts.values()) == len(decode_steps(harness))


# Memory


def test_steps_leave_no_cycles_to_the_garbage_collector(folders):  # noqa: F811
    """Full passes are rare while a server is busy, so what steps drop must go by its reference count."""
    harness = adaptive_harness(folders["target"], folders["dflash2"], VerifyMode.COMPACT, LINEAR)
    jobs = [*mixed_jobs(), Job(prompts(1)[0], 24, abort=5)]
    harness.run(jobs)  # what runs for the first time may leave some
    gc.collect()
    gc.disable()
    try:
        harness.run(jobs)
        assert gc.collect() == 0
    finally:
        gc.enable()
