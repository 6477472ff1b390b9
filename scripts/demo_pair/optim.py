"""Muon for the matrices inside the layers, AdamW for everything else, one warm-up-and-cosine factor for both."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def lr_factor(progress: float, warmup: float, final: float) -> float:
    """Linear warm-up over the first `warmup` share of the run, then a cosine down to `final`."""
    rising = min(1.0, 0.02 + progress / max(warmup, 1e-6))
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return rising * (final + (1.0 - final) * cosine)


def orthogonalise(gradients: Tensor) -> Tensor:
    """Five Newton-Schulz steps on a stack of matrices [n, rows, cols]: singular values go to about one."""
    x = gradients.to(torch.bfloat16) if gradients.is_cuda else gradients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.mT if tall else x).to(gradients.dtype)


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes the parameter: the layers' projections and the draft's fusion, not tables or kernels."""
    inside = ".layers." in f".{name}" or name.startswith("fc.")
    return parameter.dim() == 2 and inside and "_conv" not in name


class MuonAdamW:
    """The optimiser of both models."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        muon_lr: float,
        adam_lr: float,
        weight_decay: float,
        compiled: bool = False,
    ) -> None:
        self.muon_lr, self.adam_lr, self.weight_decay = muon_lr, adam_lr, weight_decay
        stacks: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.others: list[nn.Parameter] = []
        for name, parameter in named:
            if is_layer_matrix(name, parameter):
                stacks.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                self.others.append(parameter)
        self.stacks = list(stacks.values())
        self.momenta = [torch.zeros(len(s), *s[0].shape, device=s[0].device) for s in self.stacks]
        fused = bool(self.others) and self.others[0].is_cuda
        self.adam = torch.optim.AdamW(
            self.others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
        )
        self._orthogonalise = torch.compile(orthogonalise, dynamic=False) if compiled else orthogonalise

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with both learning rates multiplied by `factor`; gradients are cleared."""
        lr = self.muon_lr * factor
        for parameters, momentum in zip(self.stacks, self.momenta, strict=True):
            gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
            momentum.lerp_(gradients, 0.05)
            updates = self._orthogonalise(gradients.lerp(momentum, 0.95))
            rows, cols = parameters[0].shape
            torch._foreach_mul_(parameters, 1.0 - lr * self.weight_decay)
            torch._foreach_add_(parameters, list(updates.unbind(0)), alpha=-lr * max(1.0, rows / cols) ** 0.5)
            for parameter in parameters:
                parameter.grad = None
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        for own, saved in zip(self.momenta, state["momenta"], strict=True):
            own.copy_(saved)
        self.adam.load_state_dict(state["adam"])
