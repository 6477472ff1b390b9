"""From a confidence head's records to its temperatures (STS): pure functions over tensors. m blocks, g drafts.

What is made true is the *survival*, the running product of the confidences along a block, since that is what the
planner spends its budget by.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashspark.speculative.calibration import StsCalibration

NUM_BINS = 15
GRID: tuple[float, ...] = tuple(torch.logspace(-1, 1, 41, dtype=torch.float64).tolist())


def expected_calibration_error(predicted: Tensor, happened: Tensor) -> float:
    """Mean of |predicted - observed| over 15 equal bins of the prediction, weighted by their counts; both [m]."""
    bins = (predicted * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64).index_add_(0, bins, predicted - happened.double())
    return float(gaps.abs().sum() / len(predicted))


def survival(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Probability [m, g] that all drafts up to each position are accepted; `logits` float64 [m, g]."""
    return torch.sigmoid(logits / torch.tensor(temperatures, dtype=torch.float64)).cumprod(1)


def survival_errors(logits: Tensor, prefix: Tensor, temperatures: Sequence[float]) -> list[float]:
    """Calibration error of the survival at each position; `prefix` bool [m, g], accepted as far as there."""
    predicted = survival(logits, temperatures)
    return [
        round(expected_calibration_error(predicted[:, k], prefix[:, k]), 4) for k in range(prefix.shape[1])
    ]


def fit_temperatures(logits: Tensor, prefix: Tensor) -> list[float]:
    """Positions from left to right, each the grid's value with the least error, those before it fixed."""
    before = torch.ones(len(logits), dtype=torch.float64)
    chosen: list[float] = []
    for k in range(prefix.shape[1]):
        errors = [
            expected_calibration_error(before * torch.sigmoid(logits[:, k] / t), prefix[:, k]) for t in GRID
        ]
        chosen.append(round(GRID[errors.index(min(errors))], 6))
        before = before * torch.sigmoid(logits[:, k] / chosen[-1])
    return chosen


def is_saturated(temperature: float) -> bool:
    """Whether it lies at an end of the grid, so that the best one may lie beyond."""
    return not GRID[0] * 1.001 < temperature < GRID[-1] / 1.001


def fit(logits: Tensor, prefix: Tensor, dataset: str) -> StsCalibration:
    """The calibration of some records; its errors are those on the fitted records themselves."""
    temperatures = fit_temperatures(logits, prefix)
    return StsCalibration(
        temperatures=tuple(temperatures),
        dataset=dataset,
        num_samples=len(logits),
        ece_before=tuple(survival_errors(logits, prefix, [1.0] * len(temperatures))),
        ece_after=tuple(survival_errors(logits, prefix, temperatures)),
    )
