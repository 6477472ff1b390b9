"""Which KV pages are free. Page 0 is scratch and never handed out."""

from __future__ import annotations

from collections.abc import Sequence


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` positions."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """A free list over pages 1 … num_pages.

    Last freed, first reused, in the order they were held: warm memory, and long requests keep getting pages that
    lie in one run, which an attention backend may read without a gather.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._is_free = bytearray([0] + [1] * num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if there are not that many."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back; each must be out."""
        for page in reversed(pages):
            assert 0 < page <= self.num_pages and not self._is_free[page], f"page {page} is not out"
            self._is_free[page] = 1
            self._free.append(page)
