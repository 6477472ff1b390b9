"""Linear layers over fused weights.

Tensor parallelism will live here: `ColumnLinear` splits output features over ranks, `RowLinear` input features,
with the all-reduce before its residual is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.kernels.half_linear import HalfWeight, half_linear, pack_half
from flashspark.kernels.matmul import matmul
from flashspark.layers.parameters import NamedParameters, Parameter


class Linear:
    """`y = x Wᵀ (+ b)`, without autograd. Several checkpoint matrices `[out, in]` may share one product."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`parts`: checkpoint name -> out features, fused in this order along the output."""
        self.in_features = in_features
        self.parts = parts
        self.out_features = sum(parts.values())
        # Stored [in, out]: the product with few rows is up to three times faster so on a CPU, 8 % on a GPU.
        self.weight: Tensor | None = torch.empty(in_features, self.out_features, dtype=dtype, device=device)
        self.bias = torch.empty(self.out_features, dtype=dtype, device=device) if bias else None
        self._half: HalfWeight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [..., in] -> [..., out]."""
        if self.weight is None:
            assert self._half is not None
            return half_linear(x, self._half)
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y = matmul(flat, self.weight) if self.bias is None else torch.addmm(self.bias, flat, self.weight)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def hold_half(self) -> None:
        """Holds the loaded weight in half precision where `kernels.half_linear` can; no view of it is valid after."""
        if self.weight is not None:
            self._half = pack_half(self.weight.t(), self.bias)
            if self._half is not None:
                self.weight = None

    def parameters(self) -> NamedParameters:
        """`<part>.weight` [out, in], and `<part>.bias` [out] where there is one."""
        assert self.weight is not None, "weights are loaded before they are packed"
        start = 0
        for name, size in self.parts.items():
            view = self.weight[:, start : start + size].t()
            yield f"{name}.weight", Parameter((size, self.in_features), (view,))
            if self.bias is not None:
                yield f"{name}.bias", Parameter((size,), (self.bias[start : start + size],))
            start += size


class ColumnLinear(Linear):
    """A linear layer whose output features are independent of each other (q, k, v; gate, up)."""


class RowLinear(Linear):
    """A linear layer that reads what a column layer made (o, down), and mostly ends in the residual stream."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)` in a new tensor: `residual` [..., out], `x` [..., in] or cut into heads."""
        flat = x.reshape(-1, self.in_features)
        if self.weight is None:
            return self(flat).view(residual.shape).add_(residual)
        into = residual.reshape(-1, self.out_features)
        if self.bias is not None:
            into = into + self.bias
        return torch.addmm(into, flat, self.weight).view(residual.shape)
