"""The budget objective and the planner: the worked example, the invariants, and an independent brute force.

Lessons of other engines that have their regression here or beside it: pins that a missing table swallowed
(sglang #38899), a flat table that never trims and yet is asked (#35413), budgets that differ between ranks (#31195,
vllm #56831), a budget of zero taken for no budget (vllm #52436); in the tiers' tests, captured keys that drift from
the asked ones (#40396, #34036); in the relay's, a reader that does not wait for its copy (#42717).
"""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flashspark.speculative.cost_table import (
    CostCorrection,
    LookupRule,
    PlainStepCosts,
    SpsAdditiveCostTable,
    SpsCostTable,
    price_budgets,
)
from flashspark.speculative.looks import LookCadence, LookRule
from flashspark.speculative.objective import best_budget, candidates, survivals
from flashspark.speculative.plan_stages import DraftFreeRule
from flashspark.speculative.planner import STAGES
from flashspark.speculative.planner_input import PlanInput, PlannerSettings
from flashspark.speculative.relay import RelayedConfidence
from flashspark.speculative.tiers import TierGrid, TierKey, TierRule
from planning import CONFIDENCE, GRID, TABLE, full, plan_input, planner_of, stage

EPS = 1e-6
TAU = [3.00, 3.90, 4.80, 5.52, 6.12, 6.57, 6.93, 7.29, 7.59, 7.86]
THETA_FLOOR = [300.0, 382.2, 470.4, 541.0, 599.8, 591.3, 623.7, 656.1, 683.1, 471.6]
THETA_PAD_UP = [294.0, 382.2, 432.0, 496.8, 550.8, 591.3, 415.8, 437.4, 455.4, 471.6]


confidences = st.builds(
    lambda n, gamma, seed, shape: np.random.default_rng(seed).beta(*shape, (n, gamma)).astype(np.float32),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.sampled_from([(1, 1), (5, 1), (1, 4)]),
)


# The worked example


def test_worked_example_survivals_tau_and_theta():
    survival = survivals(CONFIDENCE, np.ones(3, dtype=bool))
    assert survival == pytest.approx(
        np.array([[0.9, 0.72, 0.36], [0.6, 0.3, 0.27], [0.9, 0.45, 0.36]]), rel=1e-6
    )
    assert survival[0, 2] == survival[2, 2]  # a tie in float32
    tau = candidates(survival, full(3, 1), full(3, 4), EPS).expected_tokens()
    assert tau == pytest.approx(TAU, abs=1e-6)
    by_floor = price_budgets(TABLE, 3, 3, 9, rule=LookupRule.FLOOR).seconds
    by_tier = price_budgets(TABLE, 3, 3, 9, GRID.tiers(3)).seconds
    assert tau / by_floor == pytest.approx(THETA_FLOOR, abs=0.05)
    assert tau / by_tier == pytest.approx(THETA_PAD_UP, abs=0.05)
    assert (best_budget(tau, by_floor), best_budget(tau, by_tier)) == (8, 5)


def test_worked_example_stale_row():
    survival = survivals(CONFIDENCE, np.array([True, False, True]))
    tau = candidates(survival, full(3, 1), full(3, 4), EPS).expected_tokens()
    assert tau == pytest.approx([3, 4, 5, 6, 6.9, 7.8, 8.52, 8.97, 9.33, 9.69], abs=1e-6)


def test_worked_example_as_a_plan():
    plan = planner_of().plan(plan_input(CONFIDENCE))
    assert (plan.verify.budget, plan.verify.num_tokens, plan.verify.tier) == (5, 8, TierKey(3, 8))
    assert plan.draft and not plan.verify.full
    record = plan.record
    assert (record.argmax_budget, record.num_fresh, record.num_candidates) == (5, 3, 9)
    assert record.expected_tokens == pytest.approx(6.57) and record.predicted_theta == pytest.approx(591.3)
    assert record.predicted_step_seconds == record.table_step_seconds == pytest.approx(1 / 90)
    assert record.full_theta == pytest.approx(471.6)
    assert [entry.name for entry in record.stages] == list(STAGES)
    floor = planner_of(lookup_rule=LookupRule.FLOOR, grid=None).plan(plan_input(CONFIDENCE))
    assert (floor.verify.budget, floor.verify.tier, floor.verify.num_tokens) == (8, None, 11)


