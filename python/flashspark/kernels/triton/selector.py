"""The walk of `kernels.selector` in Triton: one program per request, and only the rows of the lattice it passes.

Products and sums are float32 whatever the codebooks hold, which the reference rounds to their dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size


@triton.jit
def _selector_walk_kernel(
    scores_ptr,
    ids_ptr,
    anchors_ptr,
    projected_ptr,
    predecessors_ptr,
    successors_ptr,
    temperature_ptr,
    greedy_ptr,
    uniforms_ptr,
    tokens_ptr,
    q_ptr,
    feature_ptr,
    uniforms_stride,
    smallest_temperature,
    limit,
    NUM_SLOTS: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    ANY_SAMPLED: tl.constexpr,
    WITH_FEATURE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    candidate, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_RANK)
    there = candidate < K
    is_greedy = tl.load(greedy_ptr + request) != 0
    divisor = tl.maximum(tl.load(temperature_ptr + request), smallest_temperature)
    divisor = tl.where(is_greedy, 1.0, divisor)
    previous = tl.load(anchors_ptr + request)
    for slot in range(NUM_SLOTS):
        at = request * NUM_SLOTS + slot
        token = tl.load(ids_ptr + at * K + candidate, mask=there, other=0)
        score = tl.load(scores_ptr + at * K + candidate, mask=there, other=0.0)
        left = tl.load(predecessors_ptr + previous * RANK + j, mask=j < RANK, other=0.0).to(tl.float32)
        left *= tl.load(projected_ptr + at * RANK + j, mask=j < RANK, other=0.0).to(tl.float32)
        inside = there[:, None] & (j < RANK)[None, :]
        right = tl.load(successors_ptr + token[:, None] * RANK + j[None, :], mask=inside, other=0.0)
        pair = score + tl.sum(right.to(tl.float32) * left[None, :], axis=1)
        pair = tl.where(there, pair, float("-inf"))
        peak = tl.max(pair, axis=0)
        best = tl.min(tl.where(pair == peak, candidate, K - 1), axis=0)
        chosen = best
        weight = tl.where(there, tl.exp((pair - peak) / divisor), 0.0)
        q = (candidate == best).to(tl.float32)
        if ANY_SAMPLED:
            probs = weight / tl.sum(weight, axis=0)
            cdf = tl.cumsum(probs, axis=0)
            whole = tl.sum(tl.where(candidate == K - 1, cdf, 0.0), axis=0)
            # Against u times the total, since a float32 sum may end below 1 and the rest must not go to the last one.
            wanted = tl.load(uniforms_ptr + request * uniforms_stride + slot) * whole.to(tl.float64)
            drawn = tl.sum((there & (cdf.to(tl.float64) <= wanted)).to(tl.int32), axis=0)
            chosen = tl.where(is_greedy, best, tl.minimum(drawn, K - 1))
            q = tl.where(is_greedy, q, probs)
        if WITH_FEATURE:
            others = tl.sum(tl.where(candidate == best, 0.0, weight), axis=0)
            feature = tl.minimum(tl.maximum(-tl.log(others), -limit), limit)
            tl.store(feature_ptr + at, feature)
        previous = tl.sum(tl.where(candidate == chosen, token, 0), axis=0)
        tl.store(tokens_ptr + at, previous)
        tl.store(q_ptr + at * K + candidate, q, mask=there)


def selector_walk(
    scores: Tensor,
    ids: Tensor,
    anchors: Tensor,
    projected: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    temperature: Tensor,
    greedy: Tensor,
    uniforms: Tensor,
    any_sampled: bool,
    smallest_temperature: float,
    feature_limit: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.selector`: tokens, q and the feature, which is left unwritten where it has no limit."""
    num_reqs, num_slots, k = ids.shape
    tokens = torch.empty((num_reqs, num_slots), dtype=torch.int64, device=ids.device)
    q = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    feature = torch.empty((num_reqs, num_slots), dtype=torch.float32, device=ids.device)
    rank = projected.shape[2]
    uniforms = uniforms if uniforms.stride(-1) == 1 else uniforms.contiguous()
    if num_reqs:
        _selector_walk_kernel[(num_reqs,)](
            scores.contiguous(),
            ids.contiguous(),
            anchors,
            projected.contiguous(),
            predecessor_codebook,
            successor_codebook,
            temperature,
            greedy,
            uniforms,
            tokens,
            q,
            feature,
            uniforms.stride(0),
            smallest_temperature,
            0.0 if feature_limit is None else feature_limit,
            NUM_SLOTS=num_slots,
            K=k,
            RANK=rank,
            ANY_SAMPLED=any_sampled,
            WITH_FEATURE=feature_limit is not None,
            BLOCK_K=block_size(k),
            BLOCK_RANK=block_size(rank),
        )
    return tokens, q, feature
