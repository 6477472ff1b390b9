"""`kernels.accept_step` in Triton: one launch, whole blocks of rows side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size

REQUESTS = 32  # of a program


@triton.jit(do_not_specialize=["num_reqs", "scratch_row"])
def _accept_step_kernel(
    best_ids_ptr,
    best_logits_ptr,
    block_rows_ptr,
    drafts_ptr,
    cutoff_ptr,
    rows_ptr,
    context_lens_ptr,
    anchors_ptr,
    steps_ptr,
    simulated_ptr,
    tokens_ptr,
    num_tokens_ptr,
    is_finite_ptr,
    num_matched_ptr,
    num_reqs,
    scratch_row,
    WIDTH: tl.constexpr,
    HAS_SIMULATED: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    there = request < num_reqs
    block_row = tl.arange(0, BLOCK_W).to(tl.int64)[None, :]
    in_block = there[:, None] & (block_row < WIDTH)
    is_drafted = there[:, None] & (block_row < WIDTH - 1)
    place = request[:, None] * WIDTH + block_row
    packed = tl.load(block_rows_ptr + place, mask=in_block, other=0)
    target = tl.load(best_ids_ptr + packed, mask=in_block, other=0)
    draft = tl.load(
        drafts_ptr + request[:, None] * (WIDTH - 1) + block_row, mask=is_drafted, other=0
    )  # 0 in the last row, which has none
    cutoff = tl.load(cutoff_ptr + request, mask=there, other=1)

    is_kept = is_drafted & (target == draft)
    matched = tl.min(tl.where(is_kept, WIDTH - 1, block_row), axis=1)  # the first row that ends the prefix
    accepted = matched
    if HAS_SIMULATED:
        accepted = tl.load(simulated_ptr + request, mask=there, other=0)
    accepted = tl.minimum(accepted, cutoff - 1)
    is_last = block_row == accepted[:, None]
    following = tl.sum(tl.where(is_last, target, 0), axis=1)
    tl.store(tokens_ptr + place, tl.where(is_last, target, draft), mask=in_block)
    tl.store(num_tokens_ptr + request, accepted + 1, mask=there)
    tl.store(num_matched_ptr + request, matched, mask=there)

    is_judged = in_block & (block_row < cutoff[:, None])
    logit = tl.load(best_logits_ptr + packed, mask=is_judged, other=0.0)
    is_number = tl.abs(logit) < float("inf")  # of NaN it is false
    tl.store(is_finite_ptr + request, tl.min(is_number.to(tl.int32), axis=1) != 0, mask=there)

    # Nobody but the store of 0 writes to the scratch row, which many programs may name.
    row = tl.load(rows_ptr + request, mask=there, other=0)
    is_owned = there & (row != scratch_row)
    length = tl.load(context_lens_ptr + row, mask=is_owned, other=0)
    step = tl.load(steps_ptr + row, mask=is_owned, other=0)
    tl.store(context_lens_ptr + row, length + accepted + 1, mask=is_owned)
    tl.store(anchors_ptr + row, following, mask=is_owned)
    tl.store(steps_ptr + row, step + 1, mask=is_owned)
    tl.store(context_lens_ptr + scratch_row, 0)


def accept_step(
    best_ids: Tensor,
    best_logits: Tensor,
    block_rows: Tensor,
    drafts: Tensor,
    cutoff: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    anchors: Tensor,
    steps: Tensor,
    scratch_row: int,
    simulated: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.accept_step.accept_step`."""
    num_reqs, width = block_rows.shape
    tokens = torch.empty((num_reqs, width), dtype=torch.int64, device=rows.device)
    num_tokens, num_matched = torch.empty((2, num_reqs), dtype=torch.int64, device=rows.device).unbind(0)
    is_finite = torch.empty(num_reqs, dtype=torch.bool, device=rows.device)
    _accept_step_kernel[(triton.cdiv(num_reqs, REQUESTS),)](
        best_ids,
        best_logits,
        block_rows.contiguous(),
        drafts.contiguous(),
        cutoff,
        rows,
        context_lens,
        anchors,
        steps,
        cutoff if simulated is None else simulated,
        tokens,
        num_tokens,
        is_finite,
        num_matched,
        num_reqs,
        scratch_row,
        WIDTH=width,
        HAS_SIMULATED=simulated is not None,
        REQUESTS=REQUESTS,
        BLOCK_W=block_size(width),
        num_warps=1,
    )
    return tokens, num_tokens, is_finite, num_matched
