"""Times the stages of decode steps where they run: by CUDA events, or on a CPU by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

IDLE = "idle"  # the mark at which all of a step's device work has been queued


@dataclass(frozen=True)
class StageTimes:
    """One step, in milliseconds. Names as marked; `idle` is what passed after the step before it had ended."""

    stages: dict[str, float]
    idle: float
    launch: float  # on the host, from the step's first mark to its last

    @property
    def total(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.idle + sum(self.stages.values())


class StageClock:
    """Marks at the borders of stages. What is queued after a mark, up to the next, is the stage of its name.

    A step ends with the mark `idle`. Nothing waits for the device before `steps` is called, and a mark costs a few
    microseconds of the host.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: the host's, in seconds."""
        self._on_cuda, self._clock = device.type == "cuda", clock
        self._marks: list[tuple[str, torch.cuda.Event | None, float]] = []

    def mark(self, name: str) -> None:
        """The stage `name` begins here."""
        event = None
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append((name, event, self._clock()))

    def clear(self) -> None:
        """Forgets all marks."""
        self._marks.clear()

    def steps(self) -> list[StageTimes]:
        """Times of the steps that lie between two ends; waits for the device. A stage marked twice is summed."""
        if self._on_cuda and self._marks:
            torch.cuda.synchronize()
        ends = [i for i, (name, _, _) in enumerate(self._marks) if name == IDLE]
        return [self._step(a, b) for a, b in pairwise(ends)]

    def _step(self, before: int, end: int) -> StageTimes:
        stages: dict[str, float] = {}
        for i in range(before + 1, end):
            name = self._marks[i][0]
            stages[name] = stages.get(name, 0.0) + self._between(i, i + 1)
        launch = (self._marks[end][2] - self._marks[before + 1][2]) * 1e3
        return StageTimes(stages, self._between(before, before + 1), launch)

    def _between(self, first: int, second: int) -> float:
        """Milliseconds from one mark to another, on the device where there is one."""
        (_, start, host_start), (_, end, host_end) = self._marks[first], self._marks[second]
        if start is None or end is None:
            return (host_end - host_start) * 1e3
        milliseconds: float = start.elapsed_time(end)
        return milliseconds
