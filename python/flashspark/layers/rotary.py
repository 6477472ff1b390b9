"""Rotary frequencies of a configuration, and the tables of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashspark.kernels.rope import rope, rope_tables


@dataclass(frozen=True)
class RopeConfig:
    """`rope_type` default, linear or yarn; the fields after `factor` are YaRN's, already resolved."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


class RopeTables(NamedTuple):
    """Cosine and signed sine of one step's rows, `[..., 1, D]` each: broadcast over heads, shared by all layers."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """`x` [..., heads, D] at the rows' positions."""
        return rope(x, self.cos, self.sin)


class RotaryEmbedding:
    """Frequencies as transformers computes them (default, linear, YaRN). No table of all positions is kept:
    cosines of a step's few rows cost less than a table of a long context would take memory."""

    def __init__(self, config: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device | str):
        inverse, self.scale = _frequencies(config, head_dim)
        self.frequencies = torch.cat((-inverse, inverse)).to(device)
        self.dtype = dtype

    def tables(self, positions: Tensor) -> RopeTables:
        """`positions` of any shape S, int64 -> tables S + [1, D]."""
        cos, sin = rope_tables(positions.unsqueeze(-1), self.frequencies, self.scale, self.dtype)
        return RopeTables(cos, sin)


def _frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """`([D / 2] float32, factor on cos and sin)`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return inverse / config.factor, 1.0
    if config.rope_type == "yarn":
        return _yarn(config, head_dim, inverse)
    return inverse, 1.0


def _yarn(config: RopeConfig, head_dim: int, inverse: Tensor) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, sections 3.2 to 3.4) with the options that transformers reads."""

    def dimension(num_rotations: float) -> float:
        """The (fractional) feature that turns `num_rotations` times over the original context."""
        return (
            head_dim
            * math.log(config.original_max_position_embeddings / (num_rotations * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    interpolated = inverse / config.factor * ramp + inverse * (1 - ramp)
    return interpolated, config.attention_factor


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's scale on cosines and sines where a configuration does not state it (section 3.4, equation 22)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
