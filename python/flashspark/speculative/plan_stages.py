"""The stages around the budget argmax, each a pure function that also says what it did and why.

Floors come first, so that they are priced with the rest: a full block that a request keeps is in the step whatever
happens, and a budget chosen without it would be the best budget of another step. The others look at the argmax's
answer and may replace it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .tiers import BucketTiers, filled_budget


@dataclass(frozen=True)
class StageRecord:
    """What a stage of the plan did. `reason` is a fixed phrase, fit for a metric's label."""

    name: str
    ran: bool  # whether it had anything to decide
    changed: bool  # whether the plan is another one because of it
    reason: str


@cache  # names and reasons are few
def skipped(name: str, reason: str) -> StageRecord:
    """The record of a stage that was not asked."""
    return StageRecord(name, ran=False, changed=False, reason=reason)


@cache
def decided(name: str, changed: bool, reason: str) -> StageRecord:
    """The record of a stage that ran."""
    return StageRecord(name, ran=True, changed=changed, reason=reason)


def full_block_floors(
    floors: NDArray[np.int64], caps: NDArray[np.int64], keeps_block: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], StageRecord]:
    """Who asked for full blocks verifies them; so does a sampled request with a seed, or its output would depend on its
    batch mates."""
    if not keeps_block.any():
        return floors, skipped("full blocks", "no request keeps its block")
    raised = np.where(keeps_block, caps, floors)
    return raised, decided("full blocks", bool((raised > floors).any()), "kept")


def fairness_floors(
    floors: NDArray[np.int64],
    caps: NDArray[np.int64],
    num_steps_without_draft: NDArray[np.int64],
    min_drafts_every: int,
) -> tuple[NDArray[np.int64], StageRecord]:
    """Lets a request verify one draft at least after `min_drafts_every` steps without one; 0 switches it off.

    Without it, a request whose drafts look poor among better ones gets one token per step for as long as they stay.
    """
    if min_drafts_every == 0:
        return floors, skipped("fairness floor", "switched off")
    waited = num_steps_without_draft >= min_drafts_every
    if not waited.any():
        return floors, decided("fairness floor", False, "nobody waits")
    raised = np.where(waited, np.minimum(np.maximum(floors, 2), caps), floors)
    changed = bool((raised > floors).any())
    return raised, decided("fairness floor", changed, "raised" if changed else "floors suffice")


def pinned_budget(
    fraction: float | None, num_reqs: int, num_columns: int, max_budget: int
) -> tuple[int | None, StageRecord]:
    """The profiler's budget, int(fraction · requests · columns); None where nothing is pinned.

    It needs neither confidence nor a table, and no later stage may touch it.
    """
    if fraction is None:
        return None, skipped("pin", "not pinned")
    budget = min(int(fraction * num_reqs * num_columns), max_budget)
    return budget, decided("pin", True, "pinned")


def trimming_is_idle(
    tiers: BucketTiers | None, num_free_tokens: int, max_budget: int
) -> tuple[bool, StageRecord]:
    """The small-batch rule: whether the most and the least that can be verified run on the same tier.

    Then nothing can be saved and every draft is verified, without pricing. Decided by tier, not by comparing
    budgets, since a smaller budget on the same tier is no cheaper.
    """
    if max_budget == 0:
        return True, decided("small batch", False, "nothing to trim")
    if tiers is None:
        return False, skipped("small batch", "no tiers")
    idle = tiers.round_up(num_free_tokens) == tiers.round_up(num_free_tokens + max_budget)
    return idle, decided("small batch", idle, "one tier for all budgets" if idle else "several tiers")


def gain_guard(
    budget: int, theta: float, full_budget: int, full_theta: float, min_gain: float
) -> tuple[int, StageRecord]:
    """Trims only for a predicted gain of at least `min_gain` over verifying everything; prices are not exact."""
    if budget == full_budget:
        return budget, skipped("gain guard", "nothing trimmed")
    if theta >= full_theta * (1.0 + min_gain):
        return budget, decided("gain guard", False, "gain is large enough")
    return full_budget, decided("gain guard", True, "gain is too small")


def tier_fill(
    budget: int, num_free_tokens: int, max_budget: int, tiers: BucketTiers | None
) -> tuple[int, StageRecord]:
    """Raises the budget to what the tier holds: padding that is paid for verifies real drafts."""
    if tiers is None:
        return budget, skipped("tier fill", "no tiers")
    filled = filled_budget(budget, num_free_tokens, max_budget, tiers.round_up(num_free_tokens + budget))
    return filled, decided("tier fill", filled > budget, "filled" if filled > budget else "no padding")


@dataclass(frozen=True)
class DraftFreeRule:
    """When to decode without a draft: margins over the best drafted plan, and how often to look again."""

    enter_gain: float = 0.05
    leave_gain: float = 0.0  # below enter_gain: hysteresis
    patience: int = 8  # steps in a row that must want it before the first
    probe_every: int = 64  # draft-free steps between probes
    # Confidence is read two publications late, so a probe shorter than 3 would never be seen by the plan after it.
    probe_length: int = 3
    # A price that nobody ever pays is never corrected: after so many drafted steps in a row one is taken without a
    # draft, if that is thought to give at least this share of the tokens.
    try_every: int = 256
    try_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.leave_gain <= self.enter_gain:
            raise ValueError(f"0 <= leave_gain <= enter_gain, got {self.leave_gain} and {self.enter_gain}")
        for name in ("patience", "probe_every", "probe_length", "try_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class DraftFreeState:
    """Where the hysteresis stands. `num_steps` counts wanting steps before entering, then steps since a probe;
    `num_drafted` the drafted steps in a row, of batches that were priced."""

    active: bool = False
    num_steps: int = 0
    num_drafted: int = 0


def draft_free_choice(
    rule: DraftFreeRule, state: DraftFreeState, plain_theta: float, drafted_theta: float
) -> tuple[bool, DraftFreeState, StageRecord]:
    """Whether to take this step without a draft: plain decoding gives `plain_theta` tokens/s, the best plan the other.

    Returns the choice, the state for the next step, and the record.
    """
    gain = plain_theta / drafted_theta - 1.0
    if not state.active:
        num_drafted = state.num_drafted + 1
        if gain < rule.enter_gain:
            if num_drafted > rule.try_every and plain_theta >= rule.try_share * drafted_theta:
                return True, DraftFreeState(), decided("draft-free", True, "trying its price")
            drafting = DraftFreeState(num_drafted=num_drafted)
            return False, drafting, decided("draft-free", False, "drafting wins")
        if state.num_steps + 1 < rule.patience:
            waiting = DraftFreeState(False, state.num_steps + 1, num_drafted)
            return False, waiting, decided("draft-free", False, "waiting")
        return True, DraftFreeState(True, 1), decided("draft-free", True, "plain decoding wins")
    if gain < rule.leave_gain:
        return False, DraftFreeState(), decided("draft-free", False, "drafting wins again")
    if state.num_steps < rule.probe_every:
        going_on = DraftFreeState(True, state.num_steps + 1)
        return True, going_on, decided("draft-free", True, "plain decoding wins")
    ended = state.num_steps + 1 >= rule.probe_every + rule.probe_length
    probing = DraftFreeState(True, 0 if ended else state.num_steps + 1)
    return False, probing, decided("draft-free", False, "probe")
