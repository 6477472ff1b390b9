"""Device state of the running requests, indexed by request row.

The host assigns rows and pages; lengths and anchors are advanced on the device by the commit stage. A row's
contents mean nothing while no request owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RequestRows:
    """Committed length, anchor and page table of up to `max_reqs` requests.

    `context_lens[row]` is n, the number of tokens whose K/V is committed (positions 0 … n-1); `anchors[row]` is
    the token at position n, known but not yet run through the target.
    """

    def __init__(self, max_reqs: int, max_pages_per_req: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.context_lens = torch.zeros(max_reqs, dtype=torch.int64, device=device)
        self.anchors = torch.zeros(max_reqs, dtype=torch.int64, device=device)
        # Page 0 is scratch, so an entry nobody filled can harm nobody.
        self.page_table = torch.zeros(max_reqs, max_pages_per_req, dtype=torch.int64, device=device)

    def set_context(self, row: int, context_len: int, anchor: int) -> None:
        """Makes `row` ready to decode from a known anchor."""
        self.context_lens[row] = context_len
        self.anchors[row] = anchor

    def set_pages(self, row: int, pages: Sequence[int], start: int = 0) -> None:
        """Writes page ids of `row` from its page number `start` on."""
        self.page_table[row, start : start + len(pages)] = torch.tensor(pages, dtype=torch.int64)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """KV slots of `positions` [M] in the pages of `rows` [M]."""
        page = self.page_table[rows, positions // self.page_size]
        return page * self.page_size + positions % self.page_size
