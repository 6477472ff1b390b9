"""Which implementation of a kernel runs: the one rule that every function of this room follows."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Implementation = Literal["torch", "triton"]


def runs_triton(tensor: Tensor, implementation: Implementation | None = None) -> bool:
    """Whether the Triton kernel is to run: for tensors on a GPU, unless `implementation` says which.

    Tests name it: Triton's interpreter runs a kernel on CPU tensors, torch's body is the reference on any device.
    """
    if implementation is None:
        return tensor.device.type == "cuda"
    return implementation == "triton"
