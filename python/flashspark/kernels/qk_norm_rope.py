"""From the fused projection to attention's inputs: head norms, rotary positions, keys and values to their slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton
from .rms_norm import rms_norm
from .rope import rope


class HeadTurn(NamedTuple):
    """What norms and turns the heads of rows [M]: arguments of `qk_norm_rope` that attention may be handed instead."""

    weight: Tensor  # [Hq + Hkv, D]
    eps: float
    cos: Tensor  # [M, 1, D]
    sin: Tensor  # [M, 1, D]


def qk_norm_rope(
    qkv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    num_kv_heads: int,
    value_scale: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and turns the query and key heads of `qkv`, and scales the value heads.

    Args:
        qkv: [..., Hq + 2 * Hkv, D], heads of queries, keys, values; a row's heads lie together. Hq may be 0.
        weight: [Hq + Hkv, D], the norms' weights, queries first.
        cos, sin: [..., 1, D], the tables of `rope` at the rows' positions, in the dtype of `qkv`.

    Returns:
        q [..., Hq, D], k and v [..., Hkv, D].
    """
    if runs_triton(qkv, implementation):
        from .triton import qk_norm_rope as twin

        return twin.qk_norm_rope(qkv, weight, eps, cos, sin, num_kv_heads, value_scale)
    num_turned = qkv.shape[-2] - num_kv_heads
    qk, v = torch.split_with_sizes(qkv, [num_turned, num_kv_heads], -2)
    turned = rope(rms_norm(qk, weight, eps, "torch"), cos, sin)
    q, k = torch.split_with_sizes(turned, [num_turned - num_kv_heads, num_kv_heads], -2)
    return q, k, v if value_scale == 1.0 else v * value_scale


def qk_norm_rope_write(
    qkv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    value_scale: float = 1.0,
    implementation: Implementation | None = None,
) -> Tensor:
    """As `qk_norm_rope` of rows [M], with k and v written to `slots` [M] int64 of the caches [num_slots, Hkv, D].

    Returns q.

    Of rows with equal slots (padding, in the scratch slot) any one wins.
    """
    num_kv_heads = k_cache.shape[1]
    if runs_triton(qkv, implementation):
        from .triton import qk_norm_rope as twin

        return twin.qk_norm_rope_write(qkv, weight, eps, cos, sin, slots, k_cache, v_cache, value_scale)
    q, k, v = qk_norm_rope(qkv, weight, eps, cos, sin, num_kv_heads, value_scale, "torch")
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)
    return q
