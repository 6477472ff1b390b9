"""`kernels.silu_mul` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import await_previous, launch_options

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, size, PROGRAMMATIC: tl.constexpr, BLOCK: tl.constexpr):
    await_previous(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded in between, as torch does
    tl.store(out_ptr + row * size + column, silu.to(tl.float32) * up.to(tl.float32), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.silu_mul.silu_mul`."""
    size = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * size).contiguous()
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows.shape[0], triton.cdiv(size, BLOCK))
        _silu_mul_kernel[grid](rows, out, size, BLOCK=BLOCK, **launch_options(rows.shape[0]))
    return out
