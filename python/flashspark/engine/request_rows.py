"""Device state of the running requests, indexed by request row.

The host assigns rows and pages; lengths and anchors are advanced on the device by the commit stage. A row's
contents mean nothing while no request owns it. The last row is scratch: the slots of a captured step that no request
takes point there. It holds no token and no page but the scratch page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashspark.kernels.pack_rows import within_limits
from flashspark.upload import upload

UNLIMITED = 2**40  # tokens


class RequestRows:
    """Committed length, anchor and page table of up to `max_reqs` requests.

    `context_lens[row]` is n, the number of tokens whose K/V is committed (positions 0 … n-1); `anchors[row]` is
    the token at position n, known but not yet run through the target; `max_lens[row]` is the number of tokens that
    the request may become. The host launches steps before it knows n, so rows may run past that: they write to the
    rest of the request's pages and, behind those, to the scratch page.
    """

    def __init__(self, max_reqs: int, max_pages_per_req: int, page_size: int, device: torch.device) -> None:
        self.page_size, self.scratch_row = page_size, max_reqs
        self.context_lens = torch.zeros(max_reqs + 1, dtype=torch.int64, device=device)
        self.anchors = torch.zeros(max_reqs + 1, dtype=torch.int64, device=device)
        self.max_lens = torch.full((max_reqs + 1,), UNLIMITED, dtype=torch.int64, device=device)
        # Page 0 is scratch, so an entry nobody filled can harm nobody.
        self.page_table = torch.zeros(max_reqs + 1, max_pages_per_req, dtype=torch.int64, device=device)

    def set_context(self, row: int, context_len: int, anchor: int) -> None:
        """Makes `row` ready to decode from a known anchor."""
        self.context_lens[row] = context_len
        self.anchors[row] = anchor

    def set_max_len(self, row: int, max_len: int) -> None:
        """Lets the request in `row` become `max_len` tokens long."""
        self.max_lens[row] = max_len

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Makes `pages` the pages of `row`, which are all it has: an earlier owner's are another's by now."""
        self.page_table[row].zero_()
        self.page_table[row, : len(pages)] = upload(pages, self.page_table.device)

    def add_pages(self, rows: Sequence[int], places: Sequence[int], pages: Sequence[int]) -> None:
        """Writes pages of many rows: `pages[i]` becomes page number `places[i]` of `rows[i]`."""
        index = upload(np.array((rows, places, pages), dtype=np.int64), self.page_table.device)
        self.page_table[index[0], index[1]] = index[2]

    def within_limits(self, lens: Tensor, rows: Tensor, context_lens: Tensor) -> Tensor:
        """`lens` [R] cut to what the requests in `rows` may still emit, and 1 at least; n is `context_lens` [R]."""
        return within_limits(lens, self.max_lens[rows], context_lens)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """KV slots of `positions` [M] in the pages of `rows` [M]."""
        page = self.page_table[rows, positions // self.page_size]
        return page * self.page_size + positions % self.page_size
