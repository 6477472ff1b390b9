"""`kernels.rms_norm` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import await_previous, block_size, launch_options

ELEMENTS = 2048  # of a program: several short rows, or one long one


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    size,
    x_stride,
    weight_inner,
    weight_outer,
    eps,
    PROGRAMMATIC: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < size)
    at = row * size + column
    weight_row = (row // weight_inner) % weight_outer
    weight = tl.load(weight_ptr + weight_row * size + column, mask=inside, other=0.0)
    await_previous(PROGRAMMATIC)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / size + eps)
    normed = (wide * inverse[:, None]).to(x.dtype)
    tl.store(out_ptr + at, normed.to(tl.float32) * weight.to(tl.float32), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.rms_norm.rms_norm`."""
    rows = _as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, rows, weight, x, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.rms_norm.add_rms_norm`."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(_as_rows(x), residual.contiguous(), weight, x, out, total, eps, add=True)
    return out, total


def _as_rows(x: Tensor) -> Tensor:
    """[rows, D], last dimension contiguous; a copy only where rows are not evenly spaced."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    rows: Tensor,
    residual: Tensor,
    weight: Tensor,
    x: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    add: bool,
) -> None:
    num_rows, size = rows.shape
    if num_rows == 0:
        return
    block = block_size(size)
    per_program = max(1, ELEMENTS // block)
    inner, outer = _weight_rows(x.shape, weight.shape)
    _rms_norm_kernel[(triton.cdiv(num_rows, per_program),)](
        rows,
        residual,
        weight.contiguous(),
        out,
        total,
        num_rows,
        size,
        rows.stride(0),
        inner,
        outer,
        eps,
        ADD=add,
        ROWS=per_program,
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
        **launch_options(num_rows),
    )


def _weight_rows(shape: torch.Size, weight_shape: torch.Size) -> tuple[int, int]:
    """`(inner, outer)`: row i of x is multiplied by row `i // inner % outer` of the weight, its ones left out."""
    inner = outer = 1
    for size, weight_size in zip(reversed(shape[:-1]), reversed(weight_shape[:-1]), strict=False):
        if weight_size == 1 and outer == 1:
            inner *= size
        elif weight_size != 1:
            assert weight_size == size, "weights of several rows vary over neighbouring dimensions"
            outer *= weight_size
    return inner, outer
