"""The stages around the argmax, one by one and in the planner: what each changes, and what it says about it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.kernels.allocate import allocate
from flashspark.speculative.cost_table import CostCorrection, PlainStepCosts, SpsCostTable, price_budgets
from flashspark.speculative.objective import best_budget, candidates, survivals
from flashspark.speculative.plan_stages import (
    DraftFreeRule,
    DraftFreeState,
    draft_free_choice,
    fairness_floors,
    full_block_floors,
    gain_guard,
    tier_fill,
    trimming_is_idle,
)
from flashspark.speculative.tiers import TierGrid, TierKey, TierRule
from planning import CONFIDENCE, GRID, TABLE, full, plan_input, planner_of, stage

EPS = 1e-6
STEEP = SpsCostTable(
    tuple(range(1, 33)), tuple(100.0 / t for t in range(1, 33)), 32
)  # every row costs the same


def verify_lens(plan, confidence):
    """What the device makes of a plan."""
    if plan.verify.full:
        return plan.caps.tolist()
    floors, caps = torch.from_numpy(plan.floors), torch.from_numpy(plan.caps)
    return allocate(torch.from_numpy(confidence), plan.verify.budget, floors, caps, EPS).tolist()


# Floors


def test_who_keeps_its_block_keeps_it_whatever_its_mates_do():
    floors, record = full_block_floors(full(3, 1), np.array([4, 4, 2]), np.array([False, True, True]))
    assert floors.tolist() == [1, 4, 2] and record.ran and record.changed
    floors, record = full_block_floors(full(2, 1), full(2, 4), np.array([False, False]))
    assert floors.tolist() == [1, 1] and (record.ran, record.reason) == (False, "no request keeps its block")
    rng = np.random.default_rng(0)
    for _ in range(50):
        confidence = rng.random((3, 3), dtype=np.float32)
        plan = planner_of(table=STEEP, grid=None, min_gain=0.0).plan(plan_input(confidence, keeps_block=[1]))
        assert verify_lens(plan, confidence)[1] == 4
        assert plan.verify.num_tokens == 6 + plan.verify.budget  # its block is in the step, and priced


def test_fairness_floor_raises_only_those_who_waited_and_only_to_one_draft():
    floors, record = fairness_floors(
        np.array([1, 1, 3, 1]), np.array([4, 4, 4, 1]), np.array([4, 3, 9, 9]), 4
    )
    assert floors.tolist() == [2, 1, 3, 1] and record.changed
    floors, record = fairness_floors(full(2, 1), full(2, 4), full(2, 0), 4)
    assert (record.ran, record.changed, record.reason) == (True, False, "nobody waits")
    assert not fairness_floors(full(2, 1), full(2, 4), full(2, 99), 0)[1].ran


@pytest.mark.parametrize(("every", "longest_wait"), [(5, 5), (0, 60)])
def test_no_request_is_held_at_one_token_for_ever(every, longest_wait):
    confidence = np.array([[0.95, 0.9, 0.9], [0.01, 0.5, 0.5]], dtype=np.float32)
    planner = planner_of(table=STEEP, grid=None, min_drafts_every=every, min_gain=0.0)
    waited, longest = np.zeros(2, dtype=np.int64), 0
    for _ in range(60):
        plan = planner.plan(plan_input(confidence, waited=waited))
        starved = np.array(verify_lens(plan, confidence)) == 1
        waited = np.where(starved, waited + 1, 0)
        longest = max(longest, int(waited[1]))
    assert longest == longest_wait


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_floors_that_are_priced_are_never_worse_than_floors_added_afterwards(seed):
    """Why floors come before the argmax: the budget chosen without them is the best of another step."""
    rng = np.random.default_rng(seed)
    confidence = rng.random((4, 3), dtype=np.float32)
    floors = np.where(rng.random(4) < 0.5, 4, 1)
    rates = tuple(np.sort(rng.uniform(5, 100, 16))[::-1].tolist())
    table = SpsCostTable(tuple(range(1, 17)), rates, 16)
    survival = survivals(confidence, np.ones(4, dtype=bool))
    first = candidates(survival, floors, full(4, 4), 0.0)
    free = int(floors.sum())
    tau = first.expected_tokens()
    theta = tau / price_budgets(table, 4, free, 16 - free).seconds
    unaware = candidates(survival, full(4, 1), full(4, 4), 0.0).expected_tokens()
    budget = best_budget(unaware, price_budgets(table, 4, 4, 12).seconds)
    lens = allocate(
        torch.from_numpy(confidence), budget, torch.ones(4, dtype=torch.int64), torch.full((4,), 4), 0.0
    )
    afterwards = int(np.maximum(lens.numpy(), floors).sum()) - free
    assert theta[best_budget(tau, price_budgets(table, 4, free, 16 - free).seconds)] >= theta[afterwards]


# Small batch, guard, fill


def test_small_batch_rule_looks_at_tiers_not_at_budgets():
    tiers = TierGrid(TierRule(width=4, max_num_reqs=8, finest_tokens=16)).tiers(3)
    assert tiers.num_tokens.tolist() == [12]
    idle, record = trimming_is_idle(tiers, 3, 9)
    assert idle and (record.reason, record.changed) == ("one tier for all budgets", True)
    idle, record = trimming_is_idle(GRID.tiers(3), 3, 9)
    assert not idle and (record.ran, record.changed) == (True, False)
    assert trimming_is_idle(GRID.tiers(3), 12, 0)[0]  # nothing left to trim
    assert trimming_is_idle(None, 3, 9)[0] is False
    plan = planner_of(grid=GRID).plan(plan_input(CONFIDENCE[:1]))  # n = 1: always
    assert (plan.verify.budget, plan.verify.full, plan.verify.tier) == (3, True, TierKey(1, 4))
    assert [stage(plan, name).ran for name in ("argmax", "gain guard", "tier fill")] == [False] * 3
    assert plan.record.expected_tokens == pytest.approx(1 + 0.9 + 0.72 + 0.36)  # still predicted


def test_gain_guard_trims_for_a_gain_only():
    assert gain_guard(5, 103.0, 9, 100.0, 0.02)[0] == 5
    budget, record = gain_guard(5, 101.0, 9, 100.0, 0.02)
    assert (budget, record.changed, record.reason) == (9, True, "gain is too small")
    assert gain_guard(5, 100.0, 9, 100.0, 0.0)[0] == 5
    assert not gain_guard(9, 100.0, 9, 100.0, 0.5)[1].ran
    # 591.3 against 471.6 tokens/s is a gain of 25.4 %.
    assert planner_of(min_gain=0.25).plan(plan_input(CONFIDENCE)).verify.budget == 5
    plan = planner_of(min_gain=0.26).plan(plan_input(CONFIDENCE))
    assert (plan.verify.budget, plan.verify.full, plan.record.argmax_budget) == (9, True, 5)
    assert plan.record.predicted_theta == pytest.approx(471.6)


def test_tier_fill_verifies_drafts_where_padding_was_paid_for():
    budget, record = tier_fill(3, 3, 9, GRID.tiers(3))
    assert (budget, record.changed) == (5, True)
    assert tier_fill(5, 3, 9, GRID.tiers(3))[1].reason == "no padding"
    assert not tier_fill(3, 3, 9, None)[1].ran
    # Three drafts have a chance, and the tier that holds them has room for two of those that have none.
    hopeless = CONFIDENCE.copy()
    hopeless[:, 1:] = 0.0
    plan = planner_of().plan(plan_input(hopeless))
    assert (plan.record.argmax_budget, plan.verify.budget, plan.verify.tier) == (3, 5, TierKey(3, 8))


# Draft-free steps


RULE = DraftFreeRule(
    enter_gain=0.05, leave_gain=0.0, patience=3, probe_every=4, probe_every_most=4, probe_length=2
)


def choices(rule, thetas, state=None):
    state, taken = state or DraftFreeState(), []
    for plain, drafted in thetas:
        choice, state, record = draft_free_choice(rule, state, plain, drafted)
        taken.append((choice, record.reason))
    return taken, state


def test_entering_takes_a_margin_and_patience():
    taken, _ = choices(RULE, [(104.0, 100.0)] * 10)
    assert taken == [(False, "drafting wins")] * 10
    taken, _ = choices(RULE, [(106.0, 100.0)] * 2 + [(90.0, 100.0)] + [(106.0, 100.0)] * 3)
    assert [choice for choice, _ in taken] == [False] * 5 + [True]


def test_once_in_it_stays_until_drafting_really_wins_and_probes():
    taken, state = choices(RULE, [(106.0, 100.0)] * 3 + [(101.0, 100.0)] * 9)
    names = [reason for _, reason in taken]
    assert names[:2] == ["waiting"] * 2
    assert names[2:] == ["plain decoding wins"] * 4 + ["probe"] * 2 + ["plain decoding wins"] * 4
    assert state.active
    (last,), state = choices(RULE, [(99.0, 100.0)], state)
    assert last == (False, "drafting wins again") and state == DraftFreeState()


def test_a_clear_gain_is_acted_on_at_once_and_a_small_one_in_proportion():
    for gain, waits in ((0.5, 0), (0.4, 0), (0.3, 1), (0.1, 3), (0.05, 7)):
        taken, _ = choices(DraftFreeRule(), [(100.0 * (1.0 + gain), 100.0)] * 9)
        assert [reason for _, reason in taken[: waits + 1]] == ["waiting"] * waits + ["plain decoding wins"]


@settings(max_examples=60, deadline=None)
@given(gain=st.floats(0.0, 5.0), ratio=st.floats(0.3, 20.0), share=st.floats(0.002, 0.1))
def test_probes_cost_their_share_of_a_long_draft_free_time_and_come_in_time(gain, ratio, share):
    """A step of a probe takes `ratio` plain ones, in which plain decoding had given 1 + `gain` times its tokens."""
    rule = DraftFreeRule(probe_share=share)
    state, taken = DraftFreeState(True), []
    for _ in range(2000):
        choice, state, _ = draft_free_choice(rule, state, 100.0 * (1.0 + gain), 100.0, ratio)
        taken.append(choice)
    probed = [step for step, choice in enumerate(taken) if not choice]
    between = np.diff(probed)
    assert set(between.tolist()) <= {1, between.max()} and 64 < between.max() <= 257
    lost = len(probed) * ratio * gain / (1.0 + gain)
    if between.max() < 257:
        assert lost <= max(1.3 * share, 2 * ratio * gain / (1.0 + gain) / 64) * 2000
    else:
        assert lost / len(probed) * 2 / 256 >= share * 0.99  # else it would have come sooner


def test_a_price_that_is_never_paid_is_tried_now_and_then_and_sooner_where_it_loses_little():
    rule = DraftFreeRule(try_every=5, try_every_least=2, try_length=2, try_share=0.5)
    taken, _ = choices(rule, [(50.0, 100.0)] * 18)
    assert [step for step, (choice, _) in enumerate(taken) if choice] == [5, 6, 12, 13]
    assert taken[5] == (True, "trying its price")
    assert not any(choice for choice, _ in choices(rule, [(49.0, 100.0)] * 18)[0])
    taken, _ = choices(rule, [(104.0, 100.0)] * 8)
    assert [step for step, (choice, _) in enumerate(taken) if choice] == [2, 3, 6, 7]
    assert [DraftFreeRule().steps_to_try(share) for share in (0.5, 0.75, 0.9, 1.0, 1.04)] == [
        *(256, 128, 64, 64, 64)
    ]


@pytest.mark.parametrize("lag", [0, 1])
def test_one_slow_plain_step_does_not_end_draft_free_decoding(lag):
    """The first of its kind takes a hundred times its price, and plain decoding is 30 % ahead. `lag`: steps that are
    planned before a step's time is known."""
    poor = np.full((3, 3), 0.3, dtype=np.float32)
    planner = planner_of(
        plain_costs=PlainStepCosts((1, 3), (0.0053, 0.0053)),
        plain_correction=CostCorrection(np.array([3]), rate=0.125, median_of=3),
    )
    plain, waiting = [], []
    for _ in range(60):
        plan = planner.plan(plan_input(poor))
        seconds = plan.record.table_step_seconds * (1 if plan.draft or any(plain) else 100)
        plain.append(not plan.draft)
        waiting.append((plan, seconds))
        if len(waiting) > lag:
            planner.observe_step(*waiting.pop(0))
    assert plain[1:] == [True] * 59


