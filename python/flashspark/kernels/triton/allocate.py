"""`kernels.allocate` in Triton: no sort. Each request counts, for each of its drafts, how many rank before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size


@triton.jit
def _step(survival, confidence_ptr, mask):
    """The survival one draft further, float64: products are rounded once, as torch's `cumprod` on a CPU does."""
    value = tl.load(confidence_ptr, mask=mask, other=0.0)
    value = tl.where(value == value, tl.minimum(tl.maximum(value, 0.0), 1.0), 0.0)
    return survival * value.to(tl.float64)


@triton.jit(do_not_specialize=["num_reqs"])
def _allocate_kernel(
    confidence_ptr,
    budget_ptr,
    floors_ptr,
    caps_ptr,
    lens_ptr,
    num_reqs,
    budget,
    eps,
    GAMMA: tl.constexpr,
    FROM_DEVICE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    own = tl.program_id(0)
    other = tl.arange(0, BLOCK_R)
    there = other < num_reqs
    if FROM_DEVICE:
        budget = tl.load(budget_ptr).to(tl.int32)
    caps = tl.load(caps_ptr + other, mask=there, other=1)
    floors = tl.minimum(tl.load(floors_ptr + other, mask=there, other=1), caps)
    own_cap = tl.load(caps_ptr + own)
    own_floor = tl.minimum(tl.load(floors_ptr + own), own_cap)

    position = tl.arange(0, BLOCK_G)
    mine = tl.zeros((BLOCK_G,), tl.float32)
    one = tl.zeros((1,), tl.int32)
    survival = tl.full((1,), 1.0, tl.float64)
    for k in tl.static_range(GAMMA):
        survival = _step(survival, confidence_ptr + own * GAMMA + k + one, one == 0)
        mine = tl.where(position == k, survival.to(tl.float32), mine)
    wanted = (position >= own_floor - 1) & (position < own_cap - 1) & (mine >= eps)

    rank = tl.zeros((BLOCK_G,), tl.int32)
    survivals = tl.full((BLOCK_R,), 1.0, tl.float64)
    for k in tl.static_range(GAMMA):
        survivals = _step(survivals, confidence_ptr + other * GAMMA + k, there)
        theirs = survivals.to(tl.float32)
        eligible = there & (k >= floors - 1) & (k < caps - 1) & (theirs >= eps)
        first = (k < position)[:, None] | ((k == position)[:, None] & (other < own)[None, :])
        before = (theirs[None, :] > mine[:, None]) | ((theirs[None, :] == mine[:, None]) & first)
        rank += tl.sum((before & eligible[None, :]).to(tl.int32), axis=1)
    admitted = tl.sum((wanted & (rank < budget)).to(tl.int64), axis=0)
    tl.store(lens_ptr + own, own_floor + admitted)


def allocate(confidence: Tensor, budget: int | Tensor, floors: Tensor, caps: Tensor, eps: float) -> Tensor:
    """See `kernels.allocate.allocate`."""
    num_reqs, gamma = confidence.shape
    lens = torch.empty_like(floors)
    if num_reqs:
        from_device = isinstance(budget, Tensor)
        _allocate_kernel[(num_reqs,)](
            confidence.contiguous(),
            budget if from_device else floors,
            floors,
            caps,
            lens,
            num_reqs,
            0 if from_device else budget,
            eps,
            GAMMA=gamma,
            FROM_DEVICE=from_device,
            BLOCK_G=block_size(gamma),
            BLOCK_R=block_size(num_reqs),
        )
    return lens
