"""The acceptance estimator's arithmetic: feature, prediction, observation, refit. Pure functions of tensors.

Model: draft k of a block is accepted, given that those before it were, with probability
`c_k = sigmoid(w * f_k + b_k)`: one slope and gamma intercepts per class of requests, f the logit of the largest
probability of the distribution that draft k was drawn from. The slope is shared by the positions because deep ones
see few outcomes; the form, the damped step and its constants follow vLLM's online estimator (vllm-project/vllm#52228).

Everything stays on the device: no function asks it for a value, sums have a fixed order (no atomics), and
coefficients and sums are updated in place, so that a captured graph may hold on to them. Equal inputs give equal bits,
which is what lets every rank of a tensor-parallel group keep its own copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton

FEATURE_LIMIT = 40.0  # exp(-40) is a probability no outcome will ever resolve
NUM_MOMENTS = 6  # per class and position: sums of v f^2, e f, v f, v, e, 1 with v = p (1 - p), e = y - p
RIDGE = 1e-3
DAMPING = 50.0  # observations at which a step is halved
# A Newton step from saturated predictions has no bound: 3,200 refusals of drafts predicted at 0.999 would move an
# intercept by -1,000, and nothing would ever be verified, or learned, again. Healthy steps are below 2.
MAX_STEP = 4.0


class RowEstimator(NamedTuple):
    """An estimator as `predict_rows` takes it: its coefficients, and what it keeps of each request row."""

    kinds: Tensor  # int64 [rows], the class of each in its lowest bit; not looked at where there is one class
    slope: Tensor  # float32 [C]
    intercepts: Tensor  # float32 [C, g]
    values: Tensor  # float32 [rows, 2, g]: the latest feature and prediction are left here


def logit_of_largest(scores: Tensor, temperature: Tensor) -> Tensor:
    """`logit(max softmax(scores / temperature))` = -log(sum over the others of exp((s - s_max) / temperature)).

    The largest score is left out of the sum instead of subtracting its 1 again, so the result keeps its precision
    where the maximum is nearly certain. Ties count the others in full. Clamped to +-`FEATURE_LIMIT`.

    Args:
        scores: float32 [..., K].
        temperature: float32, broadcastable to [...], positive.

    Returns:
        float32 [...].
    """
    largest, index = scores.max(dim=-1, keepdim=True)
    others = (scores - largest).div_(temperature.unsqueeze(-1)).exp_().scatter_(-1, index, 0.0)
    return others.sum(dim=-1).log_().neg_().clamp_(-FEATURE_LIMIT, FEATURE_LIMIT)


def predict(
    feature: Tensor,
    classes: Tensor | None,
    slope: Tensor,
    intercepts: Tensor,
    implementation: Implementation | None = None,
) -> Tensor:
    """`sigmoid(slope[class] * feature + intercepts[class])`.

    Args:
        feature: float32 [R, g].
        classes: int64 [R]; None where there is one class.
        slope: float32 [C].
        intercepts: float32 [C, g].

    Returns:
        float32 [R, g].
    """
    if runs_triton(feature, implementation):
        from .triton import estimator as twin

        return twin.predict(feature, classes, slope, intercepts)
    if classes is None:
        return torch.addcmul(intercepts, slope, feature).sigmoid_()
    return torch.addcmul(intercepts[classes], slope[classes].unsqueeze(1), feature).sigmoid_()


def predict_rows(
    feature: Tensor,
    rows: Tensor,
    kinds: Tensor,
    slope: Tensor,
    intercepts: Tensor,
    values: Tensor,
    implementation: Implementation | None = None,
) -> Tensor:
    """`predict` for request rows, which also leaves feature and prediction in `values`, by row.

    Args:
        feature: float32 [R, g], batch order.
        rows: int64 [R]; -1 is the last of them all. Of equal ones any may stay in `values`.
        kinds: int64 [rows], the class of each in its lowest bit; not looked at where there is one class.
        values: float32 [rows, 2, g].

    Returns:
        float32 [R, g], batch order.
    """
    if runs_triton(feature, implementation):
        from .triton import estimator as twin

        return twin.predict_rows(feature, rows, kinds, slope, intercepts, values)
    classes = kinds[rows] & 1 if slope.shape[0] > 1 else None
    prediction = predict(feature, classes, slope, intercepts, "torch")
    values[rows] = torch.stack((feature, prediction), dim=1)
    return prediction


def observed_mask(num_accepted: Tensor, verify_lens: Tensor, gamma: int) -> Tensor:
    """Which outcomes a verify step shows: bool [R, gamma], true at k iff `k <= a` and `k < L - 1`.

    Position a, the first refusal, is seen; what lies behind it, or was trimmed, is not.

    Args:
        num_accepted: int64 [R], a.
        verify_lens: int64 [R], L: the anchor and L - 1 drafts.
    """
    position = torch.arange(gamma, device=num_accepted.device)
    return (position <= num_accepted.unsqueeze(1)) & (position < verify_lens.unsqueeze(1) - 1)


def observe(
    moments: Tensor,
    feature: Tensor,
    prediction: Tensor,
    classes: Tensor,
    num_accepted: Tensor,
    verify_lens: Tensor,
    eligible: Tensor,
    implementation: Implementation | None = None,
) -> None:
    """Adds one step's outcomes to `moments`, in place.

    Whether an outcome is seen depends on features and earlier outcomes, never on the outcome itself, so the fit
    stays consistent under trimming. Values that are not finite are passed over.

    Args:
        moments: float64 [C, NUM_MOMENTS, g].
        feature, prediction: float32 [R, g] as they were when the block was drafted.
        classes: int64 [R].
        num_accepted, verify_lens: int64 [R].
        eligible: bool [R]; other rows leave no trace.
    """
    if runs_triton(feature, implementation):
        from .triton import estimator as twin

        twin.observe(moments, feature, prediction, classes, num_accepted, verify_lens, eligible)
        return
    gamma = feature.shape[1]
    observed = observed_mask(num_accepted, verify_lens, gamma) & eligible.unsqueeze(1)
    observed &= feature.isfinite() & prediction.isfinite()
    label = torch.arange(gamma, device=feature.device) < num_accepted.unsqueeze(1)
    f = torch.where(observed, feature, 0.0).to(moments.dtype)
    p = torch.where(observed, prediction, 0.0).to(moments.dtype)  # 0 leaves neither weight nor error below
    error = torch.where(observed, label.to(moments.dtype) - p, 0.0)
    weight = p * (1.0 - p)
    terms = torch.stack((weight * f * f, error * f, weight * f, weight, error, observed.to(moments.dtype)))
    num_classes = moments.shape[0]
    if num_classes == 1:
        moments.add_(terms.sum(dim=1))
        return
    member = classes == torch.arange(num_classes, device=classes.device).unsqueeze(1)
    moments.add_((terms * member[:, None, :, None]).sum(dim=2))


def refit(
    slope: Tensor,
    intercepts: Tensor,
    moments: Tensor,
    ridge: float = RIDGE,
    damping: float = DAMPING,
    max_step: float = MAX_STEP,
    implementation: Implementation | None = None,
) -> None:
    """One damped ridge Newton step of each class on its window of observations; clears the window. In place.

    With A, Bk, Ck the curvatures (slope, mixed, intercept), G0, G1k the gradients and Nk, N the counts:

        dw   = (G0 - sum_k Bk G1k / Ck) / (A - sum_k Bk^2 / Ck) * N / (N + damping)
        db_k = (G1k - Bk dw) / Ck * Nk / (Nk + damping)

    `ridge` is added to A and every Ck first. A slope step that is not finite or would make the slope negative is
    not taken. A position without observations keeps its intercept. No step exceeds `max_step`.

    Args:
        slope: [C]; intercepts: [C, g]; moments: float64 [C, NUM_MOMENTS, g].
    """
    if runs_triton(moments, implementation):
        from .triton import estimator as twin

        twin.refit(slope, intercepts, moments, ridge, damping, max_step)
        return
    square, slope_error, mixed, weight, error, count = moments.unbind(dim=1)  # [C, g] each
    weight = weight + ridge
    total = count.sum(dim=1)
    curvature = square.sum(dim=1) + ridge - (mixed * mixed / weight).sum(dim=1)
    gradient = slope_error.sum(dim=1) - (mixed * error / weight).sum(dim=1)
    # In exact arithmetic the curvature is at least `ridge` (Cauchy-Schwarz).
    step = gradient / curvature.clamp_min(ridge) * _share(total, damping)
    step = step.clamp(-max_step, max_step)
    step = torch.where(step.isfinite() & (slope + step >= 0), step, 0.0)
    shift = (error - mixed * step.unsqueeze(1)) / weight * _share(count, damping)
    shift = torch.where(shift.isfinite(), shift, 0.0).clamp(-max_step, max_step)
    slope.copy_(slope + step)
    intercepts.copy_(intercepts + shift)
    moments.zero_()


def _share(count: Tensor, damping: float) -> Tensor:
    """count / (count + damping), and 0 without observations, whatever the damping."""
    return torch.where(count > 0, count / (count + damping).clamp_min(1e-9), 0.0)