def test_a_batch_whose_texts_change_finds_back_to_drafting():
    """Draft-free for long, since drafts were hopeless. Confidence is what the last two drafted steps relayed."""
    poor, good = np.full((3, 3), 0.02, dtype=np.float32), np.full((3, 3), 0.95, dtype=np.float32)
    planner = planner_of(plain_costs=PlainStepCosts((1, 3), (0.004, 0.005)))
    relayed, drafted = [poor, poor], []
    for step in range(1000):
        plan = planner.plan(plan_input(relayed[-2]))
        drafted.append(plan.draft)
        if plan.draft:
            relayed.append(poor if step < 500 else good)
    assert sum(drafted[:500]) <= 2 * 4  # probes alone
    after = drafted[500 + 256 + 2 :]
    assert sum(after) >= 0.93 * len(after)  # all but the tries of a plain step's price


def test_a_plain_step_that_was_priced_far_too_high_is_found_out():
    """Priced three times too high, it would win by far: three tries and it does, though the rest is drafted."""
    costs = PlainStepCosts((1, 3), (0.012, 0.012))
    fair = np.full((3, 3), 0.4, dtype=np.float32)
    rule = DraftFreeRule(patience=2, try_every=10, try_share=0.5)
    planner = planner_of(
        plain_costs=costs,
        draft_free=rule,
        plain_correction=CostCorrection(np.array([3]), rate=0.125, median_of=3),
    )
    plain = []
    for _ in range(80):
        plan = planner.plan(plan_input(fair))
        plain.append(not plan.draft)
        planner.observe_step(plan, 0.004 if plain[-1] else plan.record.table_step_seconds)
    assert not any(plain[:10]) and plain[10]
    assert sum(plain[-20:]) >= 15


