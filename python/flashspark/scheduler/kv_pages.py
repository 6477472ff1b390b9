"""Which KV pages are free. Page 0 is scratch and never handed out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` positions."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Hands out pages 1 … num_pages, each request's in one run if that can be had.

    An attention backend may read a run without a gather: on a CPU, copying the keys of 32 requests costs as much as
    attending to them. So a request's first pages are taken where the longest it may become fits, and the pages behind
    them are claimed: others take them only when nothing else is free. First fit, from the bottom: warm memory.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_free = num_pages
        self._is_free = np.ones(num_pages + 1, dtype=np.bool_)
        self._is_free[0] = False
        self._is_claimed = np.zeros(num_pages + 1, dtype=np.bool_)
        self._claims: dict[int, slice] = {}  # by the first page of who claims

    def allocate(self, count: int, room: int = 0) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if there are not that many. `room`: pages this may become."""
        if count > self.num_free:
            return None
        run = self._find_run(max(count, room)) if count else None
        if run is None or run.stop - run.start < count:
            return self._take(self._scattered(count))
        self._is_claimed[run] = True
        self._claims[run.start] = run
        return self._take(list(range(run.start, run.start + count)))

    def extend(self, pages: Sequence[int], count: int) -> list[int] | None:
        """`count` more pages for who holds `pages`, behind them while those are free; None as in `allocate`."""
        if count > self.num_free:
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
        """Takes back all pages that one request holds; each must be out."""
        for page in pages:
            assert 0 < page <= self.num_pages and not self._is_free[page], f"page {page} is not out"
            self._is_free[page] = True
        self.num_free += len(pages)
        if pages and (claim := self._claims.pop(pages[0], None)) is not None:
            self._is_claimed[claim] = False

    def _take(self, pages: list[int]) -> list[int]:
        self._is_free[pages] = False
        self.num_free -= len(pages)
        return pages

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
        """Any free pages, those that nobody claims first."""
        if count == 0:
            return []
        unclaimed = np.flatnonzero(self._is_free & ~self._is_claimed)[:count]
        claimed = np.flatnonzero(self._is_free & self._is_claimed)[: count - len(unclaimed)]
        pages: list[int] = [*unclaimed.tolist(), *claimed.tolist()]
        return pages
