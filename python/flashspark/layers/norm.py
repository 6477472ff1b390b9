"""Root-mean-square norms with their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.kernels.rms_norm import add_rms_norm, rms_norm
from flashspark.layers.parameters import NamedParameters, Parameter


class RMSNorm:
    """Norm over the last dimension, one weight vector `weight` [size]."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `residual + x`, and that sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def parameters(self) -> NamedParameters:
        yield "weight", Parameter(tuple(self.weight.shape), (self.weight,))


class HeadNorms:
    """The per-head norms of queries and keys, for both in one call (`kernels.qk_norm_rope`), queries first."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.weight = torch.empty(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
        self.num_heads = num_heads
        self.eps = eps

    @property
    def key_weight(self) -> Tensor:
        """[D]"""
        return self.weight[-1]

    def parameters(self) -> NamedParameters:
        shape = (self.weight.shape[1],)
        yield "q_norm.weight", Parameter(shape, (self.weight[: self.num_heads],))
        yield "k_norm.weight", Parameter(shape, (self.weight[self.num_heads :],))
