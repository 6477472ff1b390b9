"""What the dashboard plots of steps and confidence: totals since the start, whose differences are its curves."""

from __future__ import annotations

import time

from flashspark.ipc import StateValue
from flashspark.speculative.adaptive import AdaptiveVerifier

from .step_totals import StepTotals


def chart_state(totals: StepTotals, adaptive: AdaptiveVerifier | None) -> dict[str, StateValue]:
    """Values for /server_info. Waits for the device where a source of confidence keeps its sums there."""
    calibration: StateValue = None
    if adaptive is not None:
        summary = adaptive.source.summary()
        names = ("counts", "expected", "accepted", "errors")
        calibration = {name: summary[f"calibration_{name}"] for name in names}
    return {
        "monotonic_seconds": time.monotonic(),  # when the rest was true, for rates
        "full_block_tokens": totals.num_full_tokens,
        "steps_by_rows": list(totals.steps_by_size),  # up to 1, 2, 4 … rows; the last: more
        "plan_outcomes": dict(totals.outcomes),
        "predicted_steps": totals.num_predicted_steps,
        "predicted_step_seconds": totals.predicted_seconds,
        "measured_step_seconds": totals.measured_seconds,
        "confidence_calibration": calibration,
    }
