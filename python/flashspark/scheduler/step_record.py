"""One record per step: the only source for logs, metrics and tests about what a step did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashspark.speculative.planner import Plan


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
    plan: Plan | None = None  # None in static mode, and where nothing decoded


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
    return (
        f"Decode batch, #running-req: {records[-1].num_reqs}, #token: {num_used_tokens}, "
        f"token usage: {num_used_tokens / max_total_num_tokens:.2f}, {speculative}"
        f"gen throughput (token/s): {num_output / max(seconds, 1e-9):.2f}, #queue-req: {num_queued}"
    )
