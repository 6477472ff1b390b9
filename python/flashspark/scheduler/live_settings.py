"""What `/set_internal_state` may change while the server runs: validated as a whole, then applied as a whole.

Most switches want an idle server. With them, one server runs every arm of an interleaved benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from flashspark import envs
from flashspark.speculative.adaptive import AdaptiveVerifier, VerifyMode
from flashspark.speculative.sts_records import CollectingHead
from flashspark.speculative.worker import SpeculativeWorker

from .record_feed import RecordFeed

Value = bool | int | float | str | None
Change = Callable[[], None]

SMALLEST_PIN = 1e-6  # of all drafts: what is smaller admits none in any batch
_LOSSLESS_ONLY = frozenset({"speculative_accept_threshold_single", "speculative_accept_threshold_acc"})


class Refusal(Exception):
    """Why a setting cannot be changed."""


class LiveSettings:
    """The switches of one scheduler. `apply` is called between two steps."""

    def __init__(self, worker: SpeculativeWorker) -> None:
        self._worker = worker
        self._trained_width = worker.width
        self._built: AdaptiveVerifier | None = None  # also while verification is static
        self.feed: RecordFeed | None = None
        self._settings: dict[str, Callable[[Value], Change]] = {
            "dspark_force_budget_frac": self._pin,
            "dspark_clear_info_records": self._clear_records,
            "ragged_verify_mode": self._set_mode,
            "speculative_max_verify_len": self._set_max_verify_len,
            "speculative_num_draft_tokens": self._set_width,
            "speculation": self._set_speculation,
        }
        self._next_mode, self._next_width, self._is_idle = VerifyMode.STATIC, 0, True

    @property
    def verifier(self) -> AdaptiveVerifier | None:
        """The verifier that the server was started with, whatever the mode is now."""
        self._built = self._worker.adaptive or self._built
        return self._built

    def state(self) -> dict[str, int | bool | None]:
        """What is set at present and is not told elsewhere."""
        verifier = self.verifier
        longest = None if verifier is None else verifier.planner.settings.longest
        return {
            "speculation": self._worker.speculates and self._worker.gamma > 0,
            "speculative_num_draft_tokens": self._worker.width if self._worker.gamma else None,
            "speculative_max_verify_len": longest,
        }

    def apply(self, values: Mapping[str, Value], is_idle: bool) -> str | None:
        """Changes everything and returns None, or changes nothing and returns why."""
        worker = self._worker
        # What the others are judged by: the mode and width as they will be.
        self._next_mode = worker.mode
        self._next_width, self._is_idle = worker.width, is_idle
        changes: list[Change] = []
        order = ("ragged_verify_mode", "speculative_num_draft_tokens")
        for name in sorted(values, key=lambda name: order.index(name) if name in order else len(order)):
            try:
                changes.append(self._change(name, values[name]))
            except Refusal as refusal:
                return f"{name}: {refusal}"
        if self._next_mode is not VerifyMode.STATIC and self._next_width != self._trained_width:
            return (
                "speculative_num_draft_tokens: other widths than the draft's own are for static verification; give "
                f"{self._trained_width}, or ragged_verify_mode static"
            )
        for change in changes:
            change()
        return None

    def _change(self, name: str, value: Value) -> Change:
        """How to make one change, or why it cannot be made."""
        if name in self._settings:
            return self._settings[name](value)
        if name in _LOSSLESS_ONLY:
            if isinstance(value, bool) or value != 1.0:
                raise Refusal(f"only 1.0 is lossless, got {value}")
            return _nothing
        raise Refusal(f"no such setting; there are {', '.join(sorted(self._settings))}")

    def _pin(self, value: Value) -> Change:
        if value is None and (built := self.verifier) is not None:
            # At any time and in any mode: whoever gives up must be able to clean up.
            return lambda: built.planner.pin(None)
        verifier = self._adaptive_verifier()
        fraction = math.nan if value is None or isinstance(value, bool | str) else float(value)
        if not SMALLEST_PIN <= fraction <= 1:
            raise Refusal(
                f"a fraction in (0, 1], {SMALLEST_PIN:g} at least, or null to let the planner decide, got {value!r}"
            )
        self._check_idle("a budget is pinned")
        return lambda: verifier.planner.pin(fraction)

    def _clear_records(self, value: Value) -> Change:
        if isinstance(value, str):
            raise Refusal(f"true or false, got {value!r}")
        if self.feed is None:
            raise Refusal("no records are kept: start the server with SGLANG_DSPARK_ENABLE_SPS_RECORD=1")
        return self.feed.clear if value else _nothing

    def _set_mode(self, value: Value) -> Change:
        try:
            mode = VerifyMode(value)
        except ValueError:
            raise Refusal(f"one of {', '.join(mode.value for mode in VerifyMode)}, got {value!r}") from None
        self._check_not_collecting()
        self._next_mode, verifier = mode, None
        if mode is not VerifyMode.STATIC:
            verifier = self._adaptive_verifier()
            table = verifier.planner.table
            if mode is not verifier.mode and (table is None or table.is_uninitialized):
                raise Refusal(
                    "without step costs the ragged modes plan differently: start the server in this mode"
                )
        self._check_idle("the mode changes")

        def switch() -> None:
            if verifier is not None:
                verifier.mode = mode
            self._worker.adaptive = verifier
            self._renew_feed()

        return switch

    def _set_max_verify_len(self, value: Value) -> Change:
        built = self.verifier
        verifier = built if value is None and built is not None else self._adaptive_verifier()
        longest = self._trained_width if value is None else value
        if (
            isinstance(longest, bool)
            or not isinstance(longest, int)
            or not 1 <= longest <= self._trained_width
        ):
            raise Refusal(f"rows of a block, 1 … {self._trained_width}, or null for all, got {value!r}")
        self._check_idle("the cap changes")
        return lambda: verifier.planner.limit(longest)

    def _set_width(self, value: Value) -> Change:
        worker, trained = self._worker, self._trained_width
        width = trained if value is None else value
        if trained < 2:
            raise Refusal("there is no draft: start the server with --speculative-draft-model-path")
        if isinstance(width, bool) or not isinstance(width, int) or not 2 <= width <= trained:
            raise Refusal(f"rows of a block, 2 … {trained}, or null for all, got {value!r}")
        simulated = worker.rule.simulated_drafts
        if simulated is not None and width < simulated + 1:
            raise Refusal(
                f"{envs.SIMULATE_ACC_LEN.name}={simulated + 1:g}: a step commits at most its block of {width}"
            )
        self._check_idle("the block's width changes")
        self._next_width = width

        def switch() -> None:
            worker.set_width(width)
            self._renew_feed()

        return switch

    def _set_speculation(self, value: Value) -> Change:
        if not isinstance(value, bool):
            raise Refusal(f"true or false, got {value!r}")
        if value and self._worker.drafter is None:
            raise Refusal("there is no draft: start the server with --speculative-draft-model-path")
        self._check_idle("speculation is switched")

        def switch() -> None:
            self._worker.speculates = value

        return switch

    def _check_not_collecting(self) -> None:
        if self.verifier is not None and isinstance(self.verifier.source, CollectingHead):
            raise Refusal(
                "records for a calibration are being collected, which takes full blocks in cap-accept: unset "
                "SGLANG_DSPARK_STS_COLLECT_PATH"
            )

    def _adaptive_verifier(self) -> AdaptiveVerifier:
        """The verifier, if verification will be anything but static."""
        verifier = self.verifier
        if verifier is None or self._next_mode is VerifyMode.STATIC:
            hint = (
                "start the server with --ragged-verify-mode compact"
                if verifier is None
                else "set ragged_verify_mode too"
            )
            raise Refusal(f"verification is static, every block is verified in full: {hint}")
        self._check_not_collecting()
        return verifier

    def _check_idle(self, what: str) -> None:
        if not self._is_idle:
            raise Refusal(f"requests are running: {what} on an idle server only")

    def _renew_feed(self) -> None:
        """Records of one feed are of one mode and one width."""
        if self.feed is not None:
            self.feed.restart(self._worker.mode.value, self._worker.width)


def _nothing() -> None:
    """What is asked is so already."""
