"""One record per step: the only source for logs, metrics and tests about what a step did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.planner import Plan

from .request_record import RequestRecord


@dataclass(frozen=True)
class StepRecord:
    """What one turn of the loop did. `forward_ct` rises by one per turn."""

    forward_ct: int = 0
    num_reqs: int = 0  # requests that decoded
    num_dropped_reqs: int = 0  # of them, those that had ended while the step was in flight: nobody's tokens
    is_overlapped: bool = False  # launched before the outcome of the step before it was read
    num_grammar_reqs: int = 0  # of them, those whose drafts the host read within the step, for their grammars
    num_prefill_tokens: int = 0  # prompt tokens that were run before the step, since the one before it
    num_verify_tokens: int = 0  # sum of the verify lengths
    num_rows_run: int = 0  # packed rows that the target ran, padding included
    num_output_tokens: int = 0
    num_full_tokens: int = 0  # rows of everybody's full block
    num_uncapped_tokens: int | None = None  # output tokens without cutoffs; None where that is not known
    step_ms: float = 0.0  # of the loop, since the record before
    decode_ms: float = 0.0  # of the step, from the plan to the tokens; see `StepClock`
    mode: str = VerifyMode.STATIC.value  # how its blocks were verified
    plan: Plan | None = None  # None in static mode, and where nothing decoded
    reqs: Sequence[RequestRecord] = ()  # where records of requests are kept

    @classmethod
    def joined(cls, records: Sequence[StepRecord]) -> StepRecord:
        """One turn's record, of requests that ran one after the other. None was planned."""
        if not records:
            return cls()
        counts = (
            *("num_reqs", "num_dropped_reqs", "num_grammar_reqs", "num_verify_tokens"),
            *("num_rows_run", "num_output_tokens", "num_full_tokens"),
        )
        sums = {name: sum(getattr(record, name) for record in records) for name in counts}
        reqs = [req for record in records for req in record.reqs]
        return replace(records[0], **sums, num_uncapped_tokens=None, reqs=reqs)


@dataclass(frozen=True)
class DecodeMeans:
    """Means over a stretch of steps, per request and step unless they say otherwise."""

    accept_length: float = 0.0  # output tokens
    accept_rate: float = (
        0.0  # of the drafts of full blocks, so that trimming does not change what it is a share of
    )
    cap_length: float | None = None  # rows verified; None where nothing was planned
    block_accept_length: float | None = None  # output tokens without cutoffs; None where that is not known
    gen_throughput: float = 0.0  # output tokens per second
    step_time_error_s: float | None = (
        None  # predicted minus measured, per step; None where nothing was predicted
    )

    @classmethod
    def of(cls, records: Sequence[StepRecord], gamma: int) -> DecodeMeans:
        """The means of `records`, some of which may not have decoded."""
        records = [record for record in records if record.num_reqs]
        if not records:
            return cls()
        num_verified = sum(record.num_reqs for record in records)
        num_taken = max(num_verified - sum(record.num_dropped_reqs for record in records), 1)
        num_output = sum(record.num_output_tokens for record in records)
        seconds = sum(record.step_ms for record in records) / 1e3
        uncapped = [r.num_uncapped_tokens for r in records if r.num_uncapped_tokens is not None]
        times = predicted_and_measured_ms(records)
        errors = [predicted_ms - measured_ms for predicted_ms, measured_ms in times]
        is_planned = any(record.plan is not None for record in records)
        return cls(
            accept_length=num_output / num_taken,
            accept_rate=(num_output / num_taken - 1) / gamma if gamma else 0.0,
            cap_length=sum(r.num_verify_tokens for r in records) / num_verified if is_planned else None,
            block_accept_length=sum(uncapped) / num_taken if len(uncapped) == len(records) else None,
            gen_throughput=num_output / max(seconds, 1e-9),
            step_time_error_s=sum(errors) / len(errors) / 1e3 if errors else None,
        )


def predicted_and_measured_ms(records: Sequence[StepRecord]) -> list[tuple[float, float]]:
    """What planned steps were to take and took, those without a price left out."""
    return [
        (record.plan.record.predicted_step_seconds * 1e3, record.decode_ms)
        for record in records
        if record.plan is not None and record.plan.record.predicted_step_seconds is not None
    ]


def decode_log_line(
    records: Sequence[StepRecord],
    gamma: int,
    num_used_tokens: int,
    max_total_num_tokens: int,
    num_queued: int,
) -> str:
    """The line that scripts parse from an SGLang log, over a stretch of steps."""
    means = DecodeMeans.of(records, gamma)
    speculative = ""
    if gamma:
        speculative = f"accept len: {means.accept_length:.2f}, accept rate: {means.accept_rate:.2f}, "
        if means.cap_length is not None:
            speculative += f"cap len: {means.cap_length:.2f}, "
    return (
        f"Decode batch, #running-req: {records[-1].num_reqs}, #token: {num_used_tokens}, "
        f"token usage: {num_used_tokens / max_total_num_tokens:.2f}, {speculative}"
        f"gen throughput (token/s): {means.gen_throughput:.2f}, #queue-req: {num_queued}"
    )


def plan_log_line(records: Sequence[StepRecord]) -> str | None:
    """What the planner did over a stretch of steps and why; None where nothing was planned."""
    planned = [(record, record.plan) for record in records if record.plan is not None]
    if not planned:
        return None
    outcomes = Counter(plan_outcome(plan) for _, plan in planned)
    parts = [f"{count} {outcome}" for outcome, count in outcomes.most_common()]
    times = predicted_and_measured_ms(records)
    if times:
        expected_ms, measured_ms = (sum(column) / len(times) for column in zip(*times, strict=True))
        parts.append(f"a step takes {measured_ms:.1f} ms, predicted {expected_ms:.1f}")
    return f"Verify plans of {len(planned)} steps: {', '.join(parts)}"


def plan_outcome(plan: Plan) -> str:
    """One phrase for what a plan came to: trimmed, draft-free, or verified in full, and the stage that decided so."""
    reasons = {stage.name: stage for stage in plan.record.stages}
    if not plan.draft:
        return "draft-free"
    if reasons["pin"].ran:
        return "pinned"
    if not plan.verify.full:
        return "trimmed"
    for name in ("confidence", "small batch", "table", "gain guard"):
        stage = reasons[name]
        undecided = not stage.ran and name in ("confidence", "table")
        if undecided or (stage.ran and (stage.changed or stage.reason == "nothing to trim")):
            return f"full ({stage.reason})"
    return "full (it is the best)"
