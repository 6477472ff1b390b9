"""`kernels.qk_norm_rope` in Triton: one launch for the norms, the turn and the write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import await_previous, block_size, launch_options

HEADS = 16  # of a program


@triton.jit
def _normed(x_ptr, weight, inside, inverse):
    """A normed and weighted element block, rounded as `rms_norm` does, in float32."""
    x = tl.load(x_ptr, mask=inside, other=0.0)
    normed = (x.to(tl.float32) * inverse).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_stride,
    eps,
    value_scale,
    PROGRAMMATIC: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_query = head < NUM_HEADS
    is_turned = head < NUM_HEADS + NUM_KV_HEADS
    in_row = column < DIM
    turned = is_turned & in_row
    partner = tl.where(column < DIM // 2, column + DIM // 2, column - DIM // 2)
    source = qkv_ptr + row * qkv_stride + head * DIM
    own_weight = tl.load(weight_ptr + head * DIM + column, mask=turned, other=0.0)
    other_weight = tl.load(weight_ptr + head * DIM + partner, mask=turned, other=0.0)
    await_previous(PROGRAMMATIC)

    x = tl.load(source + column, mask=turned, other=0.0)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
    own = _normed(source + column, own_weight, turned, inverse)
    other = _normed(source + partner, other_weight, turned, inverse)
    cos = tl.load(cos_ptr + row * DIM + column, mask=in_row, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * DIM + column, mask=in_row, other=0.0).to(tl.float32)
    out = ((own * cos).to(x.dtype).to(tl.float32) + other * sin).to(x.dtype)

    slot = row
    if TO_SLOTS:
        slot = tl.load(slots_ptr + row)
    tl.store(q_ptr + (row * NUM_HEADS + head) * DIM + column, out, mask=is_query & in_row)
    key = slot * NUM_KV_HEADS + head - NUM_HEADS
    tl.store(k_ptr + key * DIM + column, out, mask=turned & (head >= NUM_HEADS))
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_row
    value = tl.load(source + column, mask=is_value, other=0.0).to(tl.float32) * value_scale
    tl.store(v_ptr + (key - NUM_KV_HEADS) * DIM + column, value, mask=is_value)


def qk_norm_rope(
    qkv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, num_kv_heads: int, value_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.qk_norm_rope.qk_norm_rope`."""
    leading, dim = qkv.shape[:-2], qkv.shape[-1]
    rows = qkv.reshape(-1, *qkv.shape[-2:])
    shape = (rows.shape[0], num_kv_heads, dim)
    k, v = (torch.empty(shape, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    q = _launch(rows, weight, eps, cos, sin, None, k, v, value_scale)
    return q.view(*leading, -1, dim), k.view(*leading, -1, dim), v.view(*leading, -1, dim)


def qk_norm_rope_write(
    qkv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    value_scale: float,
) -> Tensor:
    """See `kernels.qk_norm_rope.qk_norm_rope_write`."""
    return _launch(qkv, weight, eps, cos, sin, slots, k_cache, v_cache, value_scale)


def _launch(
    qkv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor | None,
    k: Tensor,
    v: Tensor,
    value_scale: float,
) -> Tensor:
    num_rows, num_all, dim = qkv.shape
    num_kv_heads = k.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    assert qkv.stride(2) == 1 and qkv.stride(1) == dim, "the heads of a row lie together"
    assert k.is_contiguous() and v.is_contiguous() and weight.is_contiguous()
    q = torch.empty(num_rows, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    heads = min(HEADS, block_size(num_all))
    if num_rows:
        _qk_norm_rope_kernel[(num_rows, triton.cdiv(num_all, heads))](
            qkv,
            weight,
            cos.contiguous(),
            sin.contiguous(),
            k if slots is None else slots,
            q,
            k,
            v,
            qkv.stride(0),
            eps,
            value_scale,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            DIM=dim,
            TO_SLOTS=slots is not None,
            HEADS=heads,
            BLOCK=block_size(dim),
            **launch_options(num_rows),
        )
    return q
