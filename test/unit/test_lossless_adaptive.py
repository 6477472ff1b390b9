"""Greedy losslessness of cap-accept and compact: pinned to any fraction and planned, the output is the plain one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.cost_table import SpsCostTable
from flashspark.speculative.tiers import TierGrid, TierRule
from harness import Harness, Job
from unit.test_lossless_tiny import assert_same, folders, plain, prompts  # noqa: F401 - fixtures

WIDTH = 6
MODES = [VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT]
# A step costs 4 rows and its own: trimming pays as soon as survival is low.
LINEAR = SpsCostTable(tuple(range(1, 400)), tuple(1000.0 / (4 + n) for n in range(1, 400)), 400)


def grid(max_reqs: int) -> TierGrid:
    return TierGrid(TierRule(WIDTH, max_reqs, finest_tokens=4))


@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_pinned(folders, plain, mode, fraction):  # noqa: F811
    harness = Harness(folders["target"], folders["dflash2"])
    harness.make_adaptive(mode, grid=grid(48)).planner.pin(fraction)
    jobs = [Job(p, 40) for p in prompts(12)]
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    first = harness.scheduler.records[0]
    assert first.plan.verify.budget == int(fraction * 12 * (WIDTH - 1))
    assert first.num_verify_tokens == 12 + first.plan.verify.budget
    rows_run = 12 * WIDTH if mode is VerifyMode.CAP_ACCEPT else first.plan.verify.num_tokens_run
    assert first.num_rows_run == rows_run


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_planned(folders, plain, mode):  # noqa: F811
    """A ready estimator and a table: most steps are trimmed, the output is the same."""
    harness = Harness(folders["target"], folders["dflash2"], max_total_tokens=512)
    adaptive = harness.make_adaptive(mode, LINEAR, grid(48), min_gain=0.0, draft_free=None)
    adaptive.source.num_refits = 100
    jobs = [Job(p, 40, arrive=i) for i, p in enumerate(prompts(12))]
    assert_same(plain, jobs, harness.run(jobs))
    decoded = [r for r in harness.scheduler.records if r.num_reqs]
    trimmed = [r for r in decoded if not r.plan.verify.full]
    assert len(trimmed) >= 0.2 * len(decoded)
    assert all(r.num_verify_tokens < r.num_reqs * WIDTH for r in trimmed)
    assert harness.scheduler.residency.num_retractions > 0


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


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(folders, plain, data):  # noqa: F811
    harness = Harness(
        folders["target"],
        folders["dflash2"],
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
            speculation=data.draw(st.sampled_from(["static", "off"])),
        )
        for _ in range(data.draw(st.integers(1, 14)))
    ]
    assert_same(plain, jobs, harness.run(jobs))
