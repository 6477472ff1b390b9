"""`kernels.pack_rows` in Triton: one launch, a program per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size

if TYPE_CHECKING:
    from ..pack_rows import PackedStep


PAGES = 512  # copied at a time


@triton.jit
def copy_entries(source_ptr, target_ptr, size, BLOCK: tl.constexpr):
    """`size` neighbouring entries."""
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < size), mask=at < size)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _pack_rows_kernel(
    rows_ptr,
    anchors_ptr,
    context_lens_ptr,
    page_table_ptr,
    drafts_ptr,
    verify_lens_ptr,
    indptr_ptr,
    kv_lens_ptr,
    requests_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    block_rows_ptr,
    pages_ptr,
    cutoff_ptr,
    least_run_ptr,
    max_lens_ptr,
    num_reqs,
    num_tokens,
    table_stride,
    page_size,
    max_pages,
    HAS_LEAST: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, BLOCK_R)
    lens = tl.load(verify_lens_ptr + every, mask=every < num_reqs, other=0)
    length = tl.load(verify_lens_ptr + request)
    row = tl.load(rows_ptr + request)
    context_len = tl.load(context_lens_ptr + row)
    cutoff = length
    if HAS_LIMITS:
        cutoff = tl.maximum(tl.minimum(length, tl.load(max_lens_ptr + row) - 1 - context_len), 1)
    tl.store(cutoff_ptr + request, cutoff)
    if HAS_LEAST:
        lens = tl.maximum(lens, tl.load(least_run_ptr + every, mask=every < num_reqs, other=0))
        length = tl.maximum(length, tl.load(least_run_ptr + request))
    start = tl.sum(tl.where(every < request, lens, 0), axis=0)
    total = tl.sum(lens, axis=0)
    tl.store(indptr_ptr + request, start)
    tl.store(indptr_ptr + num_reqs, total)  # every program the same
    tl.store(kv_lens_ptr + request, context_len + length)

    block_row = tl.arange(0, BLOCK_W).to(tl.int64)
    tl.store(
        block_rows_ptr + request * WIDTH + block_row,
        start + tl.minimum(block_row, length - 1),
        mask=block_row < WIDTH,
    )
    is_mine = block_row < length
    draft = tl.load(
        drafts_ptr + request * (WIDTH - 1) + block_row - 1, mask=is_mine & (block_row > 0), other=0
    )
    token = tl.where(block_row == 0, tl.load(anchors_ptr + row), draft)
    position = context_len + block_row
    page = tl.load(page_table_ptr + row * table_stride + position // page_size, mask=is_mine, other=0)
    packed = start + block_row
    tl.store(requests_ptr + packed, request + block_row * 0, mask=is_mine)
    tl.store(input_ids_ptr + packed, token, mask=is_mine)
    tl.store(positions_ptr + packed, position, mask=is_mine)
    tl.store(slots_ptr + packed, page * page_size + position % page_size, mask=is_mine)

    copy_entries(page_table_ptr + row * table_stride, pages_ptr + request * max_pages, max_pages, BLOCK_P)
    for first in range(total + request * BLOCK_W, num_tokens, num_reqs * BLOCK_W):
        padding = first + block_row
        is_there = padding < num_tokens
        tl.store(requests_ptr + padding, num_reqs - 1 + block_row * 0, mask=is_there)
        tl.store(input_ids_ptr + padding, block_row * 0, mask=is_there)
        tl.store(positions_ptr + padding, block_row * 0, mask=is_there)
        tl.store(slots_ptr + padding, block_row * 0, mask=is_there)


def pack_rows(
    rows: Tensor,
    anchors: Tensor,
    context_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    drafts: Tensor,
    verify_lens: Tensor,
    num_tokens: int,
    least_run: Tensor | None,
    max_lens: Tensor | None,
) -> PackedStep:
    """See `kernels.pack_rows.pack_rows`; at least one request."""
    from ..pack_rows import PackedStep

    num_reqs, width = drafts.shape[0], drafts.shape[1] + 1
    assert page_table.stride(1) == 1

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=rows.device)

    packed = PackedStep(
        make(num_reqs + 1),
        make(num_reqs),
        make(num_tokens),
        make(num_tokens),
        make(num_tokens),
        make(num_tokens),
        make(num_reqs, width),
        make(num_reqs, page_table.shape[1]),
        make(num_reqs),
    )
    _pack_rows_kernel[(num_reqs,)](
        rows,
        anchors,
        context_lens,
        page_table,
        drafts.contiguous(),
        verify_lens,
        *packed,
        rows if least_run is None else least_run,
        rows if max_lens is None else max_lens,
        num_reqs,
        num_tokens,
        page_table.stride(0),
        page_size,
        page_table.shape[1],
        HAS_LEAST=least_run is not None,
        HAS_LIMITS=max_lens is not None,
        WIDTH=width,
        BLOCK_W=block_size(width),
        BLOCK_R=block_size(num_reqs),
        BLOCK_P=min(PAGES, block_size(page_table.shape[1])),
        num_warps=1,
    )
    return packed
