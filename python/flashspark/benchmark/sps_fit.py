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

from flashspark.speculative import table_fit
from flashspark.speculative.cost_table import SpsAdditiveCostTable, SpsCostTable
from flashspark.speculative.table_fit import pool_adjacent

from .live_server import ProfileError
from .sps_rounds import Round

LEAST_CELLS = 4
# Probes over rows are at least so far apart: close enough for batches of a few rows, far enough that each rise
# rests on several cells. SGLang's fixed bins of 64 rows put every small batch into one.
PROBE_RATIO = 1.2
USUAL_NOISE = 0.03  # relative, of a cell's median: what one machine does twice

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
    """bias + alpha(requests) + theta(rows), both rising, fitted to the cells' medians."""
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in rounds:
        cells[one.batch_size_per_rank, one.num_rows].append(1.0 / one.steps_per_sec)
    shapes = sorted(cells)
    _check_shapes(shapes)
    num_reqs, num_rows = (np.array(column, dtype=np.int64) for column in zip(*shapes, strict=True))
    seconds = np.array([statistics.median(cells[shape]) for shape in shapes])
    return table_fit.fit_additive(num_reqs, num_rows, seconds, USUAL_NOISE, PROBE_RATIO)


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
