"""Packs each request's verify rows into what the target runs on."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flashspark.attention.interface import RaggedQueries
from flashspark.engine.request_rows import RequestRows
from flashspark.kernels.pack_rows import RowPlaces, pack_rows, row_places

from .types import RaggedLayout


@lru_cache(maxsize=256)
def full_rows(num_reqs: int, width: int, num_tokens: int, device: torch.device) -> RowPlaces:
    """Rows of `num_reqs` full blocks, padded up to `num_tokens`. Shared by every step of that shape: never written."""
    verify_lens = torch.full((num_reqs,), width, dtype=torch.int64, device=device)
    return row_places(verify_lens, width, num_tokens, padded=num_tokens > num_reqs * width)


def pack(
    request_rows: RequestRows,
    rows: Tensor,
    drafts: Tensor,
    verify_lens: Tensor,
    num_tokens: int,
    padded: bool = False,
    full: bool = False,
    least_run: Tensor | None = None,
    max_lens: Tensor | None = None,
) -> RaggedLayout:
    """Lays out `verify_lens[r]` rows of each request at positions n … n + verify_lens[r] - 1.

    Args:
        rows: int64 [R].
        drafts: int64 [R, gamma] (gamma may be 0).
        verify_lens: int64 [R], 1 … gamma + 1.
        num_tokens: rows in all; at least `verify_lens.sum()`, and exactly that unless `padded`.
        padded: whether rows past the requests' own may be left, which then belong to nobody.
        full: promises that every length is gamma + 1; where each row belongs is then known from earlier steps.
        least_run, max_lens: as of `pack_rows`.
    """
    num_reqs, width = drafts.shape[0], drafts.shape[1] + 1
    packed = pack_rows(
        rows,
        request_rows.anchors,
        request_rows.context_lens,
        request_rows.page_table,
        request_rows.page_size,
        drafts,
        verify_lens,
        num_tokens,
        padded,
        full_rows(num_reqs, width, num_tokens, rows.device) if full else None,
        least_run,
        max_lens,
    )
    return RaggedLayout(
        input_ids=packed.input_ids,
        queries=RaggedQueries(
            positions=packed.positions,
            slots=packed.slots,
            qo_indptr=packed.qo_indptr,
            kv_lens=packed.kv_lens,
            page_table=packed.page_table,
            page_size=request_rows.page_size,
            max_rows=width,
        ),
        requests=packed.requests,
        block_rows=packed.block_rows,
        cutoff=packed.cutoff,
    )
