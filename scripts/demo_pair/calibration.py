"""How true a confidence head's survival probabilities are, and the temperatures (STS) that make them truer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .decode import Trace

NUM_BINS = 15
GRID = torch.logspace(-1, 1, 41, dtype=torch.float64).tolist()


def records(traces: Sequence[Trace]) -> tuple[Tensor, Tensor]:
    """Raw confidence logits [S, g] float64 and prefix mask [S, g] (the first accepted drafts) of all verify steps."""
    logits = torch.tensor([row for t in traces for row in t.confidence], dtype=torch.float64)
    accepted = torch.tensor([a for t in traces for a in t.accepted])
    return logits, torch.arange(logits.shape[1]) < accepted[:, None]


def expected_calibration_error(predicted: Tensor, happened: Tensor) -> float:
    """Mean of |predicted - observed| over 15 equal bins of the prediction, weighted by their counts."""
    bins = (predicted * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64).index_add_(0, bins, predicted - happened.double())
    return float(gaps.abs().sum() / len(predicted))


def survival(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Probability [S, g] that all drafts up to each position are accepted."""
    return torch.sigmoid(logits / torch.tensor(temperatures, dtype=torch.float64)).cumprod(1)


def survival_errors(logits: Tensor, prefix: Tensor, temperatures: Sequence[float]) -> list[float]:
    """Calibration error of the survival at each position."""
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


def area_under_curve(scores: Tensor, happened: Tensor) -> float:
    """Probability that an accepted draft scores above a rejected one, ties counting half."""
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[inverse]
    num_yes, num_no = int(happened.sum()), int((~happened).sum())
    if not num_yes or not num_no:
        return float("nan")
    above = float(ranks[happened].sum()) - num_yes * (num_yes + 1) / 2
    return above / (num_yes * num_no)


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    """The head without STS: calibration error, AUC over the drafts that were reached, expected and seen acceptance."""
    logits, prefix = records(traces)
    reached = torch.cat((torch.ones(len(prefix), 1, dtype=torch.bool), prefix[:, :-1]), dim=1)
    areas = [
        area_under_curve(logits[reached[:, k], k], prefix[reached[:, k], k]) for k in range(prefix.shape[1])
    ]
    return {
        "num_records": len(logits),
        "auc": round(area_under_curve(logits[reached], prefix[reached]), 4),
        "auc_by_position": [None if math.isnan(a) else round(a, 4) for a in areas],
        "expected_accepted": round(float(survival(logits, [1.0] * logits.shape[1]).sum(1).mean()), 4),
        "observed_accepted": round(float(prefix.sum(1).double().mean()), 4),
    }
