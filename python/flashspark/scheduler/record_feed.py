"""The feed of decode steps that a profiler reads: `dspark_info_record` of /server_info, in SGLang's fields.

Every record is encoded when its step ends, a few microseconds each, so that a poll has only to join what is there:
profilers fetch the whole feed again and again while the steps they measure go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from flashspark.speculative.plan_stages import StageRecord
from flashspark.speculative.planner import Plan

from .request_record import RequestRecord
from .step_record import StepRecord

CAPACITY = 200_000  # records
CAPACITY_BYTES = 64 << 20  # of JSON: what that many records without requests stay below
CAPACITY_BYTES_WITH_REQUESTS = 16 << 20  # with 48 requests each, some 1,000 steps
LONGEST_INTERVAL_SECONDS = 1.0  # an interval above it holds something else than a step


class FeedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decode step. Defaults are left out of the JSON."""

    forward_ct: int
    bs: int
    mode: str
    num_running_reqs: int
    num_verify_tokens: int  # rows the target ran, padding included
    verify_tokens_local: int  # sum of the verify lengths
    verify_tokens_graph_key: int | None = None  # rows of the planned tier; in cap-accept not what ran
    budget: int | None = None  # drafts above the floors; None: not planned
    lag_steps: int | None = None
    predicted_step_ms: float | None = None
    predicted_theta: float | None = None  # expected tokens per second
    step_cpu_ms: float | None = (
        None  # since the decode step before it ended; None where that is not one step's time
    )
    decode_ms: float | None = None  # from the drafts to the tokens on the host, beside `predicted_step_ms`
    plan: PlanFields | None = None  # these two with the component `reqs`
    reqs: Sequence[RequestRecord] = ()


class PlanFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a plan came about, with the component `reqs`. Theta is in expected tokens per second."""

    draft: bool
    full: bool
    num_floor_tokens: int  # rows that are not for the budget to decide
    max_budget: int  # drafts above the floors
    num_tokens: int  # rows planned, without padding
    num_fresh: int  # requests whose lagged confidence is their own; the others count as certain
    num_candidates: int
    stages: tuple[StageRecord, ...]
    num_slots: int | None = None  # request slots of the planned tier
    argmax_budget: int | None = None
    expected_tokens: float | None = None  # tau, by the lagged confidence
    full_theta: float | None = None
    plain_theta: float | None = None
    table_step_ms: float | None = (
        None  # the table's own price; predicted_step_ms is corrected by measured times
    )

    @classmethod
    def of(cls, plan: Plan) -> PlanFields:
        """What a record tells of `plan`."""
        record, tier, num_floor_tokens = plan.record, plan.verify.tier, int(plan.floors.sum())
        table_seconds = record.table_step_seconds
        return cls(
            draft=plan.draft,
            full=plan.verify.full,
            num_floor_tokens=num_floor_tokens,
            max_budget=int(plan.caps.sum()) - num_floor_tokens,
            num_tokens=plan.verify.num_tokens,
            num_fresh=record.num_fresh,
            num_candidates=record.num_candidates,
            stages=record.stages,
            num_slots=None if tier is None else tier.num_slots,
            argmax_budget=record.argmax_budget,
            expected_tokens=record.expected_tokens,
            full_theta=record.full_theta,
            plain_theta=record.plain_theta,
            table_step_ms=None if table_seconds is None else table_seconds * 1e3,
        )


class FeedHeader(msgspec.Struct, frozen=True):
    """What is the same for all records."""

    mode: str
    gamma: int
    verify_num_draft_tokens: int
    components: Sequence[str]
    simulate_acc_len: float | None


class RecordFeed:
    """A ring of encoded records. Takes every turn of the loop and keeps those that decoded.

    The oldest go when there are more than `capacity`, or when all together take more than `capacity_bytes`: every
    /server_info carries the whole feed.
    """

    def __init__(
        self, header: FeedHeader, capacity: int = CAPACITY, capacity_bytes: int | None = None
    ) -> None:
        self.header = header
        self.keeps_requests = "reqs" in header.components
        if capacity_bytes is None:
            capacity_bytes = CAPACITY_BYTES_WITH_REQUESTS if self.keeps_requests else CAPACITY_BYTES
        self._capacity_bytes, self._num_bytes = capacity_bytes, 0
        self._times_steps = "step_cpu_time" in header.components
        self._capacity = capacity
        self._records: deque[bytes] = deque()
        self._encoder = msgspec.json.Encoder()
        self._last_end_seconds: float | None = None  # of the turn before, if it decoded and left work to do

    def add(self, record: StepRecord, end_seconds: float, goes_on: bool) -> None:
        """Takes a turn that ended at `end_seconds`; `goes_on`: the next turn follows at once."""
        if record.num_reqs == 0:
            self._last_end_seconds = None
            return
        step_cpu_ms = None
        is_timed = self._times_steps and record.num_prefill_tokens == 0 and not self._is_cut_short(record)
        if self._last_end_seconds is not None and is_timed:
            interval = end_seconds - self._last_end_seconds
            step_cpu_ms = interval * 1e3 if interval <= LONGEST_INTERVAL_SECONDS else None
        self._last_end_seconds = end_seconds if goes_on else None
        budget = lag_steps = predicted_ms = theta = tier_tokens = fields = None
        if (plan := record.plan) is not None:
            budget, lag_steps, theta = plan.verify.budget, plan.record.lag_steps, plan.record.predicted_theta
            if plan.record.predicted_step_seconds is not None:
                predicted_ms = plan.record.predicted_step_seconds * 1e3
            if plan.verify.tier is not None:
                tier_tokens = plan.verify.tier.num_tokens
            if self.keeps_requests:
                fields = PlanFields.of(plan)
        feed_record = FeedRecord(
            forward_ct=record.forward_ct,
            bs=record.num_reqs,
            mode=record.mode,
            num_running_reqs=record.num_reqs,
            num_verify_tokens=record.num_rows_run,
            verify_tokens_local=record.num_verify_tokens,
            verify_tokens_graph_key=tier_tokens,
            budget=budget,
            lag_steps=lag_steps,
            predicted_step_ms=predicted_ms,
            predicted_theta=theta,
            step_cpu_ms=step_cpu_ms,
            decode_ms=record.decode_ms if self.keeps_requests else None,
            plan=fields,
            reqs=record.reqs,
        )
        encoded = self._encoder.encode(feed_record)
        self._records.append(encoded)
        self._num_bytes += len(encoded)
        while len(self._records) > self._capacity or self._num_bytes > self._capacity_bytes:
            self._num_bytes -= len(self._records.popleft())

    def _is_cut_short(self, record: StepRecord) -> bool:
        """Whether a request near its end ran fewer rows: profilers want steps alike, and refuse a cell with others."""
        num_full_tokens = record.num_reqs * self.header.verify_num_draft_tokens
        return self.header.simulate_acc_len is not None and record.num_full_tokens < num_full_tokens

    def clear(self) -> None:
        """Forgets all records; `forward_ct` goes on rising."""
        self._records.clear()
        self._num_bytes = 0

    def restart(self, mode: str, width: int) -> None:
        """From now on steps are of this mode and this block width; forgets those before."""
        self.header = msgspec.structs.replace(
            self.header, mode=mode, gamma=width - 1, verify_num_draft_tokens=width
        )
        self.clear()

    def dump(self) -> bytes:
        """The whole feed as JSON."""
        head = self._encoder.encode(self.header)
        return head[:-1] + b',"records":[' + b",".join(self._records) + b"]}"