def test_worked_example_pinned():
    planner = planner_of(table=None)
    planner.pin(0.5)
    plan = planner.plan(plan_input(CONFIDENCE))
    assert (plan.verify.budget, plan.verify.tier) == (4, TierKey(3, 8))  # int(4.5), and the pad lane stays
    assert plan.record.predicted_theta is None and plan.record.expected_tokens is None
    assert planner.plan(plan_input(CONFIDENCE, relayed=False)).verify.budget == 4  # needs no confidence
    planner.pin(None)
    assert planner.plan(plan_input(CONFIDENCE)).verify.full


# Invariants of the objective


@settings(max_examples=100, deadline=None)
@given(confidence=confidences, data=st.data())
def test_survivals_fall_and_tau_rises_ever_slower(confidence, data):
    n, gamma = confidence.shape
    if data.draw(st.booleans()):
        confidence[data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, gamma - 1))] = data.draw(
            st.sampled_from([np.nan, np.inf, -np.inf, -0.5, 7.0])
        )
    survival = survivals(confidence, np.ones(n, dtype=bool))
    assert ((survival >= 0) & (survival <= 1)).all() and (np.diff(survival, axis=1) <= 0).all()
    tau = candidates(survival, full(n, 1), full(n, gamma + 1), EPS).expected_tokens()
    gains = np.diff(tau)
    assert (gains >= 0).all() and (np.diff(gains) <= 1e-9).all()
    assert tau[0] == n and tau[-1] <= n * (gamma + 1) + 1e-9


def test_nonsense_counts_as_the_nearest_sense_and_the_input_is_left_alone():
    confidence = np.array([[np.nan, 0.5], [2.0, -1.0], [np.inf, -np.inf]], dtype=np.float32)
    before = confidence.copy()
    assert survivals(confidence, np.array([True] * 3)).tolist() == [[0, 0], [1, 0], [1, 0]]
    assert survivals(confidence, np.array([False] * 3)).tolist() == [[1, 1]] * 3
    assert confidence.tobytes() == before.tobytes()


def test_only_drafts_between_floor_and_cap_are_for_sale():
    survival = survivals(np.full((3, 3), 0.5, dtype=np.float32), np.ones(3, dtype=bool))
    ranked = candidates(survival, np.array([1, 2, 4]), np.array([2, 4, 4]), EPS)
    # Request 0: draft 0. Request 1: drafts 1 and 2, draft 0 is paid. Request 2: all three are paid.
    assert ranked.survivals.tolist() == [0.5, 0.25, 0.125]
    assert ranked.base_tokens == 3 + 0.5 + (0.5 + 0.25 + 0.125)


@functools.cache
def small_grid(width, finest):
    return TierGrid(TierRule(width, 3, finest_tokens=finest))


def random_case(rng):
    """A table of random kind, a grid or none, floors, caps, confidence with repeats and zeros."""
    n, gamma = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    confidence = rng.choice([0.0, 0.3, 0.5, 0.9, 1.0, *rng.random(3)], (n, gamma)).astype(np.float32)
    caps = rng.integers(1, gamma + 2, n) if rng.random() < 0.3 else full(n, gamma + 1)
    floors = np.minimum(rng.integers(1, gamma + 2, n), caps) if rng.random() < 0.3 else full(n, 1)
    probes = np.unique(rng.integers(1, 17, rng.integers(1, 6)))
    if rng.random() < 0.5:
        table = SpsCostTable(
            tuple(probes.tolist()), tuple(np.sort(rng.uniform(10, 100, len(probes)))[::-1].tolist()), 99
        )
    else:
        theta = np.sort(rng.uniform(0, 0.02, len(probes)))
        table = SpsAdditiveCostTable(
            0.005, (1, 3), (0.0, 0.002), tuple(probes.tolist()), tuple(theta.tolist())
        )
    finest = int(rng.integers(1, 6))
    grid = small_grid(gamma + 1, finest) if rng.random() < 0.6 else None
    return confidence, floors, caps, table, grid, float(rng.choice([0.0, EPS, 0.2]))


