"""What a request and the log say of trimming: counted step by step, and equal to the records' sums."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from flashspark.api.generation import spec_details
from flashspark.ipc import SpeculativeStats
from flashspark.scheduler.step_record import StepRecord, decode_log_line, plan_log_line, plan_outcome
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.cost_table import PlainStepCosts, SpsCostTable
from flashspark.speculative.plan_stages import DraftFreeRule
from harness import Harness, Job
from planning import CONFIDENCE, plan_input, planner_of
from unit.test_lossless_adaptive import LINEAR, WIDTH, grid
from unit.test_lossless_tiny import folders, plain, prompts  # noqa: F401 - fixtures

MODES = [VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT]


def check_sums(harness: Harness, results) -> None:
    """Everything that requests count, added up, is what the step records say."""
    records = [record for record in harness.scheduler.records if record.num_reqs]
    drafted = [record for record in records if record.plan.draft]
    for result in results:
        stats = result.stats
        assert sum(stats.verify_histogram) == sum(stats.accept_histogram) == stats.num_verify_steps
        assert (
            sum((length - 1) * count for length, count in enumerate(stats.verify_histogram))
            == stats.num_verified
        )
        assert sum(i * count for i, count in enumerate(stats.accept_histogram)) == stats.num_accepted
        assert stats.verify_histogram[0] == 0
        assert stats.num_accepted <= stats.num_verified <= stats.num_drafted
        assert stats.num_accepted + stats.num_verify_steps == len(result.tokens)

    def total(of):
        return sum(of(result.stats) for result in results)

    assert total(lambda s: s.num_verify_steps) == sum(record.num_reqs for record in records)
    rows = total(lambda s: sum(length * count for length, count in enumerate(s.verify_histogram)))
    assert rows == sum(record.num_verify_tokens for record in records)
    assert total(lambda s: s.num_drafted) <= sum(record.num_reqs for record in drafted) * (WIDTH - 1)
    totals = harness.scheduler.totals
    assert totals["verify_tokens"] == rows
    assert totals["trimmed_steps"] == sum(not record.plan.verify.full for record in drafted)
    assert totals["draft_free_steps"] == len(records) - len(drafted)
    state = harness.scheduler.verification_state()
    assert state["avg_spec_cap_length"] == pytest.approx(rows / totals["verify_steps"])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_planned_and_trimmed(folders, mode):  # noqa: F811
    harness = Harness(folders["target"], folders["dflash2"], max_total_tokens=512)
    adaptive = harness.make_adaptive(mode, LINEAR, grid(48), min_gain=0.0, draft_free=None)
    adaptive.source.num_refits = 100
    results = harness.run([Job(p, 40, arrive=i) for i, p in enumerate(prompts(12))])
    check_sums(harness, results)
    assert harness.scheduler.totals["trimmed_steps"] > 0
    assert harness.scheduler.residency.num_retractions > 0
    lengths = np.sum([result.stats.verify_histogram for result in results], axis=0)
    assert len(lengths) == WIDTH + 1
    assert (lengths > 0).sum() >= 3


def test_steps_without_a_draft(folders):  # noqa: F811
    """They verify the anchor, draft nothing, and are probed; what is known is learned from before each run of them."""
    harness = Harness(folders["target"], folders["dflash2"])
    rule = DraftFreeRule(patience=2, probe_every=5, probe_every_most=5)
    adaptive = harness.make_adaptive(VerifyMode.COMPACT, LINEAR, grid(48), draft_free=rule)
    adaptive.planner.plain_costs = PlainStepCosts((1, 48), (1e-6, 2e-6))
    adaptive.source.num_refits = 100
    caught_up, catch_up = [], adaptive.source.catch_up
    adaptive.source.catch_up = lambda: (caught_up.append(adaptive.source.num_steps), catch_up())
    results = harness.run([Job(p, 40) for p in prompts(12)])
    check_sums(harness, results)
    drafts = [record.plan.draft for record in harness.scheduler.records if record.num_reqs]
    assert len(caught_up) == sum(then and not now for then, now in itertools.pairwise(drafts)) > 1
    records = [record for record in harness.scheduler.records if record.num_reqs]
    plain_steps = [record for record in records if not record.plan.draft]
    assert len(plain_steps) > len(records) / 2
    assert all(
        r.num_verify_tokens == r.num_output_tokens == r.num_rows_run == r.num_reqs for r in plain_steps
    )
    # A drafted step proposes what is worth proposing to each: nothing where one token is left.
    assert all(r.stats.num_drafted < r.stats.num_verify_steps * (WIDTH - 1) for r in results)


def test_static_says_nothing_of_caps(folders):  # noqa: F811
    harness = Harness(folders["target"], folders["dflash2"])
    (result,) = harness.run([Job(prompts(3)[2], 20)])
    assert result.stats.verify_histogram == []
    assert not [name for name in spec_details(choice_of(result.stats)) if "cap" in name]


def choice_of(stats: SpeculativeStats) -> SimpleNamespace:
    return SimpleNamespace(token_ids=[5] * 9, speculative=stats)


def test_answers_carry_sglangs_names():
    details = spec_details(choice_of(SpeculativeStats(4, 28, 9, 5, [1, 2, 0, 1], [0, 1, 0, 1, 2])))
    assert details["spec_cap_length"] == (1 + 3 + 2 * 4) / 4
    assert details["spec_cap_lens_histogram"] == [0, 1, 0, 1, 2]
    assert details["spec_accept_rate"] == 5 / 28
    assert "spec_block_accept_length" not in details
    uncapped = SpeculativeStats(4, 28, 9, 5, [1, 2, 0, 1], [0, 1, 0, 1, 2], num_uncapped_tokens=11)
    assert spec_details(choice_of(uncapped))["spec_block_accept_length"] == 11 / 4


CHEAP = SpsCostTable((1, 4, 8, 12), (100.0, 99.9, 99.8, 99.7), 12)
STEEP = SpsCostTable((1, 4, 8, 12), (100.0, 90.0, 20.0, 10.0), 12)


@pytest.mark.parametrize(
    ("planner", "batch", "outcome"),
    [
        (planner_of(table=STEEP), {}, "trimmed"),
        (planner_of(table=CHEAP), {}, "full (it is the best)"),
        (planner_of(min_gain=9.0), {}, "full (gain is too small)"),
        (planner_of(table=None), {}, "full (no cost table)"),
        (planner_of(), {"relayed": False}, "full (no confidence old enough)"),
        (planner_of(), {"caps": [1, 1, 1]}, "full (nothing to trim)"),
        (
            planner_of(
                plain_costs=PlainStepCosts((1, 3), (1e-6, 1e-6)), draft_free=DraftFreeRule(patience=1)
            ),
            {},
            "draft-free",
        ),
    ],
)
def test_outcomes_of_plans(planner, batch, outcome):
    assert plan_outcome(planner.plan(plan_input(CONFIDENCE, **batch))) == outcome


def test_a_pinned_plan_says_so():
    planner = planner_of()
    planner.pin(1.0)
    assert plan_outcome(planner.plan(plan_input(CONFIDENCE))) == "pinned"


def record_of(planner, **batch) -> StepRecord:
    plan = planner.plan(plan_input(CONFIDENCE, **batch))
    return StepRecord(
        num_reqs=3, num_verify_tokens=8, num_output_tokens=6, step_ms=30.0, decode_ms=25.0, plan=plan
    )


def test_log_lines():
    records = [record_of(planner_of(table=STEEP)) for _ in range(3)] + [record_of(planner_of(table=None))]
    line = decode_log_line(records, 3, 64, 128, 2)
    for part in ("accept len: 2.00, accept rate: 0.33, cap len: 2.67, ", "#running-req: 3", "#queue-req: 2"):
        assert part in line, line
    summary = plan_log_line(records)
    assert summary.startswith(
        "Verify plans of 4 steps: 3 trimmed, 1 full (no cost table), a step takes 25.0 ms, "
    )
    predicted_ms = 1e3 * records[0].plan.record.predicted_step_seconds
    assert summary.endswith(f"predicted {predicted_ms:.1f}")
    static = [StepRecord(num_reqs=3, num_verify_tokens=12, num_output_tokens=6, step_ms=30.0)]
    assert "cap len" not in decode_log_line(static, 3, 64, 128, 2)
    assert plan_log_line(static) is None


def test_lines_appear_at_the_log_interval(folders, caplog):  # noqa: F811
    caplog.set_level(logging.INFO)
    harness = Harness(folders["target"], folders["dflash2"])
    object.__setattr__(harness.scheduler.limits, "decode_log_interval", 5)
    harness.make_adaptive(VerifyMode.COMPACT, LINEAR, grid(48))
    harness.run([Job(prompts(3)[2], 60)])
    plans = [record.message for record in caplog.records if record.message.startswith("Verify plans")]
    assert len(plans) >= 2
    assert plans[0] == "Verify plans of 5 steps: 5 full (no confidence old enough)"
    assert sum("cap len: 6.00" in record.message for record in caplog.records) >= 2
