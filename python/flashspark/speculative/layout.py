"""Packs each request's verify rows, anchor first, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.attention.interface import RaggedQueries
from flashspark.engine.request_rows import RequestRows

from .types import RaggedLayout


def pack(
    request_rows: RequestRows,
    rows: Tensor,
    drafts: Tensor,
    verify_lens: Tensor,
    num_tokens: int,
    padded: bool = False,
) -> RaggedLayout:
    """Lays out `verify_lens[r]` rows of each request at positions n … n + verify_lens[r] - 1.

    Args:
        rows: int64 [R].
        drafts: int64 [R, gamma] (gamma may be 0).
        verify_lens: int64 [R], 1 … gamma + 1.
        num_tokens: rows in all; at least `verify_lens.sum()`, and exactly that unless `padded`.
        padded: whether rows past the requests' own may be left, which then belong to nobody.
    """
    num_reqs, width = drafts.shape[0], drafts.shape[1] + 1
    device = rows.device
    qo_indptr = torch.zeros(num_reqs + 1, dtype=torch.int64, device=device)
    torch.cumsum(verify_lens, 0, out=qo_indptr[1:])
    lane = torch.arange(num_tokens, device=device)
    request = torch.searchsorted(qo_indptr[1:], lane, right=True)
    if padded:
        is_padding = request == num_reqs
        request = request.clamp_(max=num_reqs - 1)
    offset = lane - qo_indptr[request]
    context_lens = request_rows.context_lens[rows]
    positions = context_lens[request] + offset
    if padded:
        offset = offset.clamp_(max=width - 1)
        positions = positions.masked_fill_(is_padding, 0)
    blocks = torch.cat((request_rows.anchors[rows, None], drafts), dim=1)
    input_ids, slots = blocks[request, offset], request_rows.slots(rows[request], positions)
    if padded:
        input_ids, slots = input_ids.masked_fill_(is_padding, 0), slots.masked_fill_(is_padding, 0)
    block_row = torch.arange(width, device=device)
    return RaggedLayout(
        input_ids=input_ids,
        queries=RaggedQueries(
            positions=positions,
            slots=slots,
            qo_indptr=qo_indptr,
            kv_lens=context_lens + verify_lens,
            page_table=request_rows.page_table[rows],
            page_size=request_rows.page_size,
        ),
        requests=request,
        block_rows=qo_indptr[:-1, None] + torch.minimum(block_row, verify_lens[:, None] - 1),
    )
