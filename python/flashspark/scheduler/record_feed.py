"""The feed of decode steps that a profiler reads: `dspark_info_record` of /server_info, in SGLang's fields.

Every record is encoded when its step ends, a few microseconds each, so that a poll has only to join what is there:
profilers fetch the whole feed again and again while the steps they measure go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from .step_record import StepRecord

CAPACITY = 200_000
LONGEST_INTERVAL_SECONDS = 1.0  # an interval above it holds something else than a step


class FeedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decode step. Defaults are left out of the JSON."""

    forward_ct: int
    bs: int
    mode: str
    num_running_reqs: int
    num_verify_tokens: int  # rows the target ran, padding included
    budget: int | None = None  # drafts above the floors; None: not planned
    lag_steps: int | None = None
    predicted_step_ms: float | None = None
    predicted_theta: float | None = None  # expected tokens per second
    step_cpu_ms: float | None = (
        None  # since the decode step before it ended; None where that is not one step's time
    )


class FeedHeader(msgspec.Struct, frozen=True):
    """What is the same for all records."""

    mode: str
    gamma: int
    verify_num_draft_tokens: int
    components: Sequence[str]
    simulate_acc_len: float | None


class RecordFeed:
    """A ring of encoded records. Takes every turn of the loop and keeps those that decoded."""

    def __init__(self, header: FeedHeader, capacity: int = CAPACITY) -> None:
        self.header = header
        self._times_steps = "step_cpu_time" in header.components
        self._records: deque[bytes] = deque(maxlen=capacity)
        self._encoder = msgspec.json.Encoder()
        self._last_end_seconds: float | None = None  # of the turn before, if it decoded and left work to do

    def add(self, record: StepRecord, end_seconds: float, goes_on: bool) -> None:
        """Takes a turn that ended at `end_seconds`; `goes_on`: the next turn follows at once."""
        if record.num_reqs == 0:
            self._last_end_seconds = None
            return
        step_cpu_ms = None
        if self._last_end_seconds is not None and record.num_prefill_tokens == 0 and self._times_steps:
            interval = end_seconds - self._last_end_seconds
            step_cpu_ms = interval * 1e3 if interval <= LONGEST_INTERVAL_SECONDS else None
        self._last_end_seconds = end_seconds if goes_on else None
        budget = lag_steps = predicted_ms = theta = None
        if (plan := record.plan) is not None:
            budget, lag_steps, theta = plan.verify.budget, plan.record.lag_steps, plan.record.predicted_theta
            if plan.record.predicted_step_seconds is not None:
                predicted_ms = plan.record.predicted_step_seconds * 1e3
        feed_record = FeedRecord(
            forward_ct=record.forward_ct,
            bs=record.num_reqs,
            mode=self.header.mode,
            num_running_reqs=record.num_reqs,
            num_verify_tokens=record.num_rows_run,
            budget=budget,
            lag_steps=lag_steps,
            predicted_step_ms=predicted_ms,
            predicted_theta=theta,
            step_cpu_ms=step_cpu_ms,
        )
        self._records.append(self._encoder.encode(feed_record))

    def clear(self) -> None:
        """Forgets all records; `forward_ct` goes on rising."""
        self._records.clear()

    def dump(self) -> bytes:
        """The whole feed as JSON."""
        head = self._encoder.encode(self.header)
        return head[:-1] + b',"records":[' + b",".join(self._records) + b"]}"
