"""Who holds a row and pages: admission, growth, retraction and release. One manager, so conservation has one home."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable

from flashspark.speculative.worker import SpeculativeWorker

from .kv_pages import PageAllocator, num_pages_for
from .request import Request


class Residency:
    """Rows and KV pages of the resident (prefilling or decoding) requests, and the queue before them.

    Oldest first everywhere: the queue is ordered by arrival, a retracted request returns to its place in it,
    and when pages run out it is the youngest resident that gives way. So the oldest always gets on, and every
    request ends.
    """

    def __init__(self, worker: SpeculativeWorker, max_running_requests: int, num_pages: int) -> None:
        self._worker, self._request_rows = worker, worker.runner.request_rows
        self._page_size = self._request_rows.page_size
        self._free_rows = list(range(max_running_requests - 1, -1, -1))
        self.max_running_requests = max_running_requests
        self.allocator = PageAllocator(num_pages)
        self.queue: list[Request] = []
        self.residents: list[Request] = []  # by arrival
        self.num_retractions = 0

    @property
    def num_free_rows(self) -> int:
        """Rows that no request holds."""
        return len(self._free_rows)

    @property
    def num_used_tokens(self) -> int:
        """KV positions in pages that are out."""
        return (self.allocator.num_pages - self.allocator.num_free) * self._page_size

    def enqueue(self, request: Request) -> None:
        """Puts a new or retracted request at its place in the queue."""
        bisect.insort(self.queue, request, key=lambda queued: queued.arrival)

    def admit(self) -> None:
        """Moves requests from the queue into rows while both rows and pages allow, oldest first.

        Beyond what the request needs at once, a page for every resident stays free, or the next steps would
        retract it again.
        """
        while self.queue and self._free_rows:
            request = self.queue[0]
            wanted = num_pages_for(self._tokens_after_a_step(request), self._page_size)
            if self.allocator.num_free < wanted + len(self.residents):
                return
            self.queue.pop(0)
            at_most = num_pages_for(len(request.tokens) - 1 + request.num_remaining, self._page_size)
            pages = self.allocator.allocate(wanted, at_most)
            assert pages is not None
            self._enter(request, pages)

    def grow(self, requests: Iterable[Request]) -> list[Request]:
        """Makes room for one verify step of each, retracting the youngest residents when pages run out.

        Returns:
            The requests, in order, that still hold their row and have the room.
        """
        ready = []
        for request in requests:
            if request.row < 0:  # retracted for the sake of an older one
                continue
            if self._cover(request):
                ready.append(request)
        return [request for request in ready if request.row >= 0]

    def release(self, request: Request) -> None:
        """Gives up row and pages of a resident."""
        self.residents.remove(request)
        self._worker.release(request.row)
        self.allocator.free(request.pages)
        self._free_rows.append(request.row)
        request.row, request.pages = -1, []

    def _tokens_after_a_step(self, request: Request) -> int:
        return len(request.tokens) - 1 + request.verify_cap

    def _enter(self, request: Request, pages: list[int]) -> None:
        request.row, request.pages, request.context_len = self._free_rows.pop(), pages, 0
        if request.queue_seconds is None:
            request.queue_seconds = time.monotonic() - request.arrived_s
        bisect.insort(self.residents, request, key=lambda resident: resident.arrival)
        self._request_rows.set_pages(request.row, pages)
        # The anchor is the last known token, whether the prompt's or, after a retraction, the output's.
        self._request_rows.set_context(request.row, 0, request.tokens[-1])
        prompt, output = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]
        self._worker.assign(
            request.row, request.row_sampling, prompt, output, request.num_verify_steps, request.gamma > 0
        )

    def _cover(self, request: Request) -> bool:
        """Extends the pages over the next step; False if the request itself had to give way."""
        missing = num_pages_for(self._tokens_after_a_step(request), self._page_size) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self.allocator.extend(request.pages, missing)) is None:
            youngest = self.residents[-1]
            self._retract(youngest)
            if youngest is request:
                return False
        self._request_rows.set_pages(request.row, pages, start=len(request.pages))
        request.pages += pages
        return True

    def _retract(self, request: Request) -> None:
        """Drops K/V, keeps everything that decides the rest of the output."""
        self.release(request)
        request.num_retractions += 1
        self.num_retractions += 1
        self.enqueue(request)
