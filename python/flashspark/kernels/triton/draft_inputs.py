"""`kernels.draft_inputs` in Triton: one launch, a program per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size
from .pack_rows import PAGES, copy_entries

if TYPE_CHECKING:
    from ..draft_inputs import DraftInputs


@triton.jit
def _draft_inputs_kernel(
    rows_ptr,
    anchors_ptr,
    context_lens_ptr,
    page_table_ptr,
    block_ids_ptr,
    lens_ptr,
    pages_ptr,
    table_stride,
    max_pages,
    mask_id,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    place = tl.arange(0, BLOCK_W)
    ids = tl.where(place == 0, tl.load(anchors_ptr + row), mask_id)
    tl.store(block_ids_ptr + request * WIDTH + place, ids, mask=place < WIDTH)
    tl.store(lens_ptr + request, tl.load(context_lens_ptr + row))
    copy_entries(page_table_ptr + row * table_stride, pages_ptr + request * max_pages, max_pages, BLOCK_P)


def draft_inputs(
    rows: Tensor, anchors: Tensor, context_lens: Tensor, page_table: Tensor, width: int, mask_id: int
) -> DraftInputs:
    """See `kernels.draft_inputs.draft_inputs`."""
    from ..draft_inputs import DraftInputs

    num_reqs, max_pages = rows.shape[0], page_table.shape[1]
    assert page_table.stride(1) == 1
    block_ids, lens, pages = (
        torch.empty(shape, dtype=torch.int64, device=rows.device)
        for shape in ((num_reqs, width), (num_reqs,), (num_reqs, max_pages))
    )
    if num_reqs:
        _draft_inputs_kernel[(num_reqs,)](
            rows,
            anchors,
            context_lens,
            page_table,
            block_ids,
            lens,
            pages,
            page_table.stride(0),
            max_pages,
            mask_id,
            WIDTH=width,
            BLOCK_W=block_size(width),
            BLOCK_P=min(PAGES, block_size(max_pages)),
            num_warps=1,
        )
    return DraftInputs(block_ids, lens, pages)
