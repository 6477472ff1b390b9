"""`kernels.rope.rope_tables` in Triton: one launch where torch makes half a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size

ROWS = 8  # of a program


@triton.jit(do_not_specialize=["num_rows"])
def _rope_tables_kernel(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    scale,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < DIM)
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=0).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + column, mask=column < DIM, other=0.0)
    at = row * DIM + column
    tl.store(cos_ptr + at, tl.cos(angle) * scale, mask=inside)
    tl.store(sin_ptr + at, tl.sin(angle) * scale, mask=inside)


def rope_tables(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `kernels.rope.rope_tables`."""
    dim = frequencies.shape[0]
    cos, sin = (torch.empty((*positions.shape, dim), dtype=dtype, device=positions.device) for _ in range(2))
    num_rows = positions.numel()
    if num_rows:
        _rope_tables_kernel[(triton.cdiv(num_rows, ROWS),)](
            positions.contiguous(),
            frequencies,
            cos,
            sin,
            num_rows,
            scale,
            DIM=dim,
            ROWS=ROWS,
            BLOCK=block_size(dim),
        )
    return cos, sin
