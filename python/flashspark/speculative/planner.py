"""The verify planner: from lagged confidence and a cost table to one host integer, the budget of the step.

Runs on the host before the step's drafts exist, over plain arrays: nothing here asks a device. Everything it looks
at is the same on every tensor-parallel rank, and so is what it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from .cost_table import (
    BatchPrices,
    BudgetPrices,
    CostCorrection,
    CostTable,
    LookupRule,
    PlainStepCosts,
    SpsCostTable,
)
from .looks import ONE_TIER, LookCadence, LookRule
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
    DraftFreeRule,
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
from .relay import LAG, RelayedConfidence
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


@dataclass(frozen=True)
class PlannerSettings:
    """What is fixed for the life of a planner. Lengths count block rows, the anchor included."""

    gamma: int
    min_verify_len: int = 1
    max_verify_len: int = 0  # 0: the full block
    survival_eps: float = 1e-6
    min_gain: float = 0.02
    min_drafts_every: int = 0  # steps; 0: off
    look_rule: LookRule = field(default_factory=LookRule)
    trim_without_table: bool = False  # cap-accept: a flat table instead of none
    lookup_rule: LookupRule = LookupRule.PAD_UP
    draft_free: DraftFreeRule | None = field(default_factory=DraftFreeRule)  # None: always draft

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {self.gamma}")
        longest = self.gamma + 1 if self.max_verify_len == 0 else self.max_verify_len
        if not 0 <= self.min_verify_len <= longest <= self.gamma + 1:
            raise ValueError(
                f"0 <= min_verify_len <= max_verify_len <= {self.gamma + 1}, "
                f"got {self.min_verify_len} and {self.max_verify_len}"
            )
        for name in ("survival_eps", "min_gain", "min_drafts_every"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    @property
    def floor(self) -> int:
        """Rows every request gets for free."""
        return max(self.min_verify_len, 1)

    @property
    def longest(self) -> int:
        """Most rows a request may verify, Lmax."""
        return self.max_verify_len or self.gamma + 1


class PlanInput(msgspec.Struct, frozen=True):
    """The batch as the planner sees it, host arrays only; replicated on every rank. R requests, at least one."""

    relayed: RelayedConfidence | None  # None: nothing old enough was published yet
    generations: NDArray[np.int64]  # [R], of the rows now
    caps: NDArray[np.int64]  # [R], most rows each request can use this step, 1 … W
    # [R], verifies its full block whatever it costs: seeded, or asked to. None: nobody does
    keeps_block: NDArray[np.bool_] | None
    # [R], drafted steps in a row that verified the anchor alone. None: nobody had `min_drafts_every`
    num_steps_without_draft: NDArray[np.int64] | None


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


class _Priced(msgspec.Struct, frozen=True):
    """The argmax and what it compared."""

    best: int
    tau: NDArray[np.float64]
    prices: BudgetPrices  # of every budget up to the full one

    def expected_tokens(self, budget: int) -> float:
        return self.tau.item(min(budget, len(self.tau) - 1))

    def theta(self, budget: int) -> float:
        return self.expected_tokens(budget) / self.prices.seconds.item(budget)


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
        self._shared_lengths: dict[bytes, Lengths] = {}  # by caps, where nobody has a floor of its own
        self._shared_prices: dict[tuple[int, int, int], BatchPrices] = {}  # by requests, free rows, budget
        self._priced_with: tuple[object, object] = (None, None)  # table and correction

    def pin(self, fraction: float | None) -> None:
        """Fixes the budget to a fraction of all drafts, for profiling; None lets the planner decide again."""
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"a pinned fraction lies in (0, 1], got {fraction}")
        self.pinned_fraction = fraction
        self._draft_free = DraftFreeState()

    def limit(self, max_verify_len: int) -> None:
        """Most rows a request may verify from now on, 1 … W; what lies behind is drafted and never verified."""
        self.settings = replace(self.settings, max_verify_len=max_verify_len)
        self._shared_plans.clear()
        self._shared_lengths.clear()

    def looks(self, num_reqs: int, num_rows: int) -> bool:
        """Whether the next step, of `num_rows` rows if all is verified, is worth looking at. Called once per step."""
        tiers = self.grid.tiers(num_reqs) if self.grid is not None else None
        if tiers is None or self.pinned_fraction is not None or self._draft_free.active:
            return self._cadence.is_due(num_reqs, num_reqs, one_tier=False, always=True)
        one_tier = tiers.round_up(num_reqs) == tiers.round_up(num_rows)
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
        """Plans one decode step. Deterministic in its inputs and the planner's own past."""
        settings = self.settings
        num_reqs = len(batch.caps)
        usual = self._lengths_of(batch.caps)
        floors, full_blocks = full_block_floors(usual.floors, usual.caps, batch.keeps_block)
        floors, fairness = fairness_floors(
            floors, usual.caps, batch.num_steps_without_draft, settings.min_drafts_every
        )
        is_usual = floors is usual.floors
        lengths = usual if is_usual else Lengths.of(floors, usual.caps, settings.gamma)
        columns = settings.longest - settings.floor
        pinned, pin = pinned_budget(self.pinned_fraction, num_reqs, columns, lengths.max_budget)
        builder = _Builder(lengths, self.grid, [full_blocks, fairness, pin])
        if pinned is not None:
            return self._without_prices(builder, pinned, "pinned")
        if self.grid is not None and builder.tiers is None:
            return self._without_prices(builder, None, "batch past the grid")
        if batch.relayed is None:
            return self._without_prices(builder, None, "no confidence old enough")
        fresh = fresh_rows(batch.relayed.generations, batch.generations)
        builder.num_fresh = int(np.count_nonzero(fresh))
        builder.add(decided("confidence", False, "lagged"))
        survival = survivals(batch.relayed.confidence, fresh)
        if builder.num_fresh < num_reqs:  # who is not fresh counts as certain
            if self._draft_free.active:
                survival = as_average(survival, fresh)
            else:
                builder.optimism = optimism(survival, fresh, lengths.caps)
        drafts = ranked(survival, lengths, settings.survival_eps)
        keeps_block = batch.keeps_block
        keeps = keeps_block is not None and full_blocks.ran and bool((keeps_block & (lengths.caps > 1)).any())
        return self._priced_plan(builder, drafts, num_reqs, keeps)

    def observe_step(self, plan: Plan, measured_seconds: float) -> None:
        """Feeds the correction with what a planned step took; rank 0's time on every rank."""
        priced = plan.record.table_step_seconds
        correction = self.correction if plan.draft else self.plain_correction
        if correction is not None and priced is not None:
            num_tokens = plan.verify.num_tokens_run if plan.draft else plan.verify.num_tokens
            correction.observe(num_tokens, priced, measured_seconds)

    def _lengths_of(self, caps: NDArray[np.int64]) -> Lengths:
        """Where nobody has a floor of its own."""
        key = caps.tobytes()
        lengths = self._shared_lengths.get(key)
        if lengths is None:
            if len(self._shared_lengths) >= MAX_SHARED_PLANS:
                self._shared_lengths.clear()
            caps = np.minimum(caps, self.settings.longest)
            floors = np.minimum(caps, self.settings.floor)
            lengths = self._shared_lengths[key] = Lengths.of(floors, caps, self.settings.gamma)
        return lengths

    def _priced_plan(
        self, builder: _Builder, drafts: Candidates, num_reqs: int, any_keeps_block: bool
    ) -> Plan:
        """The stages from the small-batch rule on."""
        settings, full = self.settings, builder.max_budget
        builder.num_candidates = len(drafts.survivals)
        idle, small_batch = trimming_is_idle(builder.tiers, builder.num_free, full)
        builder.add(small_batch)
        if self.table is None:
            return self._without_prices(builder, full, "no cost table")
        builder.add(decided("table", False, "priced"))
        priced = self._price(builder, drafts, num_reqs)
        budget = full
        if idle:
            for name in ("argmax", "gain guard", "tier fill"):
                builder.add(skipped(name, small_batch.reason))
        else:
            budget = builder.argmax_budget = priced.best
            builder.add(decided("argmax", budget < full, "trims" if budget < full else "keeps all"))
            budget, guard = gain_guard(
                budget, priced.theta(budget), full, priced.theta(full), settings.min_gain
            )
            builder.add(guard)
            budget, fill = tier_fill(budget, builder.num_free, full, builder.tiers)
            builder.add(fill)
        builder.full_theta = full_theta = priced.theta(full)
        tokens, seconds = priced.expected_tokens(budget), priced.prices.seconds.item(budget)
        sober = max(tokens - builder.optimism, float(num_reqs))
        plain = self._draft_free_stage(builder, num_reqs, sober, seconds, any_keeps_block)
        if not idle and builder.tiers is not None:
            best = max(tokens / seconds, builder.plain_theta or 0.0)
            is_drafting = not self._draft_free.active and self._draft_free.evidence == 0.0
            kept_all = budget == full and builder.num_fresh == num_reqs and is_drafting
            self._cadence.found(num_reqs, builder.tiers.num_slots, best / full_theta - 1.0, kept_all)
        if plain is not None:
            return plain
        builder.expected_tokens, builder.predicted_step_seconds = tokens, seconds
        builder.table_step_seconds = priced.prices.table_seconds.item(budget)
        return builder.build(budget)

    def _price(self, builder: _Builder, drafts: Candidates, num_reqs: int) -> _Priced:
        prices = self._prices_of(num_reqs, builder).now()
        tau = drafts.expected_tokens()
        return _Priced(best_budget(tau, prices.seconds), tau, prices)

    def _prices_of(self, num_reqs: int, builder: _Builder) -> BatchPrices:
        table, correction = self.table, self.correction
        assert table is not None
        if self._priced_with[0] is not table or self._priced_with[1] is not correction:
            self._priced_with = table, correction
            self._shared_prices.clear()
        key = num_reqs, builder.num_free, builder.max_budget
        prices = self._shared_prices.get(key)
        if prices is None:
            if len(self._shared_prices) >= MAX_SHARED_PLANS:
                self._shared_prices.clear()
            prices = self._shared_prices[key] = BatchPrices.of(
                table, *key, builder.tiers, self.settings.lookup_rule, correction
            )
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
        builder = _Builder(self._lengths_of(np.array(cap_list, dtype=np.int64)), self.grid, [])
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

    def __init__(self, lengths: Lengths, grid: TierGrid | None, stages: list[StageRecord]) -> None:
        self.floors, self.caps = lengths.floors, lengths.caps
        self.num_free, self.max_budget = lengths.num_free, lengths.max_budget
        self._grid = grid
        self.tiers: BucketTiers | None = grid.tiers(len(self.caps)) if grid is not None else None
        self.stages, self.add = stages, stages.append  # one per name in STAGES, in that order
        self.num_fresh = self.num_candidates = 0
        self.optimism = 0.0
        self.argmax_budget: int | None = None
        self.expected_tokens: float | None = None
        self.predicted_step_seconds: float | None = None
        self.full_theta: float | None = None
        self.plain_theta: float | None = None
        self.table_step_seconds: float | None = None

    def build(self, budget: int | None, looks: bool = True) -> Plan:
        num_tokens = self.num_free + (self.max_budget if budget is None else budget)
        verify = VerifyBudget(
            budget=budget,
            full=budget is None or budget >= self.max_budget,
            num_tokens=num_tokens,
            tier=self._tier(num_tokens),
        )
        return Plan(verify, True, looks, self.floors, self.caps, self._record())

    def build_plain(self) -> Plan:
        anchors = np.ones_like(self.caps)
        key = self._grid.plain_key(len(anchors)) if self._grid is not None else None
        verify = VerifyBudget(budget=0, full=True, num_tokens=len(anchors), tier=key)
        return Plan(verify, False, True, anchors, anchors, self._record())

    def _tier(self, num_tokens: int) -> TierKey | None:
        if self.tiers is None:
            return None
        return TierKey(self.tiers.num_slots, self.tiers.round_up(num_tokens))

    def _record(self) -> PlanRecord:
        seconds, tokens = self.predicted_step_seconds, self.expected_tokens
        return PlanRecord(
            stages=tuple(self.stages),
            num_fresh=self.num_fresh,
            num_candidates=self.num_candidates,
            argmax_budget=self.argmax_budget,
            expected_tokens=tokens,
            predicted_step_seconds=seconds,
            predicted_theta=tokens / seconds if tokens is not None and seconds is not None else None,
            full_theta=self.full_theta,
            plain_theta=self.plain_theta,
            table_step_seconds=self.table_step_seconds,
        )