def test_planner_takes_draft_free_steps_and_comes_back():
    poor, good = np.full((3, 3), 0.02, dtype=np.float32), np.full((3, 3), 0.95, dtype=np.float32)
    planner = planner_of(plain_costs=PlainStepCosts((1, 3), (0.004, 0.005)), draft_free=RULE)
    plans = [planner.plan(plan_input(poor)) for _ in range(8)]
    assert [plan.draft for plan in plans] == [False, False, False, False, True, True, False, False]
    plain = plans[0]
    assert (plain.verify.budget, plain.verify.num_tokens, plain.verify.tier) == (0, 3, TierKey(3, 3))
    assert verify_lens(plain, poor) == [1, 1, 1] and plain.record.plain_theta == pytest.approx(600.0)
    assert plain.record.predicted_theta == pytest.approx(600.0) and plain.record.expected_tokens == 3.0
    assert planner.plan(plan_input(poor)).draft is False
    assert planner.plan(plan_input(good)).draft and planner.plan(plan_input(good)).draft


def test_an_arrival_does_not_end_draft_free_decoding():
    """Two requests whose drafts are hopeless, and one that is new in every step: certain for the budget, but no reason
    to draft. Where everybody is new there is one."""
    poor = np.full((3, 3), 0.02, dtype=np.float32)
    planner = planner_of(plain_costs=PlainStepCosts((1, 3), (0.004, 0.005)), draft_free=RULE)
    plans = [planner.plan(plan_input(poor, stale=[2])) for _ in range(6)]
    assert [plan.draft for plan in plans] == [False, False, False, False, True, True]
    assert plans[4].verify.num_tokens == 4  # who is new counts as an average one in the probe too: one tier
    assert planner.plan(plan_input(poor, stale=[0, 1, 2])).draft
    unplanned = planner_of(draft_free=None).plan(plan_input(poor, stale=[2]))
    assert verify_lens(unplanned, np.vstack((poor[:2], np.ones((1, 3), dtype=np.float32))))[2] == 4


