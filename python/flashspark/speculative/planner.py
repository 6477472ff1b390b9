"""The verify planner: from lagged confidence and a cost table to one host integer, the budget of the step.

Runs on the host before the step's drafts exist, over plain arrays: nothing here asks a device. Everything it looks
at is the same on every tensor-parallel rank, and so is what it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from .cost_table import (
    BatchPrices,
    CostCorrection,
    CostTable,
    PlainStepCosts,
    SpsCostTable,
)
from .looks import ONE_TIER, LookCadence
from .objective import (
    Candidates,
    Lengths,
    as_average,
    best_budget,
    fresh_rows,
    optimism,
    ranked,
    survivals,
)
from .plan_stages import (
    DraftFreeState,
    StageRecord,
    decided,
    draft_free_choice,
    fairness_floors,
    full_block_floors,
    gain_guard,
    pinned_budget,
    skipped,
    tier_fill,
    trimming_is_idle,
)
from .planner_input import PlanInput, PlannerSettings
from .relay import LAG
from .tiers import BucketTiers, TierGrid, TierKey

STAGES = (
    "full blocks",
    "fairness floor",
    "pin",
    "confidence",
    "small batch",
    "table",
    "argmax",
    "gain guard",
    "tier fill",
    "draft-free",
)

MAX_SHARED_PLANS = 256  # likewise lengths and prices
_NO_DRAFTS = "nobody can use a draft"


class VerifyBudget(msgspec.Struct, frozen=True):
    """How much the step verifies, known on the host before it starts.

    `budget` None means not planned, which is not 0: nothing planned verifies everything, a budget of 0 the floors.
    """

    budget: int | None  # drafts above the floors
    full: bool  # every request verifies up to its cap: no allocation needed
    num_tokens: int  # rows, an upper bound of the sum of verify lengths
    tier: TierKey | None  # None: past the grid or without one, the step runs unpadded

    @property
    def num_tokens_run(self) -> int:
        """Rows that really run, padding included."""
        return self.num_tokens if self.tier is None else self.tier.num_tokens


class PlanRecord(msgspec.Struct, frozen=True):
    """Why the plan is what it is: one entry per name in `STAGES`, and the numbers. None where nothing was predicted."""

    stages: tuple[StageRecord, ...]
    num_fresh: int
    num_candidates: int
    argmax_budget: int | None
    expected_tokens: float | None  # tau of the step as it runs
    predicted_step_seconds: float | None
    predicted_theta: float | None
    full_theta: float | None
    plain_theta: float | None
    table_step_seconds: float | None  # the table's own price, before correction
    lag_steps: int = LAG


class Plan(msgspec.Struct, frozen=True):
    """The decision for one step. `floors` and `caps` go to the allocator with the budget."""

    verify: VerifyBudget
    draft: bool  # False: a draft-free step, every request verifies its anchor
    looks: (
        bool  # whether confidence is made and learned from; False on most steps of a batch too small to trim
    )
    floors: NDArray[np.int64]  # [R]
    caps: NDArray[np.int64]  # [R]
    record: PlanRecord


class _Usual(msgspec.Struct, frozen=True):
    """What the caps decide alone, where nobody has a floor of its own and nothing is pinned."""

    lengths: Lengths
    tiers: BucketTiers | None
    small_batch: tuple[bool, StageRecord]


class _Choice(msgspec.Struct, frozen=True):
    """The best drafted step of a batch, before it is compared with a plain one."""

    batch: PlanInput
    builder: _Builder
    prices: NDArray[np.float64]  # [shapes], that it was chosen by
    any_keeps_block: bool
    is_idle: bool  # no price could have changed it
    budget: int
    tokens: float
    seconds: float
    table_seconds: float


class VerifyPlanner:
    """Owns the table, its correction, the pin and the draft-free hysteresis; everything else is a function."""

    def __init__(
        self,
        settings: PlannerSettings,
        table: CostTable | None,
        grid: TierGrid | None = None,
        plain_costs: PlainStepCosts | None = None,
        correction: CostCorrection | None = None,
        plain_correction: CostCorrection | None = None,
    ) -> None:
        """
        Args:
            table: None, or a table with a single probe, verifies everything (unless `trim_without_table`).
            grid: the tiers steps are padded to; None prices rows as they are.
            plain_costs: without it no draft-free step is taken.
            correction, plain_correction: of the table over rows, of `plain_costs` over requests.
        """
        if grid is not None and grid.rule.width != settings.gamma + 1:
            raise ValueError(f"the grid's width is {grid.rule.width}, the block's {settings.gamma + 1}")
        self.settings, self.grid, self.plain_costs = settings, grid, plain_costs
        self.correction, self.plain_correction = correction, plain_correction
        if (table is None or table.is_uninitialized) and settings.trim_without_table:
            table = SpsCostTable.uninitialized(1)
        elif table is not None and table.is_uninitialized:
            table = None
        self.table = table
        self.pinned_fraction: float | None = None
        self._draft_free = DraftFreeState()
        self._cadence = LookCadence(settings.look_rule)
        self._shared_plans: dict[tuple[str, tuple[int, ...]], Plan] = {}  # by reason and caps
        self._shared_usual: dict[bytes, _Usual] = {}  # by caps
        self._last_usual: tuple[NDArray[np.int64], _Usual] | None = None  # and the caps
        self._all_written: NDArray[np.int64] | None = None  # generations among which no 0 was found
        self._shared_prices: dict[int, BatchPrices] = {}  # by requests
        self._priced_with: tuple[object, object] = (None, None)  # table and correction
        one = np.ones(1, dtype=np.int64)
        self._usual_stages = self._unusual(Lengths.of(one, one, settings.gamma), None, None, None)[2]
        self._kept: _Choice | None = None  # of the last step, if that was planned while draft-free

    def pin(self, fraction: float | None) -> None:
        """Fixes the budget to a fraction of all drafts, for profiling; None lets the planner decide again."""
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"a pinned fraction lies in (0, 1], got {fraction}")
        self.pinned_fraction, self._kept = fraction, None
        self._draft_free = DraftFreeState()

    def limit(self, max_verify_len: int) -> None:
        """Most rows a request may verify from now on, 1 … W; what lies behind is drafted and never verified."""
        self.settings = replace(self.settings, max_verify_len=max_verify_len)
        self._shared_plans.clear()
        self._shared_usual.clear()
        self._last_usual = self._kept = None

    def looks(self, num_reqs: int, num_rows: int) -> bool:
        """Whether the next step, of `num_rows` rows if all is verified, is worth looking at. Called once per step."""
        tiers = self.grid.tiers(num_reqs) if self.grid is not None else None
        if tiers is None or self.pinned_fraction is not None or self._draft_free.active:
            return self._cadence.is_due(num_reqs, num_reqs, one_tier=False, always=True)
        one_tier = tiers.rounded[num_reqs] == tiers.rounded[num_rows]
        return self._cadence.is_due(num_reqs, tiers.num_slots, one_tier, always=False)

    def full_plan(self, caps: Sequence[int]) -> Plan:
        """For a step that is not looked at: everything up to `caps`, since it costs no more than anything less.

        The draft-free state stays as it was. Plans are shared by the steps they fit: never written.
        """
        return self._shared_plan(self._cadence.why_not, tuple(caps))

    def anchors_plan(self, num_reqs: int) -> Plan:
        """For a step in which nobody can use a draft: one row for each request. Shared, never written."""
        return self._shared_plan(_NO_DRAFTS, (1,) * num_reqs)

    def plan(self, batch: PlanInput) -> Plan:
        """Plans one decode step. Deterministic in its inputs and the planner's own past.

        Draft-free steps publish nothing, so one after the other may have the same `batch`: the same object is the same
        question, and only whether to go on without a draft is decided again.
        """
        settings = self.settings
        num_reqs = len(batch.caps)
        kept, self._kept = self._kept, None
        if kept is not None and self._is_as_it_was(kept, batch):
            kept.builder.reopen()
            return self._draft_free_or(kept)
        usual, pinned = self._usual(batch.caps), None
        lengths, stages = usual.lengths, [*self._usual_stages]
        keeps_block, waited = batch.keeps_block, batch.num_steps_without_draft
        if keeps_block is not None or waited is not None or self.pinned_fraction is not None:
            lengths, pinned, stages = self._unusual(lengths, keeps_block, waited, self.pinned_fraction)
        builder = _Builder(lengths, usual.tiers, stages)
        if pinned is not None:
            return self._without_prices(builder, pinned, "pinned")
        if self.grid is not None and builder.tiers is None:
            return self._without_prices(builder, None, "batch past the grid")
        if batch.relayed is None:
            return self._without_prices(builder, None, "no confidence old enough")
        fresh = self._fresh_rows(batch.relayed.generations, batch.generations)
        builder.num_fresh = num_reqs if fresh is None else fresh.tobytes().count(1)
        builder.add(decided("confidence", False, "lagged"))
        if fresh is None or not self._draft_free.active:
            survival = survivals(batch.relayed.confidence, fresh)
            if fresh is not None:  # who is not fresh counts as certain
                builder.optimism = optimism(survival, fresh, lengths.caps)
        else:
            survival = as_average(survivals(batch.relayed.confidence, None), fresh)
        drafts = ranked(survival, lengths, settings.survival_eps)
        builder.num_candidates = len(drafts.survivals)
        idle, small_batch = (
            usual.small_batch
            if lengths is usual.lengths
            else trimming_is_idle(usual.tiers, lengths.num_free, lengths.max_budget)
        )
        builder.add(small_batch)
        if self.table is None:
            return self._without_prices(builder, lengths.max_budget, "no cost table")
        return self._draft_free_or(self._best_drafted(batch, builder, drafts, idle))

    def observe_step(self, plan: Plan, measured_seconds: float) -> None:
        """Feeds the correction with what a planned step took; rank 0's time on every rank."""
        priced = plan.record.table_step_seconds
        correction = self.correction if plan.draft else self.plain_correction
        if correction is not None and priced is not None:
            num_tokens = plan.verify.num_tokens_run if plan.draft else plan.verify.num_tokens
            correction.observe(num_tokens, priced, measured_seconds)

    def _usual(self, caps: NDArray[np.int64]) -> _Usual:
        if self._last_usual is not None and caps is self._last_usual[0]:
            return self._last_usual[1]
        key, given = caps.tobytes(), caps
        usual = self._shared_usual.get(key)
        if usual is None:
            if len(self._shared_usual) >= MAX_SHARED_PLANS:
                self._shared_usual.clear()
            if self.settings.longest <= self.settings.gamma:
                caps = np.minimum(caps, self.settings.longest)
            floor = self.settings.floor
            floors = np.minimum(caps, floor) if floor > 1 else _anchors(len(caps))
            lengths = Lengths.of(floors, caps, self.settings.gamma)
            tiers = self.grid.tiers(len(caps)) if self.grid is not None else None
            small_batch = trimming_is_idle(tiers, lengths.num_free, lengths.max_budget)
            usual = self._shared_usual[key] = _Usual(lengths, tiers, small_batch)
        self._last_usual = given, usual
        return usual

    def _is_as_it_was(self, kept: _Choice, batch: PlanInput) -> bool:
        if kept.batch is not batch or not self._draft_free.active or self.table is None:
            return False
        return self._prices_of(len(batch.caps), kept.builder.tiers).seconds() is kept.prices

    def _unusual(
        self,
        usual: Lengths,
        keeps_block: NDArray[np.bool_] | None,
        waited: NDArray[np.int64] | None,
        pinned_fraction: float | None,
    ) -> tuple[Lengths, int | None, list[StageRecord]]:
        """Lengths with the floors that some have of their own, the budget if it is pinned, and the stages so far."""
        settings, lengths = self.settings, usual
        floors, full_blocks = full_block_floors(usual.floors, usual.caps, keeps_block)
        floors, fairness = fairness_floors(floors, usual.caps, waited, settings.min_drafts_every)
        if floors is not usual.floors:
            lengths = Lengths.of(floors, usual.caps, settings.gamma)
        columns = settings.longest - settings.floor
        pinned, pin = pinned_budget(pinned_fraction, len(floors), columns, lengths.max_budget)
        return lengths, pinned, [full_blocks, fairness, pin]

    def _fresh_rows(self, stored: NDArray[np.int64], current: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """`fresh_rows`, None where all are. The same array is the same answer."""
        if stored is current and current is self._all_written:
            return None
        fresh = fresh_rows(stored, current)
        if not fresh.all():
            return fresh
        self._all_written = current
        return None

    def _best_drafted(self, batch: PlanInput, builder: _Builder, drafts: Candidates, idle: bool) -> _Choice:
        """The stages from the table to the tier fill."""
        full, num_free, tiers = builder.max_budget, builder.num_free, builder.tiers
        builder.add(decided("table", False, "priced"))
        prices = self._prices_of(len(batch.caps), tiers)
        shape_seconds, tau = prices.seconds(), drafts.expected_tokens()
        seconds, most = prices.of_budgets(shape_seconds, num_free, full), len(tau) - 1
        budget, full_theta = full, tau.item(most) / seconds.item(full)
        if idle:
            reason = builder.stages[STAGES.index("small batch")].reason
            for name in ("argmax", "gain guard", "tier fill"):
                builder.add(skipped(name, reason))
        else:
            budget = builder.argmax_budget = best_budget(tau, seconds)
            builder.add(decided("argmax", budget < full, "trims" if budget < full else "keeps all"))
            theta = tau.item(budget) / seconds.item(budget)
            budget, guard = gain_guard(budget, theta, full, full_theta, self.settings.min_gain)
            builder.add(guard)
            budget, fill = tier_fill(budget, num_free, full, tiers)
            builder.add(fill)
        builder.full_theta = full_theta
        keeps_block = batch.keeps_block
        keeps = keeps_block is not None and bool((keeps_block & (builder.caps > 1)).any())
        tokens, table_seconds = tau.item(min(budget, most)), prices.table_seconds_of(num_free + budget)
        return _Choice(
            batch, builder, shape_seconds, keeps, idle, budget, tokens, seconds.item(budget), table_seconds
        )

    def _draft_free_or(self, choice: _Choice) -> Plan:
        """The draft-free stage: the plan that is chosen, or a plain step."""
        builder, tokens, seconds = choice.builder, choice.tokens, choice.seconds
        num_reqs = len(builder.caps)
        was_active = self._draft_free.active
        sober = max(tokens - builder.optimism, float(num_reqs))
        plain = self._draft_free_stage(builder, num_reqs, sober, seconds, choice.any_keeps_block)
        if not choice.is_idle and builder.tiers is not None:
            assert builder.full_theta is not None
            best = max(tokens / seconds, builder.plain_theta or 0.0)
            is_drafting = not self._draft_free.active and self._draft_free.evidence == 0.0
            kept_all = choice.budget == builder.max_budget and builder.num_fresh == num_reqs and is_drafting
            self._cadence.found(num_reqs, builder.tiers.num_slots, best / builder.full_theta - 1.0, kept_all)
        if plain is not None:
            self._kept = choice if was_active else None
            return plain
        builder.expected_tokens, builder.predicted_step_seconds = tokens, seconds
        builder.table_step_seconds = choice.table_seconds
        return builder.build(choice.budget)

    def _prices_of(self, num_reqs: int, tiers: BucketTiers | None) -> BatchPrices:
        table, correction = self.table, self.correction
        assert table is not None
        if self._priced_with[0] is not table or self._priced_with[1] is not correction:
            self._priced_with = table, correction
            self._shared_prices.clear()
        prices = self._shared_prices.get(num_reqs)
        if prices is None:
            if len(self._shared_prices) >= MAX_SHARED_PLANS:
                self._shared_prices.clear()
            most, rule = num_reqs * (self.settings.gamma + 1), self.settings.lookup_rule
            prices = BatchPrices(table, num_reqs, most, tiers, rule, correction)
            self._shared_prices[num_reqs] = prices
        return prices

    def _draft_free_stage(
        self,
        builder: _Builder,
        num_reqs: int,
        drafted_tokens: float,
        drafted_seconds: float,
        any_keeps_block: bool,
    ) -> Plan | None:
        """A draft-free plan if that is what wins; otherwise None, and the stage is in the record either way."""
        reason = None
        if self.settings.draft_free is None:
            reason = "switched off"
        elif self.plain_costs is None:
            reason = "no price for a plain step"
        elif any_keeps_block:
            reason = "a request keeps its full block"
        if reason is not None or self.settings.draft_free is None or self.plain_costs is None:
            self._draft_free = DraftFreeState()
            builder.add(skipped("draft-free", reason or "switched off"))
            return None
        table_seconds = seconds = self.plain_costs.step_seconds(num_reqs)
        if self.plain_correction is not None:
            seconds *= self.plain_correction.factor(num_reqs)
        builder.plain_theta = num_reqs / seconds
        drafted_theta = drafted_tokens / drafted_seconds
        plain, self._draft_free, record = draft_free_choice(
            self.settings.draft_free,
            self._draft_free,
            builder.plain_theta,
            drafted_theta,
            drafted_seconds / seconds,
        )
        builder.add(record)
        if not plain:
            return None
        builder.expected_tokens, builder.predicted_step_seconds = float(num_reqs), seconds
        builder.table_step_seconds = table_seconds
        return builder.build_plain()

    def _shared_plan(self, reason: str, caps: tuple[int, ...]) -> Plan:
        plan = self._shared_plans.get((reason, caps))
        if plan is None:
            if len(self._shared_plans) >= MAX_SHARED_PLANS:
                self._shared_plans.clear()
            plan = self._shared_plans[reason, caps] = self._make_shared_plan(reason, caps)
        return plan

    def _make_shared_plan(self, reason: str, cap_list: tuple[int, ...]) -> Plan:
        """A plan that depends on the caps alone, every stage with the same reason."""
        usual = self._usual(np.array(cap_list, dtype=np.int64))
        builder = _Builder(usual.lengths, usual.tiers, [])
        for name in STAGES:
            is_the_rule = name == "small batch" and reason == ONE_TIER
            builder.add(decided(name, True, reason) if is_the_rule else skipped(name, reason))
        return (
            builder.build_plain() if reason == _NO_DRAFTS else builder.build(builder.max_budget, looks=False)
        )

    def _without_prices(self, builder: _Builder, budget: int | None, reason: str) -> Plan:
        """A plan that looked at no price: the stages not asked so far are skipped for the same reason."""
        self._draft_free = DraftFreeState()
        for name in STAGES[len(builder.stages) :]:
            builder.add(skipped(name, reason))
        return builder.build(budget)


class _Builder:
    """Gathers one plan: the batch's token counts, the stages so far, and the numbers for the record."""

    def __init__(self, lengths: Lengths, tiers: BucketTiers | None, stages: list[StageRecord]) -> None:
        self.floors, self.caps = lengths.floors, lengths.caps
        self.num_free, self.max_budget = lengths.num_free, lengths.max_budget
        self.tiers = tiers
        self.stages, self.add = stages, stages.append  # one per name in STAGES, in that order
        self.num_fresh = self.num_candidates = 0
        self.optimism = 0.0
        self.argmax_budget: int | None = None
        self.expected_tokens: float | None = None
        self.predicted_step_seconds: float | None = None
        self.full_theta: float | None = None
        self.plain_theta: float | None = None
        self.table_step_seconds: float | None = None

    def reopen(self) -> None:
        """As it was before the draft-free stage, the last."""
        self.stages.pop()
        self.plain_theta = None

    def build(self, budget: int | None, looks: bool = True) -> Plan:
        num_tokens = self.num_free + (self.max_budget if budget is None else budget)
        full = budget is None or budget >= self.max_budget
        key = self.tiers.key(num_tokens) if self.tiers is not None else None
        verify = VerifyBudget(budget, full, num_tokens, key)
        return Plan(verify, True, looks, self.floors, self.caps, self._record())

    def build_plain(self) -> Plan:
        anchors = _anchors(len(self.caps))
        key = self.tiers.plain_key if self.tiers is not None else None
        verify = VerifyBudget(0, True, len(anchors), key)
        return Plan(verify, False, True, anchors, anchors, self._record())

    def _record(self) -> PlanRecord:
        seconds, tokens = self.predicted_step_seconds, self.expected_tokens
        return PlanRecord(
            tuple(self.stages),
            self.num_fresh,
            self.num_candidates,
            self.argmax_budget,
            tokens,
            seconds,
            tokens / seconds if tokens is not None and seconds is not None else None,
            self.full_theta,
            self.plain_theta,
            self.table_step_seconds,
        )


@lru_cache(maxsize=MAX_SHARED_PLANS)
def _anchors(num_reqs: int) -> NDArray[np.int64]:
    """One row for each request. Shared, never written."""
    return np.ones(num_reqs, dtype=np.int64)
