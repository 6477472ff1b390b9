"""The walk of `kernels.selector` in Triton: one program per request, and only the rows of the lattice it passes.

Products and sums are float32 whatever the codebooks hold, which the reference rounds to their dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..estimator import RowEstimator
from .estimator import coefficients_at, predict_at
from .launch import block_size


@triton.jit
def _draw(weight, uniform, candidate, there, K: tl.constexpr):
    """The candidates' probabilities, and the one that inverse CDF draws."""
    probs = weight / tl.sum(weight, axis=0)
    cdf = tl.cumsum(probs, axis=0)
    whole = tl.sum(tl.where(candidate == K - 1, cdf, 0.0), axis=0)
    # Against u times the total, since a float32 sum may end below 1 and the rest must not go to the last one.
    wanted = uniform * whole.to(tl.float64)
    drawn = tl.sum((there & (cdf.to(tl.float64) <= wanted)).to(tl.int32), axis=0)
    return probs, tl.minimum(drawn, K - 1)


@triton.jit(do_not_specialize=["num_rows"])
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
    rows_ptr,
    kinds_ptr,
    slope_ptr,
    intercepts_ptr,
    values_ptr,
    confidence_ptr,
    num_rows,
    uniforms_stride,
    smallest_temperature,
    limit,
    NUM_SLOTS: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    ANY_SAMPLED: tl.constexpr,
    WITH_FEATURE: tl.constexpr,
    PREDICTS: tl.constexpr,
    HAS_CLASSES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    candidate, j, position = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_SLOTS)
    there, is_slot = candidate < K, position < NUM_SLOTS
    is_greedy = tl.load(greedy_ptr + request) != 0
    divisor = tl.maximum(tl.load(temperature_ptr + request), smallest_temperature)
    divisor = tl.where(is_greedy, 1.0, divisor)
    previous = tl.load(anchors_ptr + request)
    of_slot = request * NUM_SLOTS + position
    feature = tl.zeros((BLOCK_SLOTS,), tl.float32)
    if PREDICTS:  # read before the walk, which takes longer
        pointers = rows_ptr, kinds_ptr, slope_ptr, intercepts_ptr
        row, slope, intercept = coefficients_at(
            request + position * 0, position, is_slot, pointers, num_rows, NUM_SLOTS, HAS_CLASSES, True
        )
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
            uniform = tl.load(uniforms_ptr + request * uniforms_stride + slot)
            probs, drawn = _draw(weight, uniform, candidate, there, K)
            chosen = tl.where(is_greedy, best, drawn)
            q = tl.where(is_greedy, q, probs)
        if WITH_FEATURE:
            others = tl.sum(tl.where(candidate == best, 0.0, weight), axis=0)
            found = tl.minimum(tl.maximum(-tl.log(others), -limit), limit)
            feature = tl.where(position == slot, found, feature)
        previous = tl.sum(tl.where(candidate == chosen, token, 0), axis=0)
        tl.store(tokens_ptr + at, previous)
        tl.store(q_ptr + at * K + candidate, q, mask=there)
    if WITH_FEATURE:
        tl.store(feature_ptr + of_slot, feature, mask=is_slot)
    if PREDICTS:
        out = confidence_ptr + of_slot
        predict_at(feature, row, slope, intercept, position, is_slot, out, values_ptr, NUM_SLOTS, True)


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
    rows: Tensor | None = None,
    estimator: RowEstimator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.selector`: tokens, q, the feature and the confidence.

    The feature is left unwritten where it has no limit. `rows` and `estimator` come together; without them the
    confidence is no tensor of its own.
    """
    num_reqs, num_slots, k = ids.shape
    tokens = torch.empty((num_reqs, num_slots), dtype=torch.int64, device=ids.device)
    q = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    feature = torch.empty((num_reqs, num_slots), dtype=torch.float32, device=ids.device)
    confidence = feature
    if estimator is None:
        estimator = RowEstimator(feature, feature, feature, feature)  # nothing looks at it
    else:
        assert rows is not None and feature_limit is not None
        assert estimator.intercepts.shape[1] == num_slots and estimator.values.is_contiguous()
        confidence = torch.empty_like(feature)
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
            feature if rows is None else rows,
            *estimator,
            confidence,
            estimator.values.shape[0],
            uniforms.stride(0),
            smallest_temperature,
            0.0 if feature_limit is None else feature_limit,
            NUM_SLOTS=num_slots,
            K=k,
            RANK=rank,
            ANY_SAMPLED=any_sampled,
            WITH_FEATURE=feature_limit is not None,
            PREDICTS=rows is not None,
            HAS_CLASSES=rows is not None and estimator.slope.shape[0] > 1,
            BLOCK_K=block_size(k),
            BLOCK_RANK=block_size(rank),
            BLOCK_SLOTS=block_size(num_slots),
        )
    return tokens, q, feature, confidence