def brute_force(confidence, floors, caps, table, grid, eps):
    """theta of every budget from every way to share it out: Python loops over all verify lengths."""
    n = len(confidence)
    given = []  # per request, what each length adds beyond the floor; a draft that never counts forbids it
    for r in range(n):
        survival, total, by_length = np.float32(1.0), 0.0, {1: 0.0}
        for k in range(confidence.shape[1]):
            survival = np.float32(survival * confidence[r, k])
            total += -math.inf if k >= floors[r] - 1 and survival < eps else float(survival)
            by_length[k + 2] = total
        given.append(by_length)
    best_tau = {}
    for lens in itertools.product(*(range(f, c + 1) for f, c in zip(floors, caps, strict=True))):
        tau = n + sum(given[r][length] for r, length in enumerate(lens))
        budget = sum(lens) - int(floors.sum())
        if tau > best_tau.get(budget, 0.0):
            best_tau[budget] = tau
    thetas = {}
    for budget, tau in best_tau.items():
        tokens = int(floors.sum()) + budget
        ran = grid.key(n, tokens).num_tokens if grid else tokens
        thetas[budget] = tau / float(table.step_seconds(n, np.array([ran]))[0])
    return thetas


def test_argmax_equals_brute_force_over_ten_thousand_cases():
    rng = np.random.default_rng(2026)
    num_trimmed = 0
    for _ in range(10_000):
        confidence, floors, caps, table, grid, eps = case = random_case(rng)
        n = len(confidence)
        tau = candidates(survivals(confidence, np.ones(n, dtype=bool)), floors, caps, eps).expected_tokens()
        free = int(floors.sum())
        tiers = grid.tiers(n) if grid else None
        seconds = price_budgets(table, n, free, int(caps.sum()) - free, tiers).seconds
        got, thetas = best_budget(tau, seconds), brute_force(*case)
        assert sorted(thetas) == list(range(len(tau)))
        # Sums in another order differ in the last bits, so budgets that close count as tied.
        top = max(thetas.values()) * (1 - 1e-12)
        assert thetas[got] >= top
        assert got == min(b for b, theta in thetas.items() if theta >= top) or thetas[got] - top < 1e-9 * top
        num_trimmed += got < len(tau) - 1
    assert 2000 < num_trimmed < 9000  # both outcomes are well represented


@settings(max_examples=100, deadline=None)
@given(confidence=confidences, eps=st.sampled_from([0.0, EPS, 0.2]))
def test_a_flat_table_admits_everything_worth_admitting(confidence, eps):
    n, gamma = confidence.shape
    survival = survivals(confidence, np.ones(n, dtype=bool))
    tau = candidates(survival, full(n, 1), full(n, gamma + 1), eps).expected_tokens()
    flat = price_budgets(SpsCostTable.uninitialized(1), n, n, n * gamma).seconds
    worth = int((survival >= max(eps, 1e-30)).sum())
    assert best_budget(tau, flat) == worth or tau[best_budget(tau, flat)] == tau[worth]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), power=st.integers(-6, 6))
def test_a_faster_machine_plans_the_same(seed, power):
    confidence, floors, caps, table, grid, eps = random_case(np.random.default_rng(seed))
    n, free = len(confidence), int(floors.sum())
    tau = candidates(survivals(confidence, np.ones(n, dtype=bool)), floors, caps, eps).expected_tokens()
    tiers = grid.tiers(n) if grid else None
    budgets = {
        best_budget(tau, price_budgets(t, n, free, int(caps.sum()) - free, tiers).seconds)
        for t in (table, table.scaled(2.0**power))  # powers of two scale without rounding
    }
    assert len(budgets) == 1


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_pricing_the_tier_that_runs_is_never_slower_than_a_floor_lookup(seed):
    """Both choices judged by what really runs."""
    rng = np.random.default_rng(seed)
    confidence = rng.random((3, 3), dtype=np.float32)
    tiers = small_grid(4, int(rng.integers(1, 6))).tiers(3)
    probes = tuple(tiers.num_tokens.tolist())
    table = SpsCostTable(probes, tuple(np.sort(rng.uniform(10, 100, len(probes)))[::-1].tolist()), 12)
    tau = candidates(
        survivals(confidence, np.ones(3, dtype=bool)), full(3, 1), full(3, 4), EPS
    ).expected_tokens()
    runs = price_budgets(table, 3, 3, 9, tiers).seconds
    by_floor = best_budget(tau, price_budgets(table, 3, 3, 9, rule=LookupRule.FLOOR).seconds)
    by_tier = best_budget(tau, runs)
    assert tau[by_tier] / runs[by_tier] >= tau[by_floor] / runs[by_floor]


