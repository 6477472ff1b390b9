"""`kernels.qk_norm_rope` in Triton: one launch for the norms, the turn and the write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import await_previous, block_size, launch_options

HEADS = 16  # of a program


@triton.jit
def normed_heads(x, weight, inverse):
    """A normed and weighted block of `x`, rounded as `rms_norm` does, in float32."""
    normed = (x.to(tl.float32) * inverse).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def turned(own, other, cos_ptr, sin_ptr, inside, dtype: tl.constexpr):
    """One half of turned heads, from its own elements and those of the other half; rounded as `rope` does."""
    cos = tl.load(cos_ptr, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr, mask=inside, other=0.0).to(tl.float32)
    return ((own * cos).to(dtype).to(tl.float32) + other * sin).to(dtype)


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
    """A block of heads of a row, as two halves: each element is loaded once, and its partner is in the other half."""
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    in_half = column < HALF
    is_turned = (head < NUM_HEADS + NUM_KV_HEADS) & in_half
    weights = weight_ptr + head * DIM + column
    low_weight = tl.load(weights, mask=is_turned, other=0.0)
    high_weight = tl.load(weights + HALF, mask=is_turned, other=0.0)
    await_previous(PROGRAMMATIC)

    source = qkv_ptr + row * qkv_stride + head * DIM + column
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    squares = low.to(tl.float32) * low.to(tl.float32) + high.to(tl.float32) * high.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(squares, axis=1) / DIM + eps)[:, None]
    own, other = normed_heads(low, low_weight, inverse), normed_heads(high, high_weight, inverse)
    cos, sin = cos_ptr + row * DIM + column, sin_ptr + row * DIM + column
    new_low = turned(own, other, cos, sin, in_half, low.dtype)
    new_high = turned(other, own, cos + HALF, sin + HALF, in_half, low.dtype)

    slot = row
    if TO_SLOTS:
        slot = tl.load(slots_ptr + row)
    queries = q_ptr + (row * NUM_HEADS + head) * DIM + column
    is_query = (head < NUM_HEADS) & in_half
    tl.store(queries, new_low, mask=is_query)
    tl.store(queries + HALF, new_high, mask=is_query)
    keys = k_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS) * DIM + column
    is_key = is_turned & (head >= NUM_HEADS)
    tl.store(keys, new_low, mask=is_key)
    tl.store(keys + HALF, new_high, mask=is_key)
    values = v_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * DIM + column
    is_value = inside & (head >= NUM_HEADS + NUM_KV_HEADS)
    tl.store(values, low.to(tl.float32) * value_scale, mask=is_value)
    tl.store(values + HALF, high.to(tl.float32) * value_scale, mask=is_value)


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
            BLOCK=block_size(dim // 2),
            **launch_options(num_rows),
        )
    return q
