"""Shares a draft budget out over the requests: who verifies how much of their block.

Sharing is by survival, the probability that a draft and all before it are accepted. Only *counts* per request
leave this function, so what is verified is a prefix by construction; survival that never rises along a request,
and ties that go to the smaller position, make that prefix the very set of the largest survivals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton


def allocate(
    confidence: Tensor,
    budget: int | Tensor,
    floors: Tensor,
    caps: Tensor,
    eps: float,
    implementation: Implementation | None = None,
) -> Tensor:
    """Verify lengths that spend `budget` drafts on the largest survivals.

    All (request, position) pairs are ranked by survival descending, position ascending, request ascending; the
    first `budget` of them are admitted. The tie-break looks at indices only, so equal values rank alike on every
    rank. No host synchronisation: the budget may be a tensor on the device.

    Args:
        confidence: float32 [R, gamma], P(draft k accepted | those before it accepted). NaN counts as 0, values
            outside [0, 1] as the nearer bound.
        budget: drafts to admit above the floors, summed over the batch; an int or an integer tensor of no
            dimensions.
        floors: int64 [R], rows a request verifies whatever it costs, at least 1; a floor above the cap is the cap.
        caps: int64 [R], most rows it may verify, at most gamma + 1.
        eps: survivals below this are never admitted.

    Returns:
        int64 [R], rows to verify: floors ≤ result ≤ caps.
    """
    if runs_triton(confidence, implementation):
        from .triton import allocate as twin

        return twin.allocate(confidence, budget, floors, caps, eps)
    num_reqs, gamma = confidence.shape
    floors = torch.minimum(floors, caps)
    if gamma == 0 or num_reqs == 0:
        return floors.clone()
    survival = torch.nan_to_num(confidence, nan=0.0).clamp(0.0, 1.0).cumprod(1)
    position = torch.arange(gamma, device=confidence.device)
    # Draft k is block row k + 1: rows below the floor are paid for, rows from the cap on are out of reach.
    eligible = (position >= floors[:, None] - 1) & (position < caps[:, None] - 1) & (survival >= eps)
    # Position-major, so that a stable sort leaves ties in the order position, request. Ineligible pairs rank last.
    keys = torch.where(eligible, survival, -1.0).t().reshape(-1)
    sorted_keys, order = keys.sort(descending=True, stable=True)
    rank = torch.arange(len(keys), device=confidence.device)
    admitted = (rank < budget) & (sorted_keys >= 0)
    counts = torch.zeros_like(floors).scatter_add_(0, order % num_reqs, admitted.to(floors.dtype))
    return floors + counts
