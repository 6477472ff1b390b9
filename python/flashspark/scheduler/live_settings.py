"""What `/set_internal_state` may change while the server runs: validated as a whole, then applied as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from flashspark.speculative.worker import SpeculativeWorker

from .record_feed import RecordFeed

Value = bool | int | float | None

_LOSSLESS_ONLY = frozenset({"speculative_accept_threshold_single", "speculative_accept_threshold_acc"})


class LiveSettings:
    """The switches of one scheduler. `apply` is called between two steps."""

    def __init__(self, worker: SpeculativeWorker, feed: RecordFeed | None) -> None:
        self._worker, self._feed = worker, feed

    def apply(self, values: Mapping[str, Value], is_idle: bool) -> str | None:
        """Changes everything and returns None, or changes nothing and returns why."""
        changes: list[Callable[[], None]] = []
        for name, value in values.items():
            change = self._change(name, value, is_idle)
            if isinstance(change, str):
                return f"{name}: {change}"
            changes.append(change)
        for change in changes:
            change()
        return None

    def _change(self, name: str, value: Value, is_idle: bool) -> Callable[[], None] | str:
        """How to make one change, or why it cannot be made."""
        if name == "dspark_force_budget_frac":
            return self._pin(value, is_idle)
        if name == "dspark_clear_info_records":
            if self._feed is None:
                return "no records are kept: start the server with SGLANG_DSPARK_ENABLE_SPS_RECORD=1"
            return self._feed.clear if value else _nothing
        if name in _LOSSLESS_ONLY:
            is_lossless = not isinstance(value, bool) and value == 1.0
            return _nothing if is_lossless else f"only 1.0 is lossless, got {value}"
        return "no such setting"

    def _pin(self, value: Value, is_idle: bool) -> Callable[[], None] | str:
        adaptive = self._worker.adaptive
        if adaptive is None:
            return (
                "verification is static, every block is verified in full: start the server with "
                "--ragged-verify-mode compact"
            )
        if value is None:
            return lambda: adaptive.planner.pin(
                None
            )  # at any time: whoever gives up must be able to clean up
        fraction = float(value)
        if isinstance(value, bool) or not math.isfinite(fraction) or not 0 < fraction <= 1:
            return f"a fraction in (0, 1], or null to let the planner decide, got {value}"
        if not is_idle:
            return "requests are running: a budget is pinned on an idle server only"
        return lambda: adaptive.planner.pin(fraction)


def _nothing() -> None:
    """What is asked is so already."""
