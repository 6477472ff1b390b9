"""One record per step: the only source for logs, metrics and tests about what a step did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flashspark.speculative.planner import Plan

from .request_record import RequestRecord


@dataclass(frozen=True)
class StepRecord:
    """What one turn of the loop did. `forward_ct` rises by one per turn."""

    forward_ct: int = 0
    num_reqs: int = 0  # requests that decoded
    num_prefill_tokens: int = 0
    num_verify_tokens: int = 0  # sum of the verify lengths
    num_rows_run: int = 0  # packed rows that the target ran, padding included
    num_output_tokens: int = 0
    step_ms: float = 0.0
    decode_ms: float = 0.0  # of it, from the plan to the tokens on the host
    plan: Plan | None = None  # None in static mode, and where nothing decoded
    reqs: Sequence[RequestRecord] = ()  # where records of requests are kept


def decode_log_line(
    records: Sequence[StepRecord],
    gamma: int,
    num_used_tokens: int,
    max_total_num_tokens: int,
    num_queued: int,
) -> str:
    """The line that scripts parse from an SGLang log, over a stretch of steps."""
    num_verified = sum(record.num_reqs for record in records)
    num_output = sum(record.num_output_tokens for record in records)
    seconds = sum(record.step_ms for record in records) / 1e3
    accept_len = num_output / num_verified if num_verified else 0.0
    speculative = ""
    if gamma:
        speculative = f"accept len: {accept_len:.2f}, accept rate: {(accept_len - 1) / gamma:.2f}, "
        if num_verified and any(record.plan is not None for record in records):
            cap_len = sum(record.num_verify_tokens for record in records) / num_verified
            speculative += f"cap len: {cap_len:.2f}, "
    return (
        f"Decode batch, #running-req: {records[-1].num_reqs}, #token: {num_used_tokens}, "
        f"token usage: {num_used_tokens / max_total_num_tokens:.2f}, {speculative}"
        f"gen throughput (token/s): {num_output / max(seconds, 1e-9):.2f}, #queue-req: {num_queued}"
    )


def plan_log_line(records: Sequence[StepRecord]) -> str | None:
    """What the planner did over a stretch of steps and why; None where nothing was planned."""
    planned = [(record, record.plan) for record in records if record.plan is not None]
    if not planned:
        return None
    outcomes = Counter(plan_outcome(plan) for _, plan in planned)
    parts = [f"{count} {outcome}" for outcome, count in outcomes.most_common()]
    predicted = [
        (plan.record.predicted_step_seconds, record.decode_ms / 1e3)
        for record, plan in planned
        if plan.record.predicted_step_seconds is not None
    ]
    if predicted:
        expected_ms, measured_ms = (
            1e3 * sum(column) / len(predicted) for column in zip(*predicted, strict=True)
        )
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
