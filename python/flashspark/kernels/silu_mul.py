"""The gate of a SwiGLU MLP (Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `gate_up` [..., 2 * I], gate first: [..., I] of the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
