"""`kernels.block_conv` in Triton: coefficients are made where they are used, and never stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size

BLOCK, WARPS = 1024, 4  # of a program


@triton.jit
def _dynamic_conv_kernel(
    y_ptr,
    base_ptr,
    delta_ptr,
    residual_ptr,
    out_ptr,
    hidden,
    num_groups,
    SIDE: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) // WIDTH
    row = (tl.program_id(0) % WIDTH).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < hidden
    group = channel // (hidden // num_groups)
    packed = request * WIDTH + row
    out = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        out = tl.load(residual_ptr + packed * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        seen = inside & (row + channel * 0 >= tap)  # the interpreter takes no mask from a scalar
        base = tl.load(base_ptr + (SIDE * TAPS + tap) * hidden + channel, mask=seen, other=0.0)
        at = (packed * 2 * TAPS + SIDE * TAPS + tap) * num_groups + group
        delta = tl.load(delta_ptr + at, mask=seen, other=0.0)
        coefficient = (base.to(tl.float32) + delta.to(tl.float32)).to(base.dtype).to(tl.float32)
        y = tl.load(y_ptr + (packed - tap) * hidden + channel, mask=seen, other=0.0)
        out += coefficient * y.to(tl.float32)
    tl.store(out_ptr + packed * hidden + channel, out, mask=inside)


def dynamic_block_conv(y: Tensor, base: Tensor, delta: Tensor, side: int, residual: Tensor | None) -> Tensor:
    """See `kernels.block_conv.dynamic_block_conv`."""
    num_reqs, width, hidden = y.shape
    taps = base.shape[1]
    y = y.contiguous()
    out = torch.empty_like(y)
    block = min(BLOCK, block_size(hidden))
    if y.numel():
        _dynamic_conv_kernel[(num_reqs * width, triton.cdiv(hidden, block))](
            y,
            base,
            delta.contiguous(),
            y if residual is None else residual.contiguous(),
            out,
            hidden,
            delta.shape[2] // (2 * taps),
            SIDE=side,
            TAPS=taps,
            WIDTH=width,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=WARPS,
        )
    return out
