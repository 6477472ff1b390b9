"""Traces of the step loop, made by torch's profiler: for chrome://tracing and perfetto."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

from flashspark import envs

logger = logging.getLogger(__name__)

Option = bool | int | float | str | list[str]
_ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


class StepProfiler:
    """At most one trace at a time. `tick` is called between any two steps."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._path = Path()
        self._starts_at: int | None = None  # step counts; None: at once, or not asked for
        self._ends_at: int | None = None
        self._options: Mapping[str, Option] | None = None  # asked for, not begun

    def start(self, options: Mapping[str, Option], num_steps: int) -> str | None:
        """Begins at the next step, or at `start_step`. Returns why not, if not."""
        if self._running is not None or self._options is not None:
            return "a trace is being recorded: /stop_profile ends it"
        unknown = [name for name in _names(options) if name not in _ACTIVITIES]
        if unknown:
            return f"activities: {unknown[0][:40]!r} cannot be traced; CPU and GPU can"
        folder = Path(
            str(options.get("output_dir") or envs.TORCH_PROFILER_DIR.get() or tempfile.gettempdir())
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"output_dir: {folder}: {error.strerror}"
        if not os.access(folder, os.W_OK):
            return f"output_dir: {folder}: cannot be written"
        prefix = f"{options['profile_prefix']}-" if options.get("profile_prefix") else ""
        self._path = folder / f"{prefix}{time.time():.6f}-TP-0.trace.json.gz"
        start = int(str(options.get("start_step", num_steps)))
        length = options.get("num_steps")
        self._starts_at = max(start, num_steps)
        self._ends_at = None if length is None else self._starts_at + int(str(length))
        self._options = options
        self.tick(num_steps)
        return None

    def stop(self) -> str | None:
        """Ends the trace and writes it. Returns why not, if not."""
        if self._options is None:
            return "no trace is being recorded"
        trace, self._running, self._options = self._running, None, None
        if trace is None:
            return "the trace had not begun: start_step was not reached"
        trace.stop()
        try:
            trace.export_chrome_trace(str(self._path))
        except OSError as error:
            return f"the trace cannot be written: {error}"
        logger.info("trace of the step loop written to %s", self._path)
        return None

    def tick(self, num_steps: int) -> None:
        """After `num_steps` steps of the loop: begins or ends what is due."""
        if self._options is None:
            return
        if self._running is None and self._starts_at is not None and num_steps >= self._starts_at:
            wanted = {_ACTIVITIES[name] for name in _names(self._options)} & supported_activities()
            self._running = profile(
                activities=wanted or {ProfilerActivity.CPU},
                with_stack=bool(self._options.get("with_stack", False)),
                record_shapes=bool(self._options.get("record_shapes", False)),
            )
            self._running.start()
        if self._ends_at is not None and num_steps >= self._ends_at and (problem := self.stop()) is not None:
            logger.warning("%s", problem)


def _names(options: Mapping[str, Option]) -> list[str]:
    names = options.get("activities", ["CPU", "GPU"])
    return names if isinstance(names, list) else []
