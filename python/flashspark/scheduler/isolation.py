"""What a bug ends: the request that it hits, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashspark.ipc import FinishReason

from .request import Request
from .step_record import StepRecord


def failure(error: Exception) -> FinishReason:
    """What the client of a request that a bug has hit is told."""
    message = f"internal error ({type(error).__name__}); the log says more"
    return FinishReason("abort", message=message, status_code=500)


def not_finite() -> FinishReason:
    """The end of a request that the target gave no number to choose a token by."""
    message = "the model's logits are not finite: no token can follow this prefix"
    return FinishReason("abort", message=message, status_code=500)


def decode_apart(
    running: Sequence[Request],
    error: Exception,
    decode: Callable[[list[Request]], StepRecord],
    fail: Callable[[Request, Exception], None],
) -> StepRecord:
    """The step that failed with `error`, request by request: who fails again is ended, the others go on.

    Nothing of a step counts before its commit, so that repeating it is safe. Where everybody of several fails, it is
    the engine that is broken, and `error` is raised again.
    """
    if len(running) == 1:
        fail(running[0], error)
        return StepRecord()
    records = []
    for request in running:
        try:
            records.append(decode([request]))
        except Exception as own:
            fail(request, own)
    if not records:
        raise error
    return StepRecord.joined(records)