@pytest.mark.parametrize(
    ("changes", "inputs", "reason"),
    [
        ({"draft_free": None}, {}, "switched off"),
        ({"plain_costs": None}, {}, "no price for a plain step"),
        ({}, {"keeps_block": [1]}, "a request keeps its full block"),
        ({"table": None}, {}, "no cost table"),
        ({}, {"relayed": False}, "no confidence old enough"),
    ],
)
def test_draft_free_steps_are_not_taken_where_they_must_not(changes, inputs, reason):
    poor = np.full((3, 3), 0.02, dtype=np.float32)
    costs = PlainStepCosts((1, 3), (0.001, 0.001))
    planner = planner_of(**{"plain_costs": costs, "draft_free": DraftFreeRule(patience=1), **changes})
    for _ in range(3):
        plan = planner.plan(plan_input(poor, **inputs))
        assert plan.draft and stage(plan, "draft-free").reason == reason


def test_a_pin_ends_draft_free_decoding():
    poor = np.full((3, 3), 0.02, dtype=np.float32)
    planner = planner_of(plain_costs=PlainStepCosts((1,), (0.001,)), draft_free=DraftFreeRule(patience=1))
    assert not planner.plan(plan_input(poor)).draft
    planner.pin(1.0)
    plan = planner.plan(plan_input(poor))
    assert plan.draft and plan.verify.full and stage(plan, "draft-free").reason == "pinned"


