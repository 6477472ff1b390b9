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
# How far a price bends at a probe, as a share of the step, before a bend is less likely than a disturbed sample.
USUAL_BEND = 0.03


@dataclass(frozen=True)
class StepSample:
    """What one shape of step took, all its repetitions."""

    num_reqs: int
    num_rows: int  # that the target ran, padding included
    has_draft: bool
    seconds: tuple[float, ...]

    @property
    def typical_seconds(self) -> float:
        """The figure that is fitted: the lower quartile. Whatever disturbs a step makes it longer, never shorter."""
        ordered = sorted(self.seconds)
        return ordered[(len(ordered) - 1) // 4]

    @property
    def noise(self) -> float:
        """Relative spread of the repetitions about `typical_seconds`; 0 where there is one."""
        return statistics.median(abs(s / self.typical_seconds - 1.0) for s in self.seconds)


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
    table = fit_additive(reqs, rows, seconds, statistics.median(sample.noise for sample in drafted))
    error = np.abs(predict_additive(table, reqs, rows) / seconds - 1.0)
    bs_probes, alpha = extended(table.bs_probes, table.alpha_seconds, max_reqs)
    m_probes, theta = extended(table.m_probes, table.theta_seconds, max_rows)
    table = SpsAdditiveCostTable(table.bias_seconds, bs_probes, alpha, m_probes, theta)
    plain = fit_plain([sample for sample in samples if not sample.has_draft], max_reqs)
    return FittedTables(table, plain, float(error.max()), float(error.mean()))


def fit_additive(
    num_reqs: NDArray[np.int64],
    num_rows: NDArray[np.int64],
    seconds: NDArray[np.float64],
    noise: float = 0.0,
    probe_ratio: float = PROBE_RATIO,
) -> SpsAdditiveCostTable:
    """Least squares in relative error, so that a single request counts as much as a full batch.

    Args:
        num_reqs, num_rows, seconds: [N], the shapes and what a step of each takes.
        noise: relative, of `seconds`. The noisier they are, the straighter the table: without it every disturbed
            sample becomes a stair, and the planner stops in front of stairs.
        probe_ratio: of neighbouring row probes.
    """
    bs_probes, m_probes = sorted(set(num_reqs.tolist())), sparse_probes(num_rows, probe_ratio)
    columns = np.hstack((np.ones((len(seconds), 1)), rises(bs_probes, num_reqs), rises(m_probes, num_rows)))
    bends = np.zeros((0, columns.shape[1]))
    for probes, at, first in ((bs_probes, num_reqs, 1), (m_probes, num_rows, len(bs_probes))):
        bends = np.vstack((bends, _bends(probes, at, seconds, first, columns.shape[1])))
    matrix = np.vstack((columns / seconds[:, None], bends * (noise / USUAL_BEND)))
    found = nonnegative_least_squares(matrix, np.concatenate((np.ones(len(seconds)), np.zeros(len(bends)))))
    alpha = np.concatenate(([0.0], found[1 : len(bs_probes)].cumsum()))
    theta = np.concatenate(([0.0], found[len(bs_probes) :].cumsum()))
    return SpsAdditiveCostTable(
        bias_seconds=max(float(found[0]), LEAST_BIAS_SECONDS),
        bs_probes=tuple(bs_probes),
        alpha_seconds=tuple(alpha.tolist()),
        m_probes=tuple(m_probes),
        theta_seconds=tuple(theta.tolist()),
    )


def _bends(
    probes: Sequence[int],
    at: NDArray[np.int64],
    seconds: NDArray[np.float64],
    first_column: int,
    num_columns: int,
) -> NDArray[np.float64]:
    """One row per inner probe: how far the price leaves the line of the piece before it, over the next piece, as a
    share of what a step there takes."""
    widths = np.diff(probes)
    matrix = np.zeros((max(len(widths) - 1, 0), num_columns))
    for i, row in enumerate(matrix):
        near = seconds[(at >= probes[i]) & (at <= probes[i + 2])]
        row[first_column + i] = -widths[i + 1] / widths[i]
        row[first_column + i + 1] = 1.0
        row /= float(np.median(near))
    return matrix


def fit_plain(samples: Sequence[StepSample], max_reqs: int) -> PlainStepCosts | None:
    """Draft-free steps by batch size; where they fall, neighbours share their mean. None without samples."""
    if not samples:
        return None
    by_reqs = {sample.num_reqs: sample.typical_seconds for sample in samples}
    probes = tuple(sorted(by_reqs))
    rising = pool_adjacent([by_reqs[num_reqs] for num_reqs in probes], [1.0] * len(probes))
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


def pool_adjacent(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values`."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, total, length = blocks.pop()
            both = total + block[1]
            block = ((mean * total + block[0] * block[1]) / both, both, length + block[2])
        blocks.append(block)
    return [mean for mean, _, length in blocks for _ in range(length)]


def sparse_probes(num_rows: NDArray[np.int64], ratio: float = PROBE_RATIO) -> list[int]:
    """Of the row counts that occur, the first, the last, and some at least `ratio` apart."""
    counts = sorted(set(num_rows.tolist()))
    kept = counts[:1]
    for count in counts[1:-1]:
        if count >= kept[-1] * ratio and count * ratio <= counts[-1]:
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


def nonnegative_least_squares(
    matrix: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """x ≥ 0 with the least |matrix x - target| (Lawson and Hanson, "Solving Least Squares Problems", chapter 23)."""
    num_columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    solution, free = np.zeros(num_columns), np.zeros(num_columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ target).max()))
    for _ in range(3 * num_columns):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[free] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= tolerance:
            break
        free[entering] = True
        while True:
            trial = np.zeros(num_columns)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                solution = trial
                break
            steps = solution[negative] / (solution[negative] - trial[negative])
            solution = np.maximum(solution + steps.min() * (trial - solution), 0.0)
            leaving = negative & (solution <= 1e-14)
            leaving[np.flatnonzero(negative)[steps.argmin()]] = True
            free &= ~leaving
            solution[~free] = 0.0
    return solution / scale


def _columns(
    samples: Sequence[StepSample],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    return (
        np.array([sample.num_reqs for sample in samples], dtype=np.int64),
        np.array([sample.num_rows for sample in samples], dtype=np.int64),
        np.array([sample.typical_seconds for sample in samples], dtype=np.float64),
    )
