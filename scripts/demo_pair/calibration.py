"""How true a confidence head's survival probabilities are, with and without temperatures (STS)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashspark.benchmark.sts_fit import survival, survival_errors

from . import stages, tokens
from .data import Windows
from .decode import Trace

FIT_LENGTHS, FIT_PROMPTS_PER_LENGTH = (48, 96, 160, 224), 56


def fit_prompts(corpus: Path, measured: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts for fitting: windows of held-out files that end where a docstring does, from a fixed seed.

    Those that end like one of the `measured` prompts are left out.
    """
    streams = tokens.load_streams(corpus).streams
    windows = Windows({"heldout": streams["heldout"]}, torch.device("cpu"))
    closing = torch.tensor(stages.docstring_ends(corpus / "tokenizer.json"))
    torch.manual_seed(7)
    drawn = (windows.ending_with("heldout", closing, FIT_PROMPTS_PER_LENGTH, n) for n in FIT_LENGTHS)
    endings = {tuple(ids[-16:]) for ids in measured}
    return [ids for rows in drawn for ids in rows.tolist() if tuple(ids[-16:]) not in endings]


def records(traces: Sequence[Trace]) -> tuple[Tensor, Tensor]:
    """Raw confidence logits [S, g] float64 and prefix mask [S, g] (the first accepted drafts) of all verify steps."""
    logits = torch.tensor([row for t in traces for row in t.confidence], dtype=torch.float64)
    accepted = torch.tensor([a for t in traces for a in t.accepted])
    return logits, torch.arange(logits.shape[1]) < accepted[:, None]


def check(logits: Tensor, prefix: Tensor, temperatures: Sequence[float]) -> dict[str, Any]:
    """Calibration of `records` without STS and with it: error per position, expected and observed acceptance."""
    plain = [1.0] * len(temperatures)
    return {
        "num_records": len(logits),
        "ece_before": survival_errors(logits, prefix, plain),
        "ece_after": survival_errors(logits, prefix, temperatures),
        "expected_before": round(float(survival(logits, plain).sum(1).mean()), 4),
        "expected_after": round(float(survival(logits, temperatures).sum(1).mean()), 4),
        "observed": round(float(prefix.sum(1).double().mean()), 4),
    }


def area_under_curve(scores: Tensor, happened: Tensor) -> float:
    """Probability that an accepted draft scores above a rejected one, ties counting half."""
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[inverse]
    num_yes, num_no = int(happened.sum()), int((~happened).sum())
    if not num_yes or not num_no:
        return float("nan")
    above = float(ranks[happened].sum()) - num_yes * (num_yes + 1) / 2
    return above / (num_yes * num_no)


def ranking(logits: Tensor, prefix: Tensor) -> dict[str, Any]:
    """How well the raw logits tell accepted from rejected drafts, over the drafts whose predecessors were accepted."""
    reached = torch.cat((torch.ones(len(prefix), 1, dtype=torch.bool), prefix[:, :-1]), dim=1)
    areas = [
        area_under_curve(logits[reached[:, k], k], prefix[reached[:, k], k]) for k in range(prefix.shape[1])
    ]
    return {
        "auc": round(area_under_curve(logits[reached], prefix[reached]), 4),
        "auc_by_position": [None if math.isnan(a) else round(a, 4) for a in areas],
    }
