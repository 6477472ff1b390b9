"""Who holds a row and pages: admission, growth, retraction and release. One manager, so conservation has one home."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable

from flashspark.speculative.worker import SpeculativeWorker

from .kv_pages import PageAllocator, num_pages_for
from .prefix_cache import CachedPage, PrefixCache
from .request import Request


class Residency:
    """Rows and KV pages of the resident (prefilling or decoding) requests, and the queue before them.

    Oldest first everywhere: the queue is ordered by arrival, a retracted request returns to its place in it,
    and when pages run out it is the youngest resident that gives way. So the oldest always gets on, and every
    request ends.
    """

    def __init__(
        self, worker: SpeculativeWorker, max_running_requests: int, num_pages: int, prefix_cache: bool = True
    ) -> None:
        self._worker, self._request_rows = worker, worker.runner.request_rows
        self._page_size = self._request_rows.page_size
        self._free_rows = list(range(max_running_requests - 1, -1, -1))
        self.max_running_requests = max_running_requests
        self.cache = PrefixCache(self._page_size, prefix_cache)
        self.allocator = PageAllocator(num_pages, self.cache)
        self.queue: list[Request] = []
        self.residents: list[Request] = []  # by arrival
        self.num_retractions = 0
        self.num_prompt_tokens = self.num_cached_tokens = (
            0  # of the prompts that were admitted; found in the cache
        )
        self._grown: list[tuple[int, int, int]] = []  # row, page number, page: not on the device yet
        self.entering: Request | None = None  # whom `admit` was giving its row when something went wrong

    @property
    def num_free_rows(self) -> int:
        """Rows that no request holds."""
        return len(self._free_rows)

    @property
    def num_used_tokens(self) -> int:
        """KV positions in pages that requests hold."""
        return (self.allocator.num_pages - self.allocator.num_available) * self._page_size

    def enqueue(self, request: Request) -> None:
        """Puts a new or retracted request at its place in the queue."""
        bisect.insort(self.queue, request, key=lambda queued: queued.arrival)

    def admit(self) -> None:
        """Moves requests from the queue into rows while both rows and pages allow, oldest first.

        Beyond what the request needs at once, a page for every resident stays available, or the next steps would
        retract it again. Who comes with a prompt that another is computing at the moment waits to find it in the cache.
        """
        while self.queue and self._free_rows:
            request = self.queue[0]
            path = self.cache.match(
                request.message.cache_namespace, request.tokens, request.max_cached_tokens
            )
            wanted = num_pages_for(request.num_slots_wanted, self._page_size) - len(path)
            available = self.allocator.num_available - sum(node.num_users == 0 for node in path)
            if available < wanted + len(self.residents) or self._is_being_computed(request, len(path)):
                return
            self.queue.pop(0)
            self.cache.hold(path)
            at_most = num_pages_for(len(request.tokens) - 1 + request.num_remaining, self._page_size) - len(
                path
            )
            pages = self.allocator.allocate(wanted, at_most, path[-1].page if path else 0)
            assert pages is not None
            self._enter(request, path, pages)

    def has_room(self, requests: Iterable[Request]) -> bool:
        """Whether `grow` would retract nobody."""
        return sum(self._num_missing(request) for request in requests) <= self.allocator.num_available

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
        self._write_pages()
        return [request for request in ready if request.row >= 0]

    def release(self, request: Request, publish: bool = True) -> None:
        """Gives up row and pages of a resident. What it has computed stays in the prefix cache, if `publish`."""
        self.residents.remove(request)
        self._worker.release(request.row)
        if publish:
            self.publish(request, ends=True)
        cached = {node.page for node in request.cached_pages}
        self.allocator.free([page for page in request.pages if page not in cached])
        if (
            len(request.pages) > request.num_pages_found
        ):  # none of its own: a prompt with nothing to follow, all found
            self.allocator.end_claim(request.pages[request.num_pages_found])
        self.cache.let_go(request.cached_pages)
        self._free_rows.append(request.row)
        request.row, request.pages, request.cached_pages = -1, [], []
        if self.entering is request:
            self.entering = None

    def publish(self, request: Request, ends: bool = False) -> None:
        """Offers the full pages of a resident's committed tokens to the prefix cache. `ends`: it is about to leave."""
        # Committed tokens behind a stop are nobody's.
        num_tokens = min(request.context_len, len(request.tokens))
        self.cache.publish(
            request.cached_pages,
            request.message.cache_namespace,
            request.tokens,
            num_tokens,
            request.pages,
            past_twins=ends,
        )

    def flush(self) -> None:
        """Empties the prefix cache of what nobody holds."""
        self.allocator.free(self.cache.evict(self.cache.num_evictable))

    def retract_all(self) -> None:
        """Everybody gives up row and pages and returns to the queue."""
        for request in list(self.residents):
            self._retract(request)

    def _num_missing(self, request: Request) -> int:
        """Pages that its next step lacks."""
        return max(num_pages_for(request.num_slots_wanted, self._page_size) - len(request.pages), 0)

    def _is_being_computed(self, request: Request, num_pages_found: int) -> bool:
        """Whether a resident's prefill will publish the page that comes after those that were found."""
        end = (num_pages_found + 1) * self._page_size
        return self.cache.enabled and any(
            resident.context_len < end < len(resident.tokens)
            and resident.tokens[:end] == request.tokens[:end]
            and resident.message.cache_namespace == request.message.cache_namespace
            for resident in self.residents
            if end <= request.max_cached_tokens
        )

    def _enter(self, request: Request, path: list[CachedPage], own_pages: list[int]) -> None:
        self.entering = request
        pages = [*(node.page for node in path), *own_pages]
        request.row, request.pages, request.cached_pages = self._free_rows.pop(), pages, path
        request.num_pages_found, request.context_len = len(path), len(path) * self._page_size
        if request.num_retractions == 0:
            request.num_cached_tokens = request.context_len
            self.num_prompt_tokens += request.prompt_len
            self.num_cached_tokens += request.context_len
        if request.queue_seconds is None:
            request.queue_seconds = time.monotonic() - request.arrived_s
        bisect.insort(self.residents, request, key=lambda resident: resident.arrival)
        self._request_rows.set_pages(request.row, pages)
        self._request_rows.set_max_len(request.row, request.max_len)
        # The anchor is the last known token, whether the prompt's or, after a retraction, the output's.
        self._request_rows.set_context(request.row, request.context_len, request.tokens[-1])
        prompt, output = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]
        self._worker.assign(
            request.row,
            request.row_sampling,
            prompt,
            output,
            request.num_verify_steps,
            speculates=request.gamma > 0,
            is_constrained=request.grammar is not None,
        )
        self.entering = None

    def _cover(self, request: Request) -> bool:
        """Extends the pages over the next step; False if the request itself had to give way."""
        missing = self._num_missing(request)
        if missing == 0:
            return True
        own_pages = request.pages[request.num_pages_found :]
        while (pages := self.allocator.extend(own_pages, missing)) is None:
            youngest = self.residents[-1]
            self._retract(youngest)
            if youngest is request:
                return False
        first = len(request.pages)
        self._grown += [(request.row, first + i, page) for i, page in enumerate(pages)]
        request.pages += pages
        return True

    def _write_pages(self) -> None:
        """Tells the device of new pages, all at once: each upload costs as much as a kernel."""
        if self._grown:
            self._request_rows.add_pages(*zip(*self._grown, strict=True))
            self._grown.clear()

    def _retract(self, request: Request) -> None:
        """Leaves K/V to the prefix cache, keeps everything that decides the rest of the output."""
        self.release(request)
        request.num_retractions += 1
        self.num_retractions += 1
        self.enqueue(request)
