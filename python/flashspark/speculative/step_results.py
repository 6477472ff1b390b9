"""Brings what the host needs of a step back from the device: one tensor, one copy, and nobody waits before `wait`.

The copy is queued behind the step, so that the host can launch the next one, and asks for the results when it has
nothing better to do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .relay import CopyEngine, ImmediateCopies, PendingCopy, StreamCopies
from .types import Accepted


@dataclass(frozen=True)
class StepResults:
    """`Accepted` on the host."""

    tokens: list[list[int]]  # committed ones of each request
    verify_lens: list[int]
    is_finite: list[bool]
    num_matched: list[int]
    drafts: list[list[int]]  # these two where records ask, else nothing
    confidence: Tensor | None  # float32 [R, gamma] in host memory
    seconds: float  # see `StepClock`


class StepClock(Protocol):
    """Times a step from where its device work begins to where it ends.

    On a GPU it is the device that looks at the clock: when a step is launched early it begins when what was queued
    before it ends, other steps and prefill alike, so that these count for nothing. While the device is kept busy that
    is the time between two completions, and where it has to wait for launches, the waiting counts.
    """

    def stop(self) -> None:
        """The step's last work has been queued."""

    def seconds(self) -> float:
        """Once the step is known to have ended."""


class _HostClock:
    """Where work is done when it returns."""

    def __init__(self) -> None:
        self._started = self._ended = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._started


class _DeviceClock:
    def __init__(self) -> None:
        self._started, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._started.record()

    def stop(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        milliseconds: float = self._started.elapsed_time(self._ended)
        return milliseconds / 1e3


@dataclass(frozen=True)
class PendingResults:
    """Results on their way."""

    source: Tensor  # held until the copy has ended
    target: Tensor  # int64 [R, C], columns as `StepReader.start` packs them
    copy: PendingCopy
    clock: StepClock
    num_drafts: int  # gamma where drafts are among them
    has_confidence: bool

    def wait(self) -> StepResults:
        """Waits for the step to end."""
        self.copy.wait_on_host()
        num_drafts, confidence, end = self.num_drafts, None, self.target.shape[1]
        if self.has_confidence:
            end -= num_drafts
            confidence = self.target[:, end:].contiguous().view(torch.float64).float()
        rows: list[list[int]] = self.target[:, :end].tolist()
        first = end - num_drafts
        return StepResults(
            tokens=[row[4 : 4 + row[0]] for row in rows],
            verify_lens=[row[1] for row in rows],
            is_finite=[row[2] != 0 for row in rows],
            num_matched=[row[3] for row in rows],
            drafts=[row[first:] for row in rows] if num_drafts else [],
            confidence=confidence,
            seconds=self.clock.seconds(),
        )


def runs_ahead(device: torch.device) -> bool:
    """Whether the host goes on while its work is queued there. On a CPU a launch returns when the step has ended."""
    return device.type == "cuda"


class StepReader:
    """Starts the copies of one worker's steps."""

    def __init__(self, device: torch.device, copies: CopyEngine | None = None) -> None:
        """`copies`: how to copy; by default what the device offers."""
        self._on_cuda = runs_ahead(device)
        if copies is None:
            copies = StreamCopies(device) if self._on_cuda else ImmediateCopies()
        self._copies = copies

    def clock(self) -> StepClock:
        """Begins to time a step whose work is queued from here on."""
        return _DeviceClock() if self._on_cuda else _HostClock()

    def start(self, accepted: Accepted, clock: StepClock, with_drafts: bool = False) -> PendingResults:
        """Ends the step's time and starts the copy.

        Args:
            with_drafts: whether drafts and confidence are wanted too.
        """
        clock.stop()
        small = (accepted.num_tokens, accepted.verify_lens, accepted.is_finite, accepted.num_matched)
        columns = [column.to(torch.int64)[:, None] for column in small]
        columns.append(accepted.tokens)
        confidence = accepted.confidence if with_drafts else None
        if with_drafts:
            columns.append(accepted.drafts)
        if confidence is not None:
            columns.append(confidence.double().view(torch.int64))
        # A tensor of its own: what a captured step returns is overwritten by its next replay.
        source = torch.cat(columns, 1)
        target = torch.empty(source.shape, dtype=torch.int64, pin_memory=self._on_cuda)
        copy = self._copies.start(source, target)
        num_drafts = accepted.drafts.shape[1] if with_drafts else 0
        return PendingResults(source, target, copy, clock, num_drafts, confidence is not None)
