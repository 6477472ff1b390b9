"""Counts over all steps since the start: a few integers per step, read when somebody asks for metrics."""

from __future__ import annotations

import struct
import zlib
from collections import Counter

from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.plan_stages import StageRecord
from flashspark.speculative.planner import STAGES, Plan

from .step_record import StepRecord, plan_outcome

NUM_SIZE_CLASSES = 15  # of steps by rows: up to 1, 2, 4 … 8192, and more
_CONFIDENCE, _SMALL_BATCH = STAGES.index("confidence"), STAGES.index("small batch")


class StepTotals:
    """Takes every turn's record. Everything in it only grows, `plan_hash` apart."""

    def __init__(self) -> None:
        self.num_full_tokens = 0  # rows of everybody's full blocks
        self.num_trimmed_tokens = 0  # rows of full blocks that drafted steps did not verify
        self.num_pad_tokens = 0  # rows run that belong to nobody
        self.num_small_batch_plans = 0  # all budgets ran on one tier: nothing was priced
        self.outcomes: Counter[str] = Counter()  # plans by what they came to
        self.unresolved: Counter[str] = Counter()  # plans that had no confidence to go by, by reason
        self.num_predicted_steps = 0
        self.predicted_seconds = self.measured_seconds = 0.0  # of steps whose time was predicted
        self.steps_by_size = [0] * NUM_SIZE_CLASSES
        self.num_rows_run = 0
        self.plan_hash = 0  # of all plans so far, in order; equal on ranks that planned alike

    def add(self, record: StepRecord) -> None:
        """Counts a turn."""
        if record.num_reqs == 0:
            return
        size_class = min((record.num_rows_run - 1).bit_length(), NUM_SIZE_CLASSES - 1)
        self.steps_by_size[size_class] += 1
        self.num_rows_run += record.num_rows_run
        self.num_full_tokens += record.num_full_tokens
        if record.mode == VerifyMode.COMPACT.value:
            self.num_pad_tokens += record.num_rows_run - record.num_verify_tokens
        if record.plan is not None:
            self._add_plan(record, record.plan)

    def _add_plan(self, record: StepRecord, plan: Plan) -> None:
        if plan.draft:
            self.num_trimmed_tokens += record.num_full_tokens - record.num_verify_tokens
        outcome = plan_outcome(plan)
        self.outcomes[outcome] += 1
        confidence: StageRecord = plan.record.stages[_CONFIDENCE]
        if plan.looks and not confidence.ran and outcome != "pinned":
            self.unresolved[confidence.reason] += 1
        self.num_small_batch_plans += plan.record.stages[_SMALL_BATCH].changed
        if plan.record.predicted_step_seconds is not None:
            self.num_predicted_steps += 1
            self.predicted_seconds += plan.record.predicted_step_seconds
            self.measured_seconds += record.decode_ms / 1e3
        self.plan_hash = fold_plan(self.plan_hash, plan)


def fold_plan(plan_hash: int, plan: Plan) -> int:
    """`plan_hash` with one more plan in it: its budget, its tier and whether it drafts, which decide shapes."""
    verify = plan.verify
    slots, tokens = (verify.tier.num_slots, verify.tier.num_tokens) if verify.tier is not None else (-1, -1)
    budget = -1 if verify.budget is None else verify.budget
    return zlib.crc32(struct.pack("<4q", budget, slots, tokens, plan.draft), plan_hash)