@settings(max_examples=60, deadline=None)
@given(confidence=confidences, data=st.data())
def test_rows_that_are_not_fresh_plan_like_rows_of_ones(confidence, data):
    n, gamma = confidence.shape
    stale = data.draw(st.sets(st.integers(0, n - 1)))
    ones = confidence.copy()
    ones[list(stale)] = 1.0
    grid = TierGrid(TierRule(gamma + 1, 6))
    garbage = confidence.copy()
    garbage[list(stale)] = np.nan
    plans = [
        planner_of(gamma, grid=grid).plan(batch)
        for batch in (plan_input(garbage, stale=stale), plan_input(ones), plan_input(confidence, stale=stale))
    ]
    assert len({(p.verify.budget, p.verify.tier, p.verify.full) for p in plans}) == 1


def test_generation_zero_is_never_fresh():
    batch = plan_input(CONFIDENCE)
    never = PlanInput(
        RelayedConfidence(CONFIDENCE, full(3, 0)),
        full(3, 0),
        batch.caps,
        batch.keeps_block,
        batch.num_steps_without_draft,
    )
    assert planner_of().plan(never).record.num_fresh == 0


# The planner as a whole


@settings(max_examples=150, deadline=None)
@given(confidence=confidences, data=st.data())
def test_any_plan_fits_and_tells_of_every_stage(confidence, data):
    n, gamma = confidence.shape
    table = data.draw(
        st.sampled_from([None, TABLE, SpsAdditiveCostTable(0.01, (1,), (0.0,), (0, 30), (0.0, 0.03))])
    )
    grid = data.draw(st.sampled_from([None, TierGrid(TierRule(gamma + 1, 6, finest_tokens=3))]))
    planner = planner_of(
        gamma,
        table=table,
        grid=grid,
        min_drafts_every=data.draw(st.sampled_from([0, 4])),
        min_verify_len=data.draw(st.integers(0, 2)),
        max_verify_len=data.draw(st.sampled_from([0, gamma + 1, max(gamma, 2)])),
        plain_costs=data.draw(st.sampled_from([None, PlainStepCosts((1,), (0.004,))])),
        draft_free=DraftFreeRule(patience=1),
    )
    if data.draw(st.booleans()):
        planner.pin(data.draw(st.floats(0.01, 1.0)))
    batch = plan_input(
        confidence,
        stale=data.draw(st.sets(st.integers(0, n - 1))),
        caps=data.draw(st.lists(st.integers(1, gamma + 1), min_size=n, max_size=n)),
        keeps_block=list(data.draw(st.sets(st.integers(0, n - 1)))),
        waited=data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)),
        relayed=data.draw(st.booleans()),
    )
    plan = planner.plan(batch)
    assert [entry.name for entry in plan.record.stages] == list(STAGES)
    assert all(entry.reason for entry in plan.record.stages)
    floors, caps = plan.floors, plan.caps
    assert ((floors >= 1) & (floors <= caps) & (caps <= batch.caps)).all()
    if not plan.draft:
        assert (plan.verify.budget, plan.verify.num_tokens, plan.caps.tolist()) == (0, n, [1] * n)
        assert plan.verify.tier == (grid.plain_key(n) if grid else None)
        return
    spent = int((caps - floors).sum()) if plan.verify.budget is None else plan.verify.budget
    assert 0 <= spent <= int((caps - floors).sum()) and plan.verify.num_tokens == int(floors.sum()) + spent
    assert plan.verify.full == (spent == int((caps - floors).sum()))
    if grid is not None:
        assert plan.verify.tier == grid.key(n, plan.verify.num_tokens)
        assert plan.verify.tier in grid.reachable_keys()
    else:
        assert plan.verify.tier is None


