"""Which KV pages are free. Page 0 is scratch and never handed out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .prefix_cache import PrefixCache


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` positions."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Hands out pages 1 … num_pages, each request's in one run if that can be had.

    An attention backend may read a run without a gather: on a CPU, copying the keys of 32 requests costs as much as
    attending to them. So a request's first pages are taken where the longest it may become fits, and the pages behind
    them are claimed: others take them only when nothing else is free. First fit, from the bottom: warm memory.

    What `cache` can evict counts as available. It is evicted when the free pages do not suffice, and for a run of an
    eighth of all pages, or less where a request cannot become so long: until up to twice as many are free. More would
    empty the cache for whoever may, and will not, fill the context.
    """

    def __init__(self, num_pages: int, cache: PrefixCache | None = None) -> None:
        self.num_pages = self.num_free = num_pages
        self._cache = PrefixCache(1) if cache is None else cache
        self._is_free = np.ones(num_pages + 1, dtype=np.bool_)
        self._is_free[0] = False
        self._is_claimed = np.zeros(num_pages + 1, dtype=np.bool_)
        self._claims: dict[int, slice] = {}  # by the first page of who claims

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        return self.num_free + self._cache.num_evictable

    def allocate(self, count: int, room: int = 0, behind: int = 0) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if there are not that many.

        Args:
            room: pages this may become; the claim lasts until `end_claim` of the first page.
            behind: the page that comes before them in the request, 0 if none does.
        """
        if count > self.num_available:
            return None
        if count == 0:
            return []
        run = self._run_at(behind + 1, max(count, room)) if behind else None
        if run is None or run.stop - run.start < count:
            run = self._make_run(count, max(count, room))
        if run is None or run.stop - run.start < count:
            return self._take(self._scattered(count))
        self._is_claimed[run] = True
        self._claims[run.start] = run
        return self._take(list(range(run.start, run.start + count)))

    def extend(self, pages: Sequence[int], count: int) -> list[int] | None:
        """`count` more pages for who allocated `pages`, behind them while those are free; None as in `allocate`."""
        if count > self.num_available:
            return None
        claim = self._claims.get(pages[0], slice(0, 0))
        following: list[int] = []
        for page in range(pages[-1] + 1, min(pages[-1] + count, self.num_pages) + 1):
            is_ours = not self._is_claimed[page] or claim.start <= page < claim.stop
            if not (self._is_free[page] and is_ours):
                break
            following.append(page)
        self._take(following)
        return following + self._take(self._scattered(count - len(following)))

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back; each must be out."""
        for page in pages:
            assert 0 < page <= self.num_pages and not self._is_free[page], f"page {page} is not out"
            self._is_free[page] = True
        self.num_free += len(pages)

    def end_claim(self, first_page: int) -> None:
        """Who allocated `first_page` first grows no more."""
        claim = self._claims.pop(first_page, None)
        if claim is not None:
            self._is_claimed[claim] = False

    def _take(self, pages: list[int]) -> list[int]:
        self._is_free[pages] = False
        self.num_free -= len(pages)
        return pages

    def _run_at(self, start: int, room: int) -> slice:
        """Up to `room` pages from `start` on that are free and not claimed."""
        usable = (self._is_free & ~self._is_claimed)[start : start + room]
        return slice(start, start + (len(usable) if usable.all() else int(usable.argmin())))

    def _make_run(self, count: int, room: int) -> slice | None:
        """`_find_run`, after evicting what may be missing of it."""
        goal = max(count, min(room, self.num_pages // 8))
        run = self._find_run(room)
        # What is evicted lies in the runs of old requests, and the last of them may be cut.
        for enough in (goal, 2 * goal):
            if run is not None and run.stop - run.start >= goal:
                break
            num_unclaimed = int(np.count_nonzero(self._is_free & ~self._is_claimed))
            self.free(self._cache.evict(enough - num_unclaimed))
            run = self._find_run(room)
        return run

    def _find_run(self, room: int) -> slice | None:
        """The first `room` pages in one run that are free and not claimed, else the longest such run there is."""
        edges = np.diff((self._is_free & ~self._is_claimed).astype(np.int8), prepend=0, append=0)
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        if len(starts) == 0:
            return None
        fits = np.flatnonzero(ends - starts >= room)
        best = int(fits[0]) if len(fits) else int((ends - starts).argmax())
        start = int(starts[best])
        return slice(start, min(start + room, int(ends[best])))

    def _scattered(self, count: int) -> list[int]:
        """Any available pages, those that somebody claims last."""
        if count == 0:
            return []
        unclaimed = np.flatnonzero(self._is_free & ~self._is_claimed)[:count].tolist()
        evicted = self._cache.evict(count - len(unclaimed))
        self.free(evicted)
        claimed = np.flatnonzero(self._is_free & self._is_claimed).tolist()
        pages: list[int] = [*unclaimed, *evicted, *claimed]
        return list(dict.fromkeys(pages))[:count]
