"""Adaptive verification as one object: plans each step, turns confidence into verify lengths, learns from outcomes.

The worker asks for lengths and hands back outcomes; what the confidence comes from is the source's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashspark.kernels.allocate import allocate
from flashspark.upload import upload

from .confidence import ConfidenceSource
from .planner import Plan, VerifyPlanner
from .planner_input import PlanInput
from .relay import ConfidenceRelay, RowGenerations
from .sampling import RowSampling


class VerifyMode(Enum):
    """What a plan changes: nothing, what may be accepted, or also what is computed."""

    STATIC = "static"
    CAP_ACCEPT = "cap-accept"
    COMPACT = "compact"


class _LastArray:
    """The array of a list that seldom changes from one step to the next, and more of it. Shared, never written."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self.array = np.empty(0, dtype=np.int64)
        self.total = 0

    def of(self, values: Sequence[int]) -> _LastArray:
        """Itself, of these values, at least one."""
        if values != self._values:
            self._values, self.array = list(values), np.array(values, dtype=np.int64)
            self.total = sum(values)
        return self


class AdaptiveVerifier:
    """Owns the planner, the relay, the source of confidence and the rows' generations. One per worker."""

    def __init__(
        self,
        mode: VerifyMode,
        planner: VerifyPlanner,
        source: ConfidenceSource,
        max_reqs: int,
        device: torch.device,
    ) -> None:
        assert mode is not VerifyMode.STATIC, "static verification plans nothing"
        self.mode: VerifyMode = mode
        self.planner, self.source = planner, source
        self._relay = ConfidenceRelay(max_reqs, source.gamma, device)
        self._generations = RowGenerations(max_reqs)
        self._eps = planner.settings.survival_eps
        self._is_drafting = True  # the last plan drafts
        self._device = device
        self._rows, self._caps = _LastArray(), _LastArray()
        self._last_input: PlanInput | None = None
        self._last_input_of = 0  # publications

    def assign(self, row: int, params: RowSampling, speculates: bool) -> None:
        """A request takes `row`; what was known of its last owner is stale from here on."""
        self._generations.renew(row)
        self.source.assign(row, params, is_visible=speculates)

    def release(self, row: int) -> None:
        """The request in `row` has left."""
        self.source.release(row)

    def plan(
        self,
        row_list: Sequence[int],
        caps: Sequence[int],
        keeps_block: Sequence[bool],
        num_steps_without_draft: Sequence[int],
    ) -> Plan:
        """Plans the next step of these rows from what was relayed two drafted steps ago. Host state only."""
        rows = self._caps.of(caps)
        if rows.total == len(caps):  # one row each
            return self.planner.anchors_plan(len(caps))
        if not self.planner.looks(len(caps), rows.total):
            return self.planner.full_plan(caps)
        plan = self.planner.plan(self._input(row_list, rows.array, keeps_block, num_steps_without_draft))
        if self._is_drafting and not plan.draft:
            self.source.catch_up()
        self._is_drafting = plan.draft
        return plan

    def _input(
        self,
        row_list: Sequence[int],
        caps: NDArray[np.int64],
        keeps_block: Sequence[bool],
        waited: Sequence[int],
    ) -> PlanInput:
        """The last one again while it holds, as it often does from one draft-free step to the next."""
        index = self._rows.of(row_list).array
        generations = self._generations.of(index)
        any_keeps = any(keeps_block)
        every = self.planner.settings.min_drafts_every
        any_waits = every > 0 and max(waited) >= every
        is_ready, now = self.source.is_ready, self._relay.num_publications
        may_last = is_ready and not (any_keeps or any_waits)
        last = self._last_input if may_last and self._last_input_of == now else None
        if last is not None and last.caps is caps and last.generations is generations:
            return last
        batch = PlanInput(
            relayed=self._relay.resolve(index) if is_ready else None,
            generations=generations,
            caps=caps,
            keeps_block=np.array(keeps_block, dtype=np.bool_) if any_keeps else None,
            num_steps_without_draft=np.array(waited, dtype=np.int64) if any_waits else None,
        )
        self._last_input, self._last_input_of = batch if may_last else None, now
        return batch

    def observe_step(self, plan: Plan, measured_seconds: float) -> None:
        """Tells the planner what a step took. In cap-accept the rows planned are not those that ran."""
        if self.mode is VerifyMode.COMPACT:
            self.planner.observe_step(plan, measured_seconds)

    def publish(self, rows: Tensor, row_list: Sequence[int], signal: Tensor) -> Tensor:
        """Confidence [R, gamma] of the blocks just drafted for `rows`; its relay to the host starts here."""
        confidence = self.source.predict(rows, signal)
        self.relay(rows, row_list, confidence)
        return confidence

    def relay(self, rows: Tensor, row_list: Sequence[int], confidence: Tensor) -> None:
        """Starts the relay of confidence [R, gamma], which may be overwritten once later work is queued."""
        index = self._rows.of(row_list).array
        self._relay.publish(rows, index, confidence, self._generations.of(index))

    def verify_lens(self, plan: Plan, confidence: Tensor | None) -> Tensor:
        """Spends the plan's budget on the step's own confidence [R, gamma]: rows to verify, int64 [R].

        `confidence` is None where nothing was drafted; the plan then leaves nothing to share out.
        """
        caps = self._on_device(plan.caps)
        if plan.verify.full or confidence is None:
            return caps
        assert plan.verify.budget is not None, "a plan without a budget verifies everything"
        return allocate(confidence, plan.verify.budget, self._on_device(plan.floors), caps, self._eps)

    def _on_device(self, lens: NDArray[np.int64]) -> Tensor:
        return upload(lens, self._device)