def test_a_request_that_cannot_be_drafted_does_not_forbid_plain_steps_by_its_seed():
    poor = np.full((3, 3), 0.02, dtype=np.float32)
    planner = planner_of(plain_costs=PlainStepCosts((1,), (0.001,)), draft_free=DraftFreeRule(patience=1))
    assert not planner.plan(plan_input(poor, caps=[4, 1, 4], keeps_block=[1])).draft


def test_wrong_plain_prices_are_corrected_too():
    poor = np.full((3, 3), 0.02, dtype=np.float32)
    planner = planner_of(
        plain_costs=PlainStepCosts((1,), (0.008,)),  # really 20 ms
        draft_free=DraftFreeRule(patience=1),
        plain_correction=CostCorrection(np.array([1, 2, 3]), rate=0.1),
    )
    drafted = []
    for _ in range(200):
        plan = planner.plan(plan_input(poor))
        planner.observe_step(plan, 1 / 98 if plan.draft else 0.02)
        drafted.append(plan.draft)
    assert not drafted[0] and all(drafted[-100:])


def test_draft_free_rules_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="leave_gain"):
        DraftFreeRule(enter_gain=0.05, leave_gain=0.1)
    with pytest.raises(ValueError, match="probe_share"):
        DraftFreeRule(probe_share=0.0)
    with pytest.raises(ValueError, match="patience"):
        DraftFreeRule(patience=0)


def test_caps_that_end_requests_are_respected():
    plan = planner_of(table=TABLE).plan(plan_input(CONFIDENCE, caps=[1, 2, 4]))
    assert plan.caps.tolist() == [1, 2, 4] and plan.verify.num_tokens <= 7
    assert all(length <= cap for length, cap in zip(verify_lens(plan, CONFIDENCE), [1, 2, 4], strict=True))
