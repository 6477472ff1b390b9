"""Builds attention queries over paged pools by hand, with pages dealt out in random order."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from flashspark.attention.interface import BlockQueries, RaggedQueries

PAGE_SIZE = 4


class Pages:
    """`num_reqs` requests, each with shuffled pages for `max_len` positions. Page 0 belongs to nobody."""

    def __init__(self, num_reqs: int, max_len: int, seed: int | None = 0, page_size: int = PAGE_SIZE) -> None:
        per_req = -(-max_len // page_size)
        ids = list(range(1, num_reqs * per_req + 1))
        if seed is not None:
            random.Random(seed).shuffle(ids)
        self.table = torch.tensor(ids).view(num_reqs, per_req)
        self.page_size = page_size
        self.num_slots = (num_reqs * per_req + 1) * page_size

    def slots(self, request: int, positions: Tensor) -> Tensor:
        page = self.table[request, positions // self.page_size]
        return page * self.page_size + positions % self.page_size

    def ragged(self, spans: list[tuple[int, int, int]], padding: int = 0) -> RaggedQueries:
        """Queries of `(request, first position, number of rows)` spans, then `padding` rows of nobody."""
        positions = [torch.arange(start, start + count) for _, start, count in spans]
        slots = [self.slots(r, p) for (r, _, _), p in zip(spans, positions, strict=True)]
        zeros = torch.zeros(padding, dtype=torch.int64)
        counts = [count for _, _, count in spans]
        return RaggedQueries(
            positions=torch.cat((*positions, zeros)),
            slots=torch.cat((*slots, zeros)),
            qo_indptr=torch.tensor([0, *counts]).cumsum(0),
            kv_lens=torch.tensor([start + count for _, start, count in spans]),
            page_table=self.table[[r for r, _, _ in spans]],
            page_size=self.page_size,
        )

    def block(self, requests: list[int], context_lens: list[int], width: int) -> BlockQueries:
        return BlockQueries(
            context_lens=torch.tensor(context_lens),
            page_table=self.table[requests],
            page_size=self.page_size,
            width=width,
        )
