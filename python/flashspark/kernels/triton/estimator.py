"""`kernels.estimator` in Triton: a program per class of requests, sums in float64 and in the order of the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size

ROWS = 128


@triton.jit
def _is_finite(x):
    return (x == x) & (tl.abs(x) != float("inf"))


@triton.jit
def coefficients_at(
    request,
    position,
    inside,
    pointers,
    num_rows,
    GAMMA: tl.constexpr,
    HAS_CLASSES: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Row, slope and intercept of each batch index and draft position. Without rows, classes are in batch order."""
    rows_ptr, classes_ptr, slope_ptr, intercepts_ptr = pointers
    row = request
    if BY_ROW:
        row = tl.load(rows_ptr + request, mask=inside, other=0)
        row = tl.where(row < 0, num_rows - 1, row)
    member = row * 0
    if HAS_CLASSES:
        member = tl.load(classes_ptr + row, mask=inside, other=0) & 1
    slope = tl.load(slope_ptr + member, mask=inside, other=0.0)
    return row, slope, tl.load(intercepts_ptr + member * GAMMA + position, mask=inside, other=0.0)


@triton.jit
def predict_at(
    feature,
    row,
    slope,
    intercept,
    position,
    inside,
    out_ptr,
    values_ptr,
    GAMMA: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Stores the predictions at `out_ptr`, and feature and prediction by row."""
    prediction = 1.0 / (1.0 + tl.exp(-(intercept + slope * feature)))
    tl.store(out_ptr, prediction, mask=inside)
    if BY_ROW:
        place = values_ptr + row * 2 * GAMMA + position
        tl.store(place, feature, mask=inside)
        tl.store(place + GAMMA, prediction, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_values"])
def _predict_kernel(
    feature_ptr,
    classes_ptr,
    slope_ptr,
    intercepts_ptr,
    out_ptr,
    rows_ptr,
    values_ptr,
    num_rows,
    num_values,
    GAMMA: tl.constexpr,
    HAS_CLASSES: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, position = at < num_values, at % GAMMA
    request = (at // GAMMA).to(tl.int64)
    pointers = rows_ptr, classes_ptr, slope_ptr, intercepts_ptr
    row, slope, intercept = coefficients_at(
        request, position, inside, pointers, num_rows, GAMMA, HAS_CLASSES, BY_ROW
    )
    feature = tl.load(feature_ptr + at, mask=inside, other=0.0)
    predict_at(feature, row, slope, intercept, position, inside, out_ptr + at, values_ptr, GAMMA, BY_ROW)


@triton.jit(do_not_specialize=["num_reqs"])
def _observe_kernel(
    moments_ptr,
    feature_ptr,
    prediction_ptr,
    classes_ptr,
    num_accepted_ptr,
    verify_lens_ptr,
    eligible_ptr,
    num_reqs,
    GAMMA: tl.constexpr,
    NUM_MOMENTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
):
    own = tl.program_id(0)
    position = tl.arange(0, BLOCK_G)
    square = tl.zeros((BLOCK_G,), tl.float64)
    slope_error, mixed, weights, errors, count = square, square, square, square, square
    for start in range(0, num_reqs, ROWS):
        row = start + tl.arange(0, ROWS)
        there = row < num_reqs
        accepted = tl.load(num_accepted_ptr + row, mask=there, other=0)[:, None]
        length = tl.load(verify_lens_ptr + row, mask=there, other=0)[:, None]
        member = tl.load(classes_ptr + row, mask=there, other=-1) == own
        eligible = tl.load(eligible_ptr + row, mask=there, other=0) != 0
        at = row[:, None] * GAMMA + position[None, :]
        inside = there[:, None] & (position < GAMMA)[None, :]
        feature = tl.load(feature_ptr + at, mask=inside, other=0.0)
        prediction = tl.load(prediction_ptr + at, mask=inside, other=0.0)
        observed = inside & (member & eligible)[:, None]
        observed = observed & (position[None, :] <= accepted) & (position[None, :] < length - 1)
        observed = observed & _is_finite(feature) & _is_finite(prediction)
        f = tl.where(observed, feature, 0.0).to(tl.float64)
        p = tl.where(observed, prediction, 0.0).to(tl.float64)
        label = (position[None, :] < accepted).to(tl.float64)
        error = tl.where(observed, label - p, 0.0)
        weight = p * (1.0 - p)
        square += tl.sum(weight * f * f, axis=0)
        slope_error += tl.sum(error * f, axis=0)
        mixed += tl.sum(weight * f, axis=0)
        weights += tl.sum(weight, axis=0)
        errors += tl.sum(error, axis=0)
        count += tl.sum(observed.to(tl.float64), axis=0)
    at = moments_ptr + own * NUM_MOMENTS * GAMMA + position
    inside = position < GAMMA
    tl.store(at, tl.load(at, mask=inside) + square, mask=inside)
    tl.store(at + GAMMA, tl.load(at + GAMMA, mask=inside) + slope_error, mask=inside)
    tl.store(at + 2 * GAMMA, tl.load(at + 2 * GAMMA, mask=inside) + mixed, mask=inside)
    tl.store(at + 3 * GAMMA, tl.load(at + 3 * GAMMA, mask=inside) + weights, mask=inside)
    tl.store(at + 4 * GAMMA, tl.load(at + 4 * GAMMA, mask=inside) + errors, mask=inside)
    tl.store(at + 5 * GAMMA, tl.load(at + 5 * GAMMA, mask=inside) + count, mask=inside)


@triton.jit
def _share(count, damping):
    return tl.where(count > 0.0, count / tl.maximum(count + damping, 1e-9), 0.0)


@triton.jit
def _clamped(step, max_step, is_taken):
    """The step within its bounds, 0 where it is not taken or is no number."""
    bounded = tl.minimum(tl.maximum(step, -max_step), max_step)
    return tl.where((step == step) & is_taken, bounded, 0.0)


@triton.jit
def _refit_kernel(
    slope_ptr,
    intercepts_ptr,
    moments_ptr,
    ridge,
    damping,
    max_step,
    GAMMA: tl.constexpr,
    NUM_MOMENTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    own = tl.program_id(0)
    position = tl.arange(0, BLOCK_G)
    inside = position < GAMMA
    at = moments_ptr + own * NUM_MOMENTS * GAMMA + position
    square = tl.load(at, mask=inside, other=0.0)
    slope_error = tl.load(at + GAMMA, mask=inside, other=0.0)
    mixed = tl.load(at + 2 * GAMMA, mask=inside, other=0.0)
    weight = tl.load(at + 3 * GAMMA, mask=inside, other=0.0) + ridge
    error = tl.load(at + 4 * GAMMA, mask=inside, other=0.0)
    count = tl.load(at + 5 * GAMMA, mask=inside, other=0.0)
    total = tl.sum(count, axis=0)
    curvature = tl.sum(square, axis=0) + ridge - tl.sum(mixed * mixed / weight, axis=0)
    gradient = tl.sum(slope_error, axis=0) - tl.sum(mixed * error / weight, axis=0)
    step = gradient / tl.maximum(curvature, ridge) * _share(total, damping)
    slope = tl.load(slope_ptr + own)
    step = _clamped(step, max_step, True)
    step = tl.where(slope + step >= 0.0, step, 0.0)
    shift = (error - mixed * step) / weight * _share(count, damping)
    intercepts = tl.load(intercepts_ptr + own * GAMMA + position, mask=inside, other=0.0)
    tl.store(slope_ptr + own, slope + step)
    moved = intercepts + _clamped(shift, max_step, _is_finite(shift))
    tl.store(intercepts_ptr + own * GAMMA + position, moved, mask=inside)
    for moment in range(NUM_MOMENTS):
        tl.store(at + moment * GAMMA, tl.zeros((BLOCK_G,), tl.float64), mask=inside)


def predict(feature: Tensor, classes: Tensor | None, slope: Tensor, intercepts: Tensor) -> Tensor:
    """See `kernels.estimator.predict`."""
    return _predict(feature, classes, slope, intercepts, None, None)


def predict_rows(
    feature: Tensor, rows: Tensor, kinds: Tensor, slope: Tensor, intercepts: Tensor, values: Tensor
) -> Tensor:
    """See `kernels.estimator.predict_rows`."""
    assert values.is_contiguous()
    return _predict(feature, kinds if slope.shape[0] > 1 else None, slope, intercepts, rows, values)


def _predict(
    feature: Tensor,
    classes: Tensor | None,
    slope: Tensor,
    intercepts: Tensor,
    rows: Tensor | None,
    values: Tensor | None,
) -> Tensor:
    feature = feature.contiguous()
    out = torch.empty_like(feature)
    if feature.numel():
        _predict_kernel[(triton.cdiv(feature.numel(), 1024),)](
            feature,
            feature if classes is None else classes,
            slope,
            intercepts,
            out,
            feature if rows is None else rows,
            feature if values is None else values,
            0 if values is None else values.shape[0],
            feature.numel(),
            GAMMA=feature.shape[1],
            HAS_CLASSES=classes is not None,
            BY_ROW=rows is not None,
            BLOCK=1024,
        )
    return out


def observe(
    moments: Tensor,
    feature: Tensor,
    prediction: Tensor,
    classes: Tensor,
    num_accepted: Tensor,
    verify_lens: Tensor,
    eligible: Tensor,
) -> None:
    """See `kernels.estimator.observe`."""
    num_classes, num_moments, gamma = moments.shape
    if num_classes == 1:  # whatever their class says
        classes = torch.zeros_like(classes)
    _observe_kernel[(num_classes,)](
        moments,
        feature.contiguous(),
        prediction.contiguous(),
        classes.contiguous(),
        num_accepted.contiguous(),
        verify_lens.contiguous(),
        eligible.contiguous(),
        feature.shape[0],
        GAMMA=gamma,
        NUM_MOMENTS=num_moments,
        BLOCK_G=block_size(gamma),
        ROWS=ROWS,
    )


def refit(
    slope: Tensor, intercepts: Tensor, moments: Tensor, ridge: float, damping: float, max_step: float
) -> None:
    """See `kernels.estimator.refit`."""
    num_classes, num_moments, gamma = moments.shape
    assert slope.is_contiguous() and intercepts.is_contiguous() and moments.is_contiguous()
    _refit_kernel[(num_classes,)](
        slope,
        intercepts,
        moments,
        ridge,
        damping,
        max_step,
        GAMMA=gamma,
        NUM_MOMENTS=num_moments,
        BLOCK_G=block_size(gamma),
        num_warps=1,
    )
