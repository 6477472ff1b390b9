"""Packs each request's verify rows, anchor first, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.attention.interface import RaggedQueries
from flashspark.engine.request_rows import RequestRows

from .types import RaggedLayout


def pack(
    request_rows: RequestRows, rows: Tensor, drafts: Tensor, verify_lens: Tensor, num_tokens: int
) -> RaggedLayout:
    """Lays out `verify_lens[r]` rows of each request at positions n … n + verify_lens[r] - 1.

    Args:
        rows: int64 [R].
        drafts: int64 [R, gamma] (gamma may be 0).
        verify_lens: int64 [R], 1 … gamma + 1.
        num_tokens: host copy of `verify_lens.sum()`, M.
    """
    num_reqs, width = drafts.shape[0], drafts.shape[1] + 1
    device = rows.device
    qo_indptr = torch.zeros(num_reqs + 1, dtype=torch.int64, device=device)
    torch.cumsum(verify_lens, 0, out=qo_indptr[1:])
    request = torch.repeat_interleave(
        torch.arange(num_reqs, device=device), verify_lens, output_size=num_tokens
    )
    offset = torch.arange(num_tokens, device=device) - qo_indptr[request]
    context_lens = request_rows.context_lens[rows]
    positions = context_lens[request] + offset
    blocks = torch.cat((request_rows.anchors[rows, None], drafts), dim=1)
    block_row = torch.arange(width, device=device)
    return RaggedLayout(
        input_ids=blocks[request, offset],
        queries=RaggedQueries(
            positions=positions,
            slots=request_rows.slots(rows[request], positions),
            qo_indptr=qo_indptr,
            kv_lens=context_lens + verify_lens,
            page_table=request_rows.page_table[rows],
            page_size=request_rows.page_size,
        ),
        block_rows=qo_indptr[:-1, None] + torch.minimum(block_row, verify_lens[:, None] - 1),
    )
