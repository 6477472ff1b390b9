"""The stages around the budget argmax, each a pure function that also says what it did and why.

Floors come first, so that they are priced with the rest: a full block that a request keeps is in the step whatever
happens, and a budget chosen without it would be the best budget of another step. The others look at the argmax's
answer and may replace it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import msgspec
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
    floors: NDArray[np.int64], caps: NDArray[np.int64], keeps_block: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], StageRecord]:
    """Who asked for full blocks verifies them; so does a sampled request with a seed, or its output would depend on its
    batch mates."""
    if keeps_block is None or not np.count_nonzero(keeps_block):
        return floors, skipped("full blocks", "no request keeps its block")
    raised = np.where(keeps_block, caps, floors)
    return raised, decided("full blocks", bool((raised > floors).any()), "kept")


def fairness_floors(
    floors: NDArray[np.int64],
    caps: NDArray[np.int64],
    num_steps_without_draft: NDArray[np.int64] | None,
    min_drafts_every: int,
) -> tuple[NDArray[np.int64], StageRecord]:
    """Lets a request verify one draft at least after `min_drafts_every` steps without one; 0 switches it off.

    Without it, a request whose drafts look poor among better ones gets one token per step for as long as they stay.
    """
    if min_drafts_every == 0:
        return floors, skipped("fairness floor", "switched off")
    waited = None if num_steps_without_draft is None else num_steps_without_draft >= min_drafts_every
    if waited is None or not np.count_nonzero(waited):
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
    # Gains of steps in a row add up until they are worth so many of `enter_gain`: a small one takes so many steps, and
    # eight times as large a one is acted on at once, since with many requests each such step is a dear one.
    patience: int = 8
    # Draft-free steps between probes: as many as make probes cost `probe_share` of the time, within these bounds.
    probe_share: float = 0.01
    probe_every: int = 64
    probe_every_most: int = 256
    probe_length: int = (
        2  # confidence is read two publications late: that of the first, right after the second
    )
    # A price that nobody ever pays is never corrected: after so many drafted steps in a row some are taken without a
    # draft, if that is thought to give this share of the tokens; the sooner, the less is lost by it. One alone would
    # not be believed.
    try_every: int = 256
    try_every_least: int = 64
    try_length: int = 3
    try_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.leave_gain <= self.enter_gain:
            raise ValueError(f"0 <= leave_gain <= enter_gain, got {self.leave_gain} and {self.enter_gain}")
        if not (self.probe_share > 0 and 0 <= self.try_share < 1):
            raise ValueError(
                f"probe_share > 0 and 0 <= try_share < 1, got {self.probe_share} and {self.try_share}"
            )
        for name in ("patience", "probe_every", "probe_length", "try_every", "try_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def steps_to_probe(self, gain: float, step_ratio: float) -> int:
        """Draft-free steps before a probe, where plain decoding is `gain` ahead and a drafted step takes `step_ratio`
        times as long as a plain one."""
        lost = max(step_ratio * gain / (1.0 + gain), 0.0)  # by a step of the probe, in plain steps
        wanted = int(min(self.probe_length * lost / self.probe_share, float(self.probe_every_most)))
        return max(wanted, self.probe_every)

    def steps_to_try(self, share: float) -> int:
        """Drafted steps before plain ones are tried, which are thought to give `share` of the drafted tokens."""
        wanted = self.try_every * (1.0 - share) / (1.0 - self.try_share)
        return max(int(wanted), min(self.try_every_least, self.try_every))


class DraftFreeState(msgspec.Struct, frozen=True):
    """Where the hysteresis stands."""

    active: bool = False
    evidence: float = 0.0  # before entering: the sum of the gains seen in a row
    num_steps: int = 0  # draft-free ones since entering, or since the last probe
    num_drafted: int = 0  # drafted steps in a row, of batches that were priced
    num_apart: int = 0  # steps of the probe, or of the try, that is going on


def draft_free_choice(
    rule: DraftFreeRule,
    state: DraftFreeState,
    plain_theta: float,
    drafted_theta: float,
    step_ratio: float = 1.0,
) -> tuple[bool, DraftFreeState, StageRecord]:
    """Whether to take this step without a draft: plain decoding gives `plain_theta` tokens/s, the best plan the other.

    Args:
        step_ratio: seconds of the best plan's step over those of a plain one.

    Returns the choice, the state for the next step, and the record.
    """
    gain = plain_theta / drafted_theta - 1.0
    if not state.active:
        return _while_drafting(rule, state, gain)
    if gain < rule.leave_gain:
        return False, DraftFreeState(), decided("draft-free", False, "drafting wins again")
    if state.num_apart == 0 and state.num_steps < rule.steps_to_probe(gain, step_ratio):
        going_on = DraftFreeState(True, num_steps=state.num_steps + 1)
        return True, going_on, decided("draft-free", True, "plain decoding wins")
    ended = state.num_apart + 1 >= rule.probe_length
    probing = DraftFreeState(True) if ended else msgspec.structs.replace(state, num_apart=state.num_apart + 1)
    return False, probing, decided("draft-free", False, "probe")


def _while_drafting(
    rule: DraftFreeRule, state: DraftFreeState, gain: float
) -> tuple[bool, DraftFreeState, StageRecord]:
    """`draft_free_choice` before draft-free decoding is entered."""
    num_drafted = state.num_drafted + 1
    if gain >= rule.enter_gain:
        evidence = state.evidence + gain
        if evidence >= rule.patience * rule.enter_gain - 1e-9:  # sums of equal gains are not exact
            return True, DraftFreeState(True, num_steps=1), decided("draft-free", True, "plain decoding wins")
        waiting = DraftFreeState(evidence=evidence, num_drafted=num_drafted)
        return False, waiting, decided("draft-free", False, "waiting")
    is_due = state.num_apart > 0 or num_drafted > rule.steps_to_try(1.0 + gain)
    if is_due and 1.0 + gain >= rule.try_share:
        ended = state.num_apart + 1 >= rule.try_length
        trying = (
            DraftFreeState()
            if ended
            else msgspec.structs.replace(state, evidence=0.0, num_apart=state.num_apart + 1)
        )
        return True, trying, decided("draft-free", True, "trying its price")
    return False, DraftFreeState(num_drafted=num_drafted), decided("draft-free", False, "drafting wins")