def test_not_planned_is_not_a_budget_of_zero():
    unplanned = planner_of().plan(plan_input(CONFIDENCE, relayed=False))
    assert (unplanned.verify.budget, unplanned.verify.full, unplanned.verify.num_tokens) == (None, True, 12)
    assert stage(unplanned, "confidence").reason == "no confidence old enough"
    steep = SpsCostTable((3, 4), (1000.0, 1.0), 12)
    zero = planner_of(table=steep, grid=None).plan(plan_input(CONFIDENCE))
    assert (zero.verify.budget, zero.verify.full, zero.verify.num_tokens) == (0, False, 3)


def test_a_cold_batch_and_a_table_of_one_probe_verify_everything():
    cold = planner_of(table=SpsAdditiveCostTable(0.01, (1,), (0.0,), (0,), (0.0,)))
    assert cold.plan(plan_input(CONFIDENCE, stale=[0, 1, 2])).verify.budget == 9
    for table in (None, SpsCostTable((8,), (50.0,), 8)):
        plan = planner_of(table=table).plan(plan_input(CONFIDENCE))
        assert (plan.verify.budget, plan.verify.full, plan.verify.tier) == (9, True, TierKey(3, 12))
        assert stage(plan, "table").reason == "no cost table" and not stage(plan, "table").ran
    # cap-accept without a table: a flat one, which leaves out only what never survives.
    hopeless = CONFIDENCE.copy()
    hopeless[1] = 0.0
    flat = planner_of(table=None, trim_without_table=True, grid=None, min_gain=0.0)
    assert flat.plan(plan_input(hopeless)).record.argmax_budget == 6


def test_a_batch_past_the_grid_is_not_planned():
    plan = planner_of().plan(plan_input(np.full((4, 3), 0.1, dtype=np.float32)))
    assert (plan.verify.budget, plan.verify.tier, plan.verify.full) == (None, None, True)
    assert stage(plan, "confidence").reason == "batch past the grid"


def test_pin_bypasses_the_small_batch_rule_and_clears():
    planner = planner_of()
    one = CONFIDENCE[:1]
    coarse = planner.plan(plan_input(one))
    assert coarse.verify.full and stage(coarse, "small batch").reason == "one tier for all budgets"
    assert not stage(coarse, "argmax").ran and coarse.record.argmax_budget is None
    for fraction, budget in [(0.01, 0), (0.34, 1), (0.5, 1), (1.0, 3)]:
        planner.pin(fraction)
        assert planner.plan(plan_input(one)).verify.budget == budget
    for wrong in (0.0, -0.5, 1.01, math.nan):
        with pytest.raises(ValueError, match="pinned fraction"):
            planner.pin(wrong)
    planner.pin(None)
    assert planner.plan(plan_input(one)).verify == coarse.verify


@settings(max_examples=60, deadline=None)
@given(confidence=confidences, fraction=st.floats(0.001, 1.0))
def test_pinned_budget_is_the_fraction_of_all_drafts(confidence, fraction):
    n, gamma = confidence.shape
    planner = planner_of(gamma, table=None, grid=None)
    planner.pin(fraction)
    assert planner.plan(plan_input(confidence)).verify.budget == int(fraction * n * gamma)


def test_correction_moves_the_plan_and_keeps_the_table_price():
    cells = GRID.tiers(3).num_tokens
    planner = planner_of(correction=CostCorrection(cells, rate=0.1))
    batch = plan_input(CONFIDENCE)
    first = planner.plan(batch)
    for _ in range(200):
        planner.observe_step(planner.plan(batch), 0.03)  # whatever runs takes 30 ms, far above the table
    last = planner.plan(batch)
    assert first.verify.budget == 5 and last.verify.full  # one price for all shapes: verify everything
    assert last.record.table_step_seconds == pytest.approx(1 / 60)
    assert last.record.predicted_step_seconds > 1.2 * last.record.table_step_seconds


def test_a_batch_too_small_to_trim_is_looked_at_now_and_then():
    grid = TierGrid(TierRule(4, 3, finest_tokens=4))
    planner = planner_of(grid=grid, look_rule=LookRule(idle_every=4))
    assert [planner.looks(1, 4) for _ in range(9)] == [False, False, False, True] * 2 + [False]
    assert all(planner.looks(3, 12) for _ in range(3))  # several tiers
    assert [planner.looks(1, 4) for _ in range(4)] == [False, False, False, True]
    planner.pin(0.5)
    assert all(planner.looks(1, 4) for _ in range(5))


