"""Which steps are worth looking at: planned from confidence, and learned from.

A look costs a small step some percent (half a millisecond on a CPU), and most of what it finds in a small batch is
that everything is worth verifying. A step that is not looked at verifies full blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

# A batch whose budgets all run on one tier is planned, and learned from, on every so many of its steps.
IDLE_LOOK_EVERY = 8
KEPT_LOOK_EVERY = 4  # likewise where everything was kept at the last look
POOR_LOOK_EVERY = 8  # and where looks found next to nothing lately
# Predicted gains below it do not pay for looking, the less so as they are the best of many noisy predictions: with
# pairs of greedy requests looks promised 0.4 % and lost 3 %, with four they promised 5 % and won nothing.
POOR_GAIN = 0.05
_GAIN_WEIGHT = 1 / 16  # of a new look in the mean
_FIRST_GAIN = 2.0  # times what pays: an unknown batch size is looked at eleven times at least

ONE_TIER = "one tier for all budgets"


@dataclass(frozen=True)
class LookRule:
    """Steps from one look to the next; 1 switches a reason off."""

    idle_every: int = IDLE_LOOK_EVERY
    kept_every: int = KEPT_LOOK_EVERY
    poor_every: int = POOR_LOOK_EVERY
    poor_gain: float = POOR_GAIN

    def __post_init__(self) -> None:
        for name in ("idle_every", "kept_every", "poor_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def of_captured_steps(cls) -> LookRule:
        """Where steps are captured on a GPU: a look costs 35 µs of the device, half a percent of a small step."""
        return cls(kept_every=2, poor_gain=0.005)


class LookCadence:
    """Counts steps between looks, and remembers what looks found, per request bucket. Host state, replicated."""

    def __init__(self, rule: LookRule) -> None:
        self.rule = rule
        self.why_not = ""  # of the last step that was not looked at; a fixed phrase
        self._num_unlooked = 0  # steps since the last look
        self._kept_all_of = 0  # requests of the last look, if it kept everything and knew everybody
        self._gains: dict[int, float] = {}  # by request bucket: mean gain that looks promised

    def is_due(self, num_reqs: int, bucket: int, one_tier: bool, always: bool) -> bool:
        """Whether to look at this step. Called once per step.

        Args:
            bucket: of `num_reqs`.
            one_tier: the batch's least and most rows run on one tier: nothing to trim.
            always: somebody needs a look whatever it finds.
        """
        every, self.why_not = 1, ""
        if always:
            pass
        elif one_tier:
            every, self.why_not = self.rule.idle_every, ONE_TIER
        elif self._mean_gain(bucket) < self.rule.poor_gain:
            every, self.why_not = self.rule.poor_every, "looks gained little lately"
        elif self._kept_all_of == num_reqs:
            every, self.why_not = self.rule.kept_every, "all was kept lately"
        self._num_unlooked += 1
        if self._num_unlooked < every:
            return False
        self._num_unlooked = self._kept_all_of = 0
        return True

    def found(self, num_reqs: int, bucket: int, gain: float, kept_all: bool) -> None:
        """What a look at a batch that could be trimmed promised over full blocks; `kept_all`: nothing, of everybody."""
        mean = self._mean_gain(bucket)
        self._gains[bucket] = mean + _GAIN_WEIGHT * (gain - mean)
        self._kept_all_of = num_reqs if kept_all else 0

    def _mean_gain(self, bucket: int) -> float:
        return self._gains.get(bucket, _FIRST_GAIN * self.rule.poor_gain)
