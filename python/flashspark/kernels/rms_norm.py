"""Root-mean-square normalisation (Zhang and Sennrich 2019), with float32 statistics."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float, implementation: Implementation | None = None) -> Tensor:
    """`x / sqrt(mean(x², last dim) + eps) * weight`, in the dtype of `x`.

    `x` [..., D], `weight` [D] or anything that broadcasts to `x`. Statistics in float32; the normalised value is
    rounded to the dtype of `x` before the multiplication by `weight`, as transformers does.
    """
    if runs_triton(x, implementation):
        from .triton import rms_norm as twin

        return twin.rms_norm(x, weight, eps)
    # The vector norm is one pass over x, where torch's own rms_norm runs six: 7 µs against 14 for a row of 256.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = torch.addcmul(_scalar(eps, norm.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    if x.dtype == torch.float32:
        return (x * inverse).mul_(weight)
    return (x * inverse).to(x.dtype).mul_(weight)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, implementation: Implementation | None = None
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(total), total)` of `total = residual + x`, [..., D] each; the sum is rounded to their dtype first."""
    if runs_triton(x, implementation):
        from .triton import rms_norm as twin

        return twin.add_rms_norm(x, residual, weight, eps)
    total = residual + x
    return rms_norm(total, weight, eps, "torch"), total


@lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # or it could not be used outside of inference mode afterwards
        return torch.tensor(value, dtype=torch.float32, device=device)