def test_where_all_was_kept_the_next_steps_are_not_looked_at():
    sure = np.full((3, 3), 0.99, dtype=np.float32)
    flat = SpsCostTable((1, 12), (100.0, 99.0), 12)

    def looks(planner, confidence, num, **inputs):
        seen = []
        for _ in range(num):
            seen.append(planner.looks(3, 12))
            if seen[-1]:
                planner.plan(plan_input(confidence, **inputs))
        return seen

    rule = LookRule(kept_every=3, poor_every=1)
    planner = planner_of(table=flat, look_rule=rule)
    assert looks(planner, sure, 7) == [True, False, False, True, False, False, True]
    assert "all was kept lately" in stage(planner.full_plan([4, 4, 4]), "confidence").reason
    assert planner.looks(2, 8)  # another batch
    assert all(looks(planner_of(table=flat, look_rule=rule), sure, 5, stale=[0]))  # somebody is new
    assert all(looks(planner_of(look_rule=rule), np.full((3, 3), 0.1, dtype=np.float32), 5))  # trims


@settings(max_examples=100, deadline=None)
@given(gains=st.lists(st.floats(0, 0.5), min_size=1, max_size=80), num_reqs=st.integers(2, 6))
def test_batches_whose_looks_gain_little_are_looked_at_less(gains, num_reqs):
    """The mean is kept per request bucket, and starts where an unknown batch is worth a look."""
    rule = LookRule(poor_every=5, kept_every=1)
    cadence, mean = LookCadence(rule), 0.1
    for gain in gains:
        taken = 0
        while not cadence.is_due(num_reqs, 4, one_tier=False, always=False):
            taken += 1
        assert taken == (4 if mean < rule.poor_gain else 0)
        assert cadence.why_not == ("looks gained little lately" if mean < rule.poor_gain else "")
        cadence.found(num_reqs, 4, gain, kept_all=False)
        mean += (gain - mean) / 16
    assert cadence.is_due(num_reqs, 4, one_tier=False, always=True)
    assert cadence.is_due(num_reqs, 8, one_tier=False, always=False)  # another bucket


def test_on_a_gpu_looks_at_what_is_kept_get_rare_and_come_back_when_there_is_something_to_gain():
    cadence = LookCadence(LookRule.of_captured_steps())

    def looks(num_steps, gain):
        seen = []
        for _ in range(num_steps):
            seen.append(cadence.is_due(8, 8, one_tier=False, always=False))
            if seen[-1]:
                cadence.found(8, 8, gain, kept_all=gain == 0)
        return seen

    # Every second step while the gain that was hoped for falls by 1/16 each time to its half, then every eighth.
    assert looks(22, 0.0) == [True, False] * 11
    steady = looks(400, 0.0)
    assert sum(steady) == 50
    assert all(
        looks(60, 0.05)[16:]
    )  # another kind of traffic: two looks are enough to look at every step again


def test_a_planner_tells_its_cadence_what_a_look_promised():
    """Two requests of which everything is accepted: nothing to gain, so after some looks most steps go without."""
    flat = SpsCostTable((1, 12), (100.0, 99.0), 12)
    poor = planner_of(table=flat, look_rule=LookRule(kept_every=1, poor_every=4))
    rich = planner_of(look_rule=LookRule(kept_every=1, poor_every=4))
    seen = {}
    for name, planner, confidence in (("poor", poor, 0.99), ("rich", rich, 0.1)):
        seen[name] = []
        for _ in range(60):
            seen[name].append(planner.looks(3, 12))
            if seen[name][-1]:
                planner.plan(plan_input(np.full((3, 3), confidence, dtype=np.float32)))
    # 0.1 shrinks by 15/16 with every look: below 0.05 after 11.
    assert seen["poor"] == [True] * 11 + [i % 4 == 3 for i in range(49)]
    assert all(seen["rich"])


