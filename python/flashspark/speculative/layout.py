"""Packs each request's verify rows, anchor first, one request after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flashspark.attention.interface import RaggedQueries
from flashspark.engine.request_rows import RequestRows

from .types import RaggedLayout


@dataclass(frozen=True)
class PackedRows:
    """Whose every packed row is, and which row of its block. Follows from the verify lengths alone."""

    qo_indptr: Tensor  # int64 [R + 1]
    request: Tensor  # int64 [M], batch index; of padding, the last request
    block_row: Tensor  # int64 [M], 0 … gamma
    is_padding: Tensor | None  # bool [M]; None: there is none
    block_rows: Tensor  # int64 [R, W], see `RaggedLayout`


def packed_rows(verify_lens: Tensor, width: int, num_tokens: int, padded: bool) -> PackedRows:
    """Rows of `verify_lens` [R]; the other arguments as of `pack`."""
    num_reqs, device = verify_lens.shape[0], verify_lens.device
    qo_indptr = torch.zeros(num_reqs + 1, dtype=torch.int64, device=device)
    torch.cumsum(verify_lens, 0, out=qo_indptr[1:])
    lane = torch.arange(num_tokens, device=device)
    request, is_padding = torch.searchsorted(qo_indptr[1:], lane, right=True), None
    if padded:
        is_padding = request == num_reqs
        request = request.clamp_(max=num_reqs - 1)
    block_row = lane - qo_indptr[request]
    if padded:
        block_row = block_row.clamp_(max=width - 1)
    last = verify_lens[:, None] - 1
    block_rows = qo_indptr[:-1, None] + torch.minimum(torch.arange(width, device=device), last)
    return PackedRows(qo_indptr, request, block_row, is_padding, block_rows)


@lru_cache(maxsize=256)
def full_rows(num_reqs: int, width: int, num_tokens: int, device: torch.device) -> PackedRows:
    """Rows of `num_reqs` full blocks, padded up to `num_tokens`. Shared by every step of that shape: never written."""
    verify_lens = torch.full((num_reqs,), width, dtype=torch.int64, device=device)
    return packed_rows(verify_lens, width, num_tokens, padded=num_tokens > num_reqs * width)


def pack(
    request_rows: RequestRows,
    rows: Tensor,
    drafts: Tensor,
    verify_lens: Tensor,
    num_tokens: int,
    padded: bool = False,
    full: bool = False,
) -> RaggedLayout:
    """Lays out `verify_lens[r]` rows of each request at positions n … n + verify_lens[r] - 1.

    Args:
        rows: int64 [R].
        drafts: int64 [R, gamma] (gamma may be 0).
        verify_lens: int64 [R], 1 … gamma + 1.
        num_tokens: rows in all; at least `verify_lens.sum()`, and exactly that unless `padded`.
        padded: whether rows past the requests' own may be left, which then belong to nobody.
        full: promises that every length is gamma + 1; where each row belongs is then known from earlier steps.
    """
    num_reqs, width = drafts.shape[0], drafts.shape[1] + 1
    if full:
        packed = full_rows(num_reqs, width, num_tokens, rows.device)
    else:
        packed = packed_rows(verify_lens, width, num_tokens, padded)
    context_lens = request_rows.context_lens[rows]
    positions = context_lens[packed.request] + packed.block_row
    blocks = torch.cat((request_rows.anchors[rows, None], drafts), dim=1)
    input_ids = blocks[packed.request, packed.block_row]
    if packed.is_padding is not None:
        positions = positions.masked_fill_(packed.is_padding, 0)
        input_ids = input_ids.masked_fill_(packed.is_padding, 0)
    slots = request_rows.slots(rows[packed.request], positions)
    if packed.is_padding is not None:
        slots = slots.masked_fill_(packed.is_padding, 0)
    return RaggedLayout(
        input_ids=input_ids,
        queries=RaggedQueries(
            positions=positions,
            slots=slots,
            qo_indptr=packed.qo_indptr,
            kv_lens=context_lens + verify_lens,
            page_table=request_rows.page_table[rows],
            page_size=request_rows.page_size,
            max_rows=width,
        ),
        requests=packed.request,
        block_rows=packed.block_rows,
    )
