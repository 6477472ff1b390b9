"""The gate of a SwiGLU MLP (Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton


def silu_mul(gate_up: Tensor, implementation: Implementation | None = None) -> Tensor:
    """`silu(gate) * up` of `gate_up` [..., 2 * I], gate first: [..., I] of the same dtype."""
    if runs_triton(gate_up, implementation):
        from .triton import silu_mul as twin

        return twin.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