def test_what_is_not_looked_at_is_verified_in_full_and_says_why():
    planner = planner_of(plain_costs=PlainStepCosts((1, 3), (1e-6, 1e-6)))  # plain decoding would win
    assert not planner.looks(1, 4)
    plan = planner.full_plan([4, 4, 4])
    assert (plan.draft, plan.looks, plan.verify.full, plan.verify.budget) == (True, False, True, 9)
    assert plan.record.predicted_theta is None
    small_batch = {stage.name: stage for stage in plan.record.stages}["small batch"]
    assert (small_batch.changed, small_batch.reason) == (True, "one tier for all budgets")
    assert planner.full_plan([4, 4, 4]) is plan
    assert planner.full_plan([4, 2, 4]).caps.tolist() == [4, 2, 4]
    planner.limit(3)
    assert planner.full_plan([4, 2, 4]).caps.tolist() == [3, 2, 3]


def test_replicas_plan_bitwise_alike():
    rng = np.random.default_rng(4)
    replicas = [planner_of(correction=CostCorrection(GRID.tiers(3).num_tokens)) for _ in range(2)]
    for _ in range(200):
        batch = plan_input(rng.random((3, 3), dtype=np.float32))
        a, b = (replica.plan(batch) for replica in replicas)
        assert (a.verify, a.draft, a.record) == (b.verify, b.draft, b.record)
        for replica in replicas:
            replica.observe_step(a, 0.01 + 0.001 * a.verify.num_tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 0}, "gamma"),
        ({"min_verify_len": 5}, "min_verify_len"),
        ({"min_verify_len": -1}, "min_verify_len"),
        ({"max_verify_len": 5}, "max_verify_len"),
        ({"min_verify_len": 3, "max_verify_len": 2}, "min_verify_len"),
        ({"survival_eps": -1.0}, "survival_eps"),
        ({"survival_eps": math.nan}, "survival_eps"),
        ({"min_drafts_every": -1}, "min_drafts_every"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        PlannerSettings(**{"gamma": 3, **changes})


def test_a_grid_of_another_width_is_refused():
    with pytest.raises(ValueError, match="width is 4, the block's 8"):
        planner_of(gamma=7)


# What is kept from step to step


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    gamma=st.integers(1, 5),
    has_grid=st.booleans(),
    rate=st.sampled_from([0.02, 0.2]),
)
def test_a_planner_that_keeps_lengths_and_prices_plans_bit_for_bit_like_a_new_one(
    seed, gamma, has_grid, rate
):
    """A planner of one step, with a correction that has seen the same times, knows nothing from before."""
    rng = np.random.default_rng(seed)
    table = SpsAdditiveCostTable(0.004, (1, 6), (0.0, 1e-3), (1, 8, 40), (0.0, 1e-3, 9e-3))
    grid = TierGrid(TierRule(gamma + 1, 6, finest_tokens=3)) if has_grid else None
    options = {"table": table, "grid": grid, "min_drafts_every": 4, "draft_free": None, "min_verify_len": 0}
    options["plain_costs"] = PlainStepCosts((1, 6), (0.003, 0.005))
    cells, times = np.arange(3, 40, 3), []

    def correction():
        made = CostCorrection(cells, rate=rate)
        for observed in times:
            made.observe(*observed)
        return made

    kept = planner_of(gamma, correction=correction(), **options)
    sizes, longest = rng.integers(1, 7, 3), gamma + 1
    for step in range(12):
        if step == 6:
            longest = int(rng.integers(1, gamma + 2))
            kept.limit(longest)
        n = int(rng.choice(sizes))
        batch = plan_input(
            rng.random((n, gamma), dtype=np.float32),
            stale=np.flatnonzero(rng.random(n) < 0.2).tolist(),
            caps=rng.integers(1, gamma + 2, n) if rng.random() < 0.3 else None,
            keeps_block=np.flatnonzero(rng.random(n) < 0.1).tolist(),
            waited=rng.integers(0, 6, n) if rng.random() < 0.3 else None,
        )
        fresh = planner_of(gamma, correction=correction(), **options)
        fresh.limit(longest)
        plan, expected = kept.plan(batch), fresh.plan(batch)
        assert (plan.verify, plan.draft, plan.record) == (expected.verify, expected.draft, expected.record)
        assert (
            plan.floors.tolist() == expected.floors.tolist() and plan.caps.tolist() == expected.caps.tolist()
        )
        if plan.record.table_step_seconds is not None:
            times.append(
                (plan.verify.num_tokens_run, plan.record.table_step_seconds, float(rng.uniform(0.002, 0.03)))
            )
            kept.observe_step(plan, times[-1][-1])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), leave_gain=st.sampled_from([0.0, 0.04]), has_grid=st.booleans())
