"""From measured step times to the tables that the planner prices with: pure functions over plain arrays.

The model is SGLang's additive one, bias + alpha(requests) + theta(rows). Both terms are fitted as sums of rises
between probes, none of them negative: more requests or more rows are never cheaper, whatever noise says, and a table
that fell somewhere would make the planner verify more rows in order to save time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cost_table import PlainStepCosts, SpsAdditiveCostTable

PROBE_RATIO = (
    1.4  # neighbouring row probes are at least so far apart, so that each rise rests on several samples
)
LEAST_BIAS_SECONDS = 1e-6


@dataclass(frozen=True)
class StepSample:
    """What one shape of step took, all its repetitions."""

    num_reqs: int
    num_rows: int  # that the target ran, padding included
    has_draft: bool
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """The figure that is fitted."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class FittedTables:
    """The tables and how well they describe what they were fitted to."""

    table: SpsAdditiveCostTable
    plain: PlainStepCosts | None  # None: no step without a draft was measured
    worst_error: float  # relative, of the drafted samples
    mean_error: float


def fit_tables(samples: Sequence[StepSample], max_reqs: int, max_rows: int) -> FittedTables:
    """Fits both tables and extends them to the largest step, at the slope of their last piece.

    Args:
        samples: at least one with a draft.
    """
    drafted = [sample for sample in samples if sample.has_draft]
    reqs, rows, seconds = _columns(drafted)
    table = fit_additive(reqs, rows, seconds)
    error = np.abs(predict_additive(table, reqs, rows) / seconds - 1.0)
    bs_probes, alpha = extended(table.bs_probes, table.alpha_seconds, max_reqs)
    m_probes, theta = extended(table.m_probes, table.theta_seconds, max_rows)
    table = SpsAdditiveCostTable(table.bias_seconds, bs_probes, alpha, m_probes, theta)
    plain = fit_plain([sample for sample in samples if not sample.has_draft], max_reqs)
    return FittedTables(table, plain, float(error.max()), float(error.mean()))


def fit_additive(
    num_reqs: NDArray[np.int64], num_rows: NDArray[np.int64], seconds: NDArray[np.float64]
) -> SpsAdditiveCostTable:
    """Least squares in relative error, so that a single request counts as much as a full batch."""
    bs_probes, m_probes = sorted(set(num_reqs.tolist())), sparse_probes(num_rows)
    columns = np.hstack((np.ones((len(seconds), 1)), rises(bs_probes, num_reqs), rises(m_probes, num_rows)))
    found = nonnegative_least_squares(columns / seconds[:, None], np.ones(len(seconds)))
    alpha = np.concatenate(([0.0], found[1 : len(bs_probes)].cumsum()))
    theta = np.concatenate(([0.0], found[len(bs_probes) :].cumsum()))
    return SpsAdditiveCostTable(
        bias_seconds=max(float(found[0]), LEAST_BIAS_SECONDS),
        bs_probes=tuple(bs_probes),
        alpha_seconds=tuple(alpha.tolist()),
        m_probes=tuple(m_probes),
        theta_seconds=tuple(theta.tolist()),
    )


def fit_plain(samples: Sequence[StepSample], max_reqs: int) -> PlainStepCosts | None:
    """Draft-free steps by batch size, never falling; None without samples."""
    if not samples:
        return None
    by_reqs = {sample.num_reqs: sample.median_seconds for sample in samples}
    probes = tuple(sorted(by_reqs))
    rising = np.maximum.accumulate([by_reqs[num_reqs] for num_reqs in probes]).tolist()
    return PlainStepCosts(*extended(probes, rising, max_reqs))


def predict_additive(
    table: SpsAdditiveCostTable, num_reqs: NDArray[np.int64], num_rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Seconds of many shapes at once."""
    return np.array(
        [float(table.step_seconds(n, np.array([m]))[0]) for n, m in zip(num_reqs, num_rows, strict=True)]
    )


def rises(probes: Sequence[int], at: NDArray[np.int64]) -> NDArray[np.float64]:
    """[len(at), len(probes) - 1]: how much of the rise between each two probes a value has behind it, 0 … 1."""
    left, right = np.array(probes[:-1], dtype=np.float64), np.array(probes[1:], dtype=np.float64)
    return np.clip((at[:, None] - left) / (right - left), 0.0, 1.0)


def sparse_probes(num_rows: NDArray[np.int64]) -> list[int]:
    """Of the row counts that occur, the first, the last, and some at least `PROBE_RATIO` apart."""
    counts = sorted(set(num_rows.tolist()))
    kept = counts[:1]
    for count in counts[1:-1]:
        if count >= kept[-1] * PROBE_RATIO and count * PROBE_RATIO <= counts[-1]:
            kept.append(count)
    return kept + counts[-1:] if counts[-1] > kept[-1] else kept


def extended(
    probes: Sequence[int], seconds: Sequence[float], last: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The axis with one more probe at `last`, on the line through its last two. A single probe stays a constant.

    A table is constant beyond its last probe, and rows that cost nothing more would never be trimmed.
    """
    if len(probes) < 2 or probes[-1] >= last:
        return tuple(probes), tuple(seconds)
    slope = (seconds[-1] - seconds[-2]) / (probes[-1] - probes[-2])
    return (*probes, last), (*seconds, seconds[-1] + slope * (last - probes[-1]))


def nonnegative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin |a x - b| over x ≥ 0, by Lawson and Hanson's active sets. `a` [rows, unknowns], small."""
    num_unknowns = a.shape[1]
    x = np.zeros(num_unknowns)
    free = np.zeros(num_unknowns, dtype=np.bool_)
    tolerance = 1e-9 * float(np.abs(a).sum())
    for _ in range(3 * num_unknowns):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while free.any():
            candidate = np.zeros(num_unknowns)
            candidate[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            blocked = free & (candidate <= 0)
            if not blocked.any():
                x = candidate
                break
            # As far towards the candidate as nothing turns negative; who reaches zero is held there.
            step = float((x[blocked] / np.maximum(x[blocked] - candidate[blocked], 1e-300)).min())
            x = x + step * (candidate - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return x


def _columns(
    samples: Sequence[StepSample],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    return (
        np.array([sample.num_reqs for sample in samples], dtype=np.int64),
        np.array([sample.num_rows for sample in samples], dtype=np.int64),
        np.array([sample.median_seconds for sample in samples], dtype=np.float64),
    )
