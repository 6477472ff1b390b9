"""From measured cells to a cost table: pure functions over rounds.

What more rows or more requests cost is never negative here. A table that falls somewhere, because one cell was
disturbed, would make the planner verify more in order to save time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashspark.speculative.cost_table import SpsAdditiveCostTable, SpsCostTable

from .live_server import ProfileError
from .sps_rounds import Round

LEAST_CELLS = 4
# Probes over rows are at least so far apart: close enough for batches of a few rows, far enough that each rise
# rests on several cells. SGLang's fixed bins of 64 rows put every small batch into one.
PROBE_RATIO = 1.2
LEAST_BIAS_SECONDS = 1e-6

Table = SpsCostTable | SpsAdditiveCostTable


@dataclass(frozen=True)
class FitError:
    """How far the table is from a measured cell."""

    batch_size: int
    num_rows: int
    measured_seconds: float
    predicted_seconds: float

    @property
    def relative(self) -> float:
        """Of the measured time."""
        return self.predicted_seconds / self.measured_seconds - 1.0


def fit_table(rounds: Sequence[Round], max_batch_tokens: int | None = None) -> Table:
    """The 2-D table where fractions were pinned, else the 1-D one.

    Raises:
        ProfileError: the cells do not determine a table.
    """
    pinned = {one.frac is not None for one in rounds}
    if len(pinned) > 1:
        raise ProfileError("rounds with and without --fracs are mixed: give each kind its own --out")
    return fit_additive(rounds) if pinned.pop() else fit_diagonal(rounds, max_batch_tokens)


def fit_diagonal(rounds: Sequence[Round], max_batch_tokens: int | None = None) -> SpsCostTable:
    """Median steps per second by rows; where they rise with the rows, neighbours share their mean."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        by_rows[one.batch_tokens].append(one.steps_per_sec)
    probes = sorted(by_rows)
    if len(probes) < 2:
        raise ProfileError(
            f"one row count ({probes[0]}) says nothing about what rows cost: measure two or more --batch-size"
        )
    seconds = [statistics.median(1.0 / rate for rate in by_rows[probe]) for probe in probes]
    rising = pool_adjacent(seconds, [len(by_rows[probe]) for probe in probes])
    most = probes[-1] if max_batch_tokens is None else max_batch_tokens
    if most < probes[-1]:
        raise ProfileError(f"--max-batch-tokens {most} is below the largest measured step, {probes[-1]} rows")
    return SpsCostTable(tuple(probes), tuple(1.0 / value for value in rising), most)


def fit_additive(rounds: Sequence[Round]) -> SpsAdditiveCostTable:
    """Least squares in relative error of bias + alpha(requests) + theta(rows), both rising."""
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in rounds:
        cells[one.batch_size_per_rank, one.num_rows].append(1.0 / one.steps_per_sec)
    shapes = sorted(cells)
    _check_shapes(shapes)
    num_reqs = np.array([shape[0] for shape in shapes], dtype=np.float64)
    num_rows = np.array([shape[1] for shape in shapes], dtype=np.float64)
    seconds = np.array([statistics.median(cells[shape]) for shape in shapes])
    bs_probes, m_probes = (
        sorted({shape[0] for shape in shapes}),
        sparse_probes([shape[1] for shape in shapes]),
    )
    columns = np.hstack(
        (np.ones((len(shapes), 1)), rise_columns(bs_probes, num_reqs), rise_columns(m_probes, num_rows))
    )
    rises = nonnegative_least_squares(columns / seconds[:, None], np.ones(len(shapes)))
    alpha = np.concatenate(([0.0], rises[1 : len(bs_probes)].cumsum()))
    theta = np.concatenate(([0.0], rises[len(bs_probes) :].cumsum()))
    return SpsAdditiveCostTable(
        bias_seconds=max(float(rises[0]), LEAST_BIAS_SECONDS),
        bs_probes=tuple(bs_probes),
        alpha_seconds=tuple(alpha.tolist()),
        m_probes=tuple(m_probes),
        theta_seconds=tuple(theta.tolist()),
    )


def _check_shapes(shapes: Sequence[tuple[int, int]]) -> None:
    if len(shapes) < LEAST_CELLS:
        raise ProfileError(
            f"{len(shapes)} different cells, {LEAST_CELLS} are needed: more --batch-size or --fracs"
        )
    rows_of: dict[int, set[int]] = defaultdict(set)
    for batch_size, num_rows in shapes:
        rows_of[batch_size].add(num_rows)
    if all(len(rows) == 1 for rows in rows_of.values()):
        raise ProfileError(
            "every batch size ran one number of rows at all fractions, so that requests and rows cannot be told "
            "apart: cap-accept runs full blocks whatever is pinned, profile in compact; or give more --fracs"
        )


def sparse_probes(num_rows: Sequence[int]) -> list[int]:
    """Of the row counts that occur: the first, the last, and some between that are far enough apart."""
    counts = sorted(set(num_rows))
    kept = counts[:1]
    for count in counts[1:-1]:
        if count >= kept[-1] * PROBE_RATIO and count * PROBE_RATIO <= counts[-1]:
            kept.append(count)
    return kept + counts[-1:] if counts[-1] > kept[-1] else kept


def rise_columns(probes: Sequence[int], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """[len(at), len(probes) - 1]: the share of each rise between two probes that lies below a value, 0 … 1."""
    edges = np.array(probes, dtype=np.float64)
    return np.clip((at[:, None] - edges[:-1]) / np.diff(edges), 0.0, 1.0)


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


def fit_errors(table: Table, rounds: Sequence[Round]) -> list[FitError]:
    """What the table says of every cell, against the median over its repeats."""
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in rounds:
        num_rows = one.batch_tokens if isinstance(table, SpsCostTable) else one.num_rows
        cells[one.batch_size_per_rank, num_rows].append(1.0 / one.steps_per_sec)
    return [
        FitError(
            batch_size=batch_size,
            num_rows=num_rows,
            measured_seconds=statistics.median(seconds),
            predicted_seconds=float(table.step_seconds(batch_size, np.array([num_rows]))[0]),
        )
        for (batch_size, num_rows), seconds in sorted(cells.items())
    ]
