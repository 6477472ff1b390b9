"""Greedy losslessness of cap-accept and compact: pinned to any fraction and planned, the output is the plain one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashspark.scheduler.step_record import StepRecord
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.cost_table import PlainStepCosts, SpsCostTable
from flashspark.speculative.plan_stages import DraftFreeRule
from flashspark.speculative.tiers import TierGrid, TierRule
from harness import Harness, Job
from tiny_models import VOCAB_SIZE, write_dspark
from unit.test_lossless_dspark import followers, learn_by_heart
from unit.test_lossless_tiny import assert_same, folders, plain, prompts  # noqa: F401 - fixtures

WIDTH = 6
MODES = [VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT]
DRAFTS = ["dflash2", "dspark"]
# A step costs 4 rows and its own: trimming pays as soon as survival is low.
LINEAR = SpsCostTable(tuple(range(1, 400)), tuple(1000.0 / (4 + n) for n in range(1, 400)), 400)
# Small pages, so that requests ask for more on the way: 6 and more retractions in `one_to_32`, whatever is drafted, and
# whether steps overlap or not.
SMALL_POOL = {"max_total_tokens": 1040, "page_size": 4, "disable_radix_cache": True}


def grid(max_reqs: int) -> TierGrid:
    return TierGrid(TierRule(WIDTH, max_reqs, finest_tokens=4))


@pytest.fixture(scope="module")
def drafts(folders, plain, tmp_path_factory):  # noqa: F811
    """A random DFlash2, and a DSpark whose head knows much of the plain outputs by heart."""
    folder = write_dspark(tmp_path_factory.mktemp("dspark"), folders["target"], markov_rank=VOCAB_SIZE)
    learn_by_heart(folder / "model.safetensors", "vanilla", followers(plain[1]))
    return {"dflash2": folders["dflash2"], "dspark": folder}


def make(folders, draft, mode, table=None, **settings) -> Harness:  # noqa: F811
    """48 rows and a pool that 32 requests outgrow; an estimator that is ready from the start."""
    harness = Harness(folders["target"], draft, **SMALL_POOL)
    adaptive = harness.make_adaptive(mode, table, grid(48), min_gain=0.0, draft_free=None, **settings)
    adaptive.source.num_refits = 100
    return harness


def one_to_32() -> list[Job]:
    """Requests that come eight at a time until 30 and more run, three aborted on the way; the last are alone."""
    short = [prompts(12)[i] for i in (0, 11, 6, 1, 7, 2)]
    jobs = [Job(short[i % 6], 40 - i // 2, arrive=(i + 7) // 8) for i in range(36)]
    for i in (1, 12, 23):
        jobs[i].abort = jobs[i].arrive + 7
    return jobs


def check_schedule(harness: Harness) -> list[StepRecord]:
    """Batches of all sizes, retractions and aborts did occur. Returns the decode steps."""
    records = [record for record in harness.scheduler.records if record.num_reqs]
    sizes = {record.num_reqs for record in records}
    assert min(sizes) == 1 and max(sizes) >= 30 and len(sizes) >= 12, sorted(sizes)
    assert harness.scheduler.residency.num_retractions > 0
    assert harness.scheduler.totals["aborted_mid_block"] == 3
    return records


@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("draft", DRAFTS)
def test_pinned(folders, drafts, plain, draft, mode, fraction):  # noqa: F811
    harness = make(folders, drafts[draft], mode)
    harness._worker.adaptive.planner.pin(fraction)
    jobs = one_to_32()
    assert_same(plain, jobs, harness.run(jobs))
    records = check_schedule(harness)
    whole = [record for record in records if record.num_full_tokens == int(record.plan.caps.sum())]
    assert len(whole) > 0.4 * len(records)
    for record in records:
        n, verify = record.num_reqs, record.plan.verify
        room = int((record.plan.caps - record.plan.floors).sum())
        assert verify.budget == min(int(fraction * n * (WIDTH - 1)), room)
        # Of an overlapped step the device cuts off what lies past requests' ends.
        assert n <= record.num_verify_tokens <= n + verify.budget
        assert record.num_verify_tokens == n + verify.budget or record not in whole
        if mode is VerifyMode.CAP_ACCEPT:
            assert record.num_rows_run == int(record.plan.caps.sum())
        else:
            assert record.num_rows_run == verify.tier.num_tokens


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("draft", DRAFTS)
def test_planned(folders, drafts, plain, draft, mode):  # noqa: F811
    """Confidence and a table: most steps are trimmed, the output is the same."""
    harness = make(folders, drafts[draft], mode, LINEAR)
    jobs = one_to_32()
    assert_same(plain, jobs, harness.run(jobs))
    records = check_schedule(harness)
    trimmed = [record for record in records if not record.plan.verify.full]
    assert len(trimmed) >= 0.2 * len(records)
    assert all(record.num_verify_tokens < int(record.plan.caps.sum()) for record in trimmed)
    num_verified = sum(record.num_verify_tokens for record in records)
    assert num_verified < WIDTH * sum(record.num_reqs for record in records)


def test_cap_accept_at_full_budget_is_static(folders):  # noqa: F811
    jobs = [Job(p, 30, sampling={"temperature": 1.0}) for p in prompts(12)]
    static = Harness(folders["target"], folders["dflash2"]).run(jobs)
    harness = Harness(folders["target"], folders["dflash2"])
    harness.make_adaptive(VerifyMode.CAP_ACCEPT).planner.pin(1.0)
    capped = harness.run(jobs)
    assert [r.tokens for r in capped] == [r.tokens for r in static]
    assert [r.steps for r in capped] == [r.steps for r in static]
    assert all(record.plan is not None for record in harness.scheduler.records if record.num_reqs)


def test_a_seeded_request_is_never_trimmed(folders):  # noqa: F811
    seeded = {"temperature": 1.0, "seed": 3}
    probe = Job(prompts(12)[9], 30, sampling=seeded)
    mates = [Job(p, 30, sampling={"temperature": 1.0}) for p in prompts(8)]
    alone = Harness(folders["target"], folders["dflash2"]).run([probe])[0]
    harness = Harness(folders["target"], folders["dflash2"])
    harness.make_adaptive(VerifyMode.COMPACT, grid=grid(48)).planner.pin(0.05)
    result = harness.run([*mates, probe])[-1]
    assert result.tokens == alone.tokens
    assert result.stats.num_verified == alone.stats.num_verified


def knobs() -> list[Job]:
    """Every mode with every limit, in one batch."""
    asked = [("off", None), *((mode, k) for mode in ("adaptive", "static") for k in (None, 1, 2, 4, WIDTH))]
    return [
        Job(prompt, 36, speculation=mode, max_verify_len=longest)
        for prompt, (mode, longest) in zip(prompts(12), asked, strict=False)
    ]


@pytest.mark.parametrize("mode", [None, *MODES], ids=lambda mode: mode.value if mode else "static")
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_mixed_batch_honours_what_each_request_asks_of_the_draft(folders, drafts, plain, draft, mode):  # noqa: F811
    if mode is None:
        harness = Harness(folders["target"], drafts[draft])
    else:
        harness = make(folders, drafts[draft], mode)
        harness._worker.adaptive.planner.pin(0.05)  # two drafts per step for all that may be trimmed
    jobs = knobs()
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    for job, result in zip(jobs, results, strict=True):
        stats, longest = result.stats, 1 if job.speculation == "off" else job.max_verify_len or WIDTH
        assert all(count == 0 for count in stats.accept_histogram[longest:])
        if longest == 1:
            assert (stats.num_verify_steps, stats.num_drafted, stats.num_verified) == (36, 0, 0)
        if mode is not None:
            assert all(count == 0 for count in stats.verify_histogram[longest + 1 :])
        if mode is None or job.speculation == "static":  # full blocks, but for the last step's tokens
            assert stats.num_verified >= (stats.num_verify_steps - longest) * (longest - 1)
        if mode is not None and job.speculation == "adaptive" and job.max_verify_len is None:
            assert stats.num_verified < 0.5 * stats.num_verify_steps * (WIDTH - 1)


def test_full_blocks_are_not_given_up_for_steps_without_a_draft(folders):  # noqa: F811
    """A plan that would decode everything plainly drafts for the one request that asked for full blocks."""
    harness = Harness(folders["target"], folders["dflash2"])
    adaptive = harness.make_adaptive(
        VerifyMode.COMPACT, LINEAR, grid(48), draft_free=DraftFreeRule(patience=1)
    )
    adaptive.source.num_refits = 100
    adaptive.planner.plain_costs = PlainStepCosts((1, 48), (1e-6, 1e-6))  # a plain step costs nothing
    mates = [Job(p, 30) for p in prompts(3)]
    planned = harness.run([*mates, Job(prompts(4)[3], 30)])[-1]
    assert planned.stats.num_drafted < 10 * (WIDTH - 1)
    asked = harness.run([*mates, Job(prompts(4)[3], 30, speculation="static")])[-1]
    assert asked.tokens == planned.tokens
    assert asked.stats.num_drafted >= (asked.stats.num_verify_steps - 1) * (WIDTH - 1)
    assert asked.stats.num_verified >= (asked.stats.num_verify_steps - WIDTH) * (WIDTH - 1)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(folders, drafts, plain, data):  # noqa: F811
    harness = Harness(
        folders["target"],
        drafts[data.draw(st.sampled_from(DRAFTS))],
        max_total_tokens=data.draw(st.integers(8, 40)) * 16,
        max_running_requests=data.draw(st.integers(1, 8)),
    )
    adaptive = harness.make_adaptive(
        data.draw(st.sampled_from(MODES)), LINEAR, grid(8), min_drafts_every=data.draw(st.integers(0, 3))
    )
    adaptive.planner.pin(data.draw(st.sampled_from([None, 0.1, 0.3, 0.7])))
    adaptive.source.num_refits = data.draw(st.sampled_from([0, 100]))
    jobs = [
        Job(
            prompts(12)[data.draw(st.integers(0, 11))],
            max_new_tokens=data.draw(st.integers(1, 40)),
            arrive=data.draw(st.integers(0, 30)),
            abort=data.draw(st.none() | st.integers(30, 50)),
            speculation=data.draw(st.sampled_from(["adaptive", "static", "off"])),
            max_verify_len=data.draw(st.none() | st.integers(1, WIDTH)),
        )
        for _ in range(data.draw(st.integers(1, 14)))
    ]
    assert_same(plain, jobs, harness.run(jobs))
