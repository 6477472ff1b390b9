"""Rotary position embedding, the half-split ("neox") pairing: feature j turns with feature j + D/2."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton


def rope_tables(
    positions: Tensor,
    frequencies: Tensor,
    scale: float,
    dtype: torch.dtype,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """What `rope` multiplies with at `positions` (any shape S, integers): `(cos, sin)`, each S + [D].

    `frequencies` [D] float32 holds the angular frequencies twice, negated in the first half: the cosine does not
    see the sign, and the sine comes out with the sign that each half needs. `scale` multiplies both (YaRN).
    Angles are taken in float32, as the models were trained.
    """
    if runs_triton(positions, implementation):
        from .triton import rope as twin

        return twin.rope_tables(positions, frequencies, scale, dtype)
    angles = positions.unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return cos.to(dtype), sin.to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., D] turned by the tables of `rope_tables` (broadcast over heads): same shape and dtype."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
