"""What the planner is given: settings once, the batch at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from .cost_table import LookupRule
from .looks import LookRule
from .plan_stages import DraftFreeRule
from .relay import RelayedConfidence


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