def test_the_same_batch_again_is_planned_like_an_equal_one(seed, leave_gain, has_grid):
    """What draft-free steps repeat, with everything that may change between two of them."""
    rng = np.random.default_rng(seed)
    rule = DraftFreeRule(leave_gain=leave_gain, patience=1, probe_every=3, probe_every_most=5, try_every=9)
    planners = [
        planner_of(
            correction=CostCorrection(np.arange(3, 40, 3), rate=0.2),
            plain_correction=CostCorrection(np.arange(1, 7), rate=0.2),
            plain_costs=PlainStepCosts((1,), (0.004,)),
            grid=GRID if has_grid else None,
            draft_free=rule,
            min_drafts_every=4,
        )
        for _ in range(2)
    ]
    batch = None
    for _ in range(60):
        if batch is None or rng.random() < 0.15:
            batch = plan_input(
                rng.random((3, 3), dtype=np.float32),
                stale=np.flatnonzero(rng.random(3) < 0.2),
                caps=rng.integers(1, 5, 3),
                keeps_block=np.flatnonzero(rng.random(3) < 0.05),
            )
        change = rng.random()
        seconds, longest = float(rng.uniform(0.003, 0.02)), int(rng.integers(1, 5))
        plans = []
        for planner, given_batch in zip(planners, (batch, replace(batch)), strict=True):
            if change < 0.03:
                planner.limit(longest)
            elif change < 0.06:
                planner.table = planner.table.scaled(seconds / 0.01)
            elif change < 0.08:
                planner.pin(0.5)
            elif change < 0.2:
                planner.pinned_fraction = None
            plans.append(planner.plan(given_batch))
            planner.observe_step(plans[-1], seconds)
        again, expected = plans
        assert (again.verify, again.draft, again.record) == (expected.verify, expected.draft, expected.record)
        assert again.floors.tolist() == expected.floors.tolist()
        assert again.caps.tolist() == expected.caps.tolist()


def test_a_table_or_a_correction_that_is_exchanged_is_what_counts():
    planner, batch = planner_of(), plan_input(CONFIDENCE)
    before = planner.plan(batch).record.table_step_seconds
    planner.table = TABLE.scaled(2.0)
    assert planner.plan(batch).record.table_step_seconds == 2 * before
    planner.correction = CostCorrection(GRID.tiers(3).num_tokens)
    planner.correction.observe(8, 1.0, 2.0)
    assert planner.plan(batch).record.predicted_step_seconds > 2 * before


@settings(max_examples=50, deadline=None)
@given(
    keeps=st.lists(st.booleans(), min_size=3, max_size=3),
    waited=st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_nobody_is_as_good_as_a_list_of_those_who_do_not(keeps, waited):
    batch = plan_input(CONFIDENCE, keeps_block=np.flatnonzero(keeps), waited=waited)
    short = replace(
        batch,
        keeps_block=batch.keeps_block if any(keeps) else None,
        num_steps_without_draft=batch.num_steps_without_draft if max(waited) >= 4 else None,
    )
    plans = [planner_of(min_drafts_every=4).plan(b) for b in (batch, short)]
    assert plans[0].record == plans[1].record and plans[0].verify == plans[1].verify


@settings(max_examples=50, deadline=None)
@given(times=st.lists(st.floats(0.1, 10), max_size=10), num_tokens=st.integers(1, 40))
def test_a_factor_alone_is_the_factor_among_others(times, num_tokens):
    correction = CostCorrection(np.array([4, 8, 16]))
    for i, seconds in enumerate(times):
        correction.observe(1 + 3 * i, 1.0, seconds)
    assert correction.factor(num_tokens) == correction.factors(np.array([1, num_tokens, 99]))[1]
    tiers = GRID.tiers(3)
    assert [tiers.round_up(m) for m in range(13)] == tiers.num_tokens[tiers.tier_of_tokens].tolist()
