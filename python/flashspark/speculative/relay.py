"""Carries confidence from the device to the host's planner, always exactly two publications late.

The planner of a step runs before the step's drafts exist, so it works with older confidence; how much older must
not depend on how fast a copy is, or the ranks of a group would plan different shapes and hang. Hence a ring of
three host buffers: one being read, one on its way, one written next. A reader waits for its copy, it never polls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RowIndex = Sequence[int] | NDArray[np.int64]  # rows of requests, on the host

LAG = 2  # publications between what is planned with and what is newest
DEPTH = LAG + 1  # ring slots


class PendingCopy(Protocol):
    """A copy that was started."""

    def wait_on_host(self) -> None:
        """Returns once the target holds the source."""

    def wait_on_device(self) -> None:
        """Makes work queued from here on wait for the copy, without holding up the host."""


class CopyEngine(Protocol):
    """Starts device-to-host copies behind the work that is queued so far."""

    def start(self, source: Tensor, target: Tensor) -> PendingCopy:
        """Copies `source` into `target`. Until the copy is waited for, nobody may touch either."""


class _Done:
    def wait_on_host(self) -> None: ...

    def wait_on_device(self) -> None: ...


class ImmediateCopies:
    """Copies before it returns: the CPU, where device memory is host memory."""

    def start(self, source: Tensor, target: Tensor) -> PendingCopy:
        """Copies at once."""
        target.copy_(source)
        return _Done()


class _EventCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait_on_host(self) -> None:
        self._event.synchronize()

    def wait_on_device(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class StreamCopies:
    """Copies on a stream of its own, beside the forward stream that calls it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, source: Tensor, target: Tensor) -> PendingCopy:
        """Queues the copy behind the current stream's work; `target` must be pinned."""
        ready = torch.cuda.Event()
        ready.record()
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return _EventCopy(done)


class RowGenerations:
    """Counts how often each request row was handed out. Never set back, or an old owner's values would pass as new."""

    def __init__(self, num_rows: int) -> None:
        self._generations = np.zeros(num_rows, dtype=np.int64)
        self._last: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # asked and answered

    def renew(self, row: int) -> None:
        """The row has a new owner (or the same one after retraction)."""
        self._generations[row] += 1
        self._last = None

    def of(self, row_list: RowIndex) -> NDArray[np.int64]:
        """Generations of these rows as they are now. Shared, never written: the same array for the same array of rows
        until a row is renewed."""
        if self._last is not None and self._last[0] is row_list:
            return self._last[1]
        rows = np.asarray(row_list, dtype=np.int64)  # a list may be another one the next time
        self._last = rows, self._generations.take(rows)
        return self._last[1]


class RelayedConfidence(msgspec.Struct, frozen=True):
    """Confidence of some rows as it was at one publication, and whose it is. The reader owns the confidence."""

    confidence: NDArray[np.float32]  # [R, gamma]
    generations: NDArray[np.int64]  # [R], of the owner that the values were written for; 0: never written


class ConfidenceRelay:
    """The device buffer, the ring and the generations that go with each slot.

    Generations are stored for the rows that are *written*, when they are. Taking all rows' generations at copy time
    instead (SGLang 0.5.23) makes a row that was handed out but not written yet look fresh, with its old owner's
    values.
    """

    def __init__(
        self, num_rows: int, gamma: int, device: torch.device, copies: CopyEngine | None = None
    ) -> None:
        """`copies`: how to copy; by default what the device offers."""
        on_cuda = device.type == "cuda"
        if copies is None:
            copies = StreamCopies(device) if on_cuda else ImmediateCopies()
        self._copies = copies
        self._device_rows = torch.ones(num_rows, gamma, device=device)
        self._ring = [torch.ones(num_rows, gamma, pin_memory=on_cuda) for _ in range(DEPTH)]
        self._ring_on_host = [slot.numpy() for slot in self._ring]  # the same memory
        self._ring_generations = np.zeros((DEPTH, num_rows), dtype=np.int64)
        self._written_generations = np.zeros(num_rows, dtype=np.int64)
        self._published: list[tuple[RowIndex, NDArray[np.int64]] | None] = [None] * DEPTH  # rows, generations
        self._pending: list[PendingCopy] = [_Done()] * DEPTH
        self.num_publications = 0

    def publish(
        self, rows: Tensor, row_list: RowIndex, confidence: Tensor, generations: NDArray[np.int64]
    ) -> None:
        """Writes a step's confidence and starts its copy. Called once per drafted step, on the forward stream.

        Args:
            rows: int64 [R] on the device, distinct; `row_list` is its host copy.
            confidence: float32 [R, gamma] on the device; may be overwritten once later work is queued.
            generations: int64 [R], of the rows' owners for whom the drafts were made; kept, as `row_list` is.
        """
        slot = self.num_publications % DEPTH
        # The previous copy reads the buffer that is written here.
        self._pending[(slot - 1) % DEPTH].wait_on_device()
        self._device_rows.index_copy_(0, rows, confidence)
        self._pending[slot] = self._copies.start(self._device_rows, self._ring[slot])
        self._written_generations[np.asarray(row_list, dtype=np.int64)] = generations
        self._ring_generations[slot] = self._written_generations
        self._published[slot] = row_list, generations
        self.num_publications += 1

    def resolve(self, row_list: RowIndex) -> RelayedConfidence | None:
        """What was published `LAG` publications ago, for these rows; None while there is no such publication.

        Waits for the copy. Whether it answers depends on the number of publications alone, which all ranks share.
        """
        if self.num_publications < LAG:
            return None
        slot = (self.num_publications - LAG) % DEPTH
        self._pending[slot].wait_on_host()
        index = np.asarray(row_list, dtype=np.int64)
        published = self._published[slot]
        if published is not None and published[0] is index:
            generations = published[1]
        else:
            generations = self._ring_generations[slot].take(index)
        return RelayedConfidence(self._ring_on_host[slot].take(index, axis=0), generations)
