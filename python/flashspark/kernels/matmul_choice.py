"""Chooses how products are made (`matmul`), by measuring before steps are captured: some seconds for a model.

Some hundred algorithms can do a product, too many to try. Those that won elsewhere are tried (`matmul_seeds`), and
those that the library lists; the best of them run in turns, so that the GPU's clock, which falls with the work, favours
none.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from .cublaslt import Algorithm, CublasLtError, Product, is_available, is_dense
from .matmul import LIBRARIES, Way, multiply, remember
from .matmul_seeds import configurations

logger = logging.getLogger(__name__)

FINALISTS = 4
NUM_ROUNDS = 3  # of the final
MARGIN = 0.99  # of the time of PyTorch's choice, which another one has to beat
CALLS = 3  # of a measurement
# Milliseconds of work before a round: a busy GPU's clock is lower than a resting one's, and the host gets ahead of it.
WARM_UP_MS = 1.0
TOLERANCE = (
    0.02  # of the largest value, between a way and PyTorch's: what rounding to bfloat16 allows several times
)
CHECKED_ROWS = 64
_NEVER = float("inf")

Measure = Callable[[int, Sequence[Way], int], list[float]]  # (rows, ways, rounds) -> time of each


def choose(
    groups: Sequence[Sequence[Tensor]], row_counts: Sequence[int], scratch: Tensor | None = None
) -> None:
    """Measures how to multiply each of `row_counts` rows with the weights of each group, and remembers it.

    Only a GPU in half precision has a choice. Waits for the device.

    Args:
        groups: weights [in, out] of one shape each.
        scratch: [rows, out], written over; what comes out has its dtype. None: that of what goes in.
    """
    found = ([weight for weight in weights if _has_choice(weight)] for weights in groups)
    for bench in [Bench(weights, scratch) for weights in found if weights]:
        for num_rows in sorted(row_counts):
            bench.remember(num_rows, tournament(num_rows, bench.contestants(num_rows), bench.measure))


def _has_choice(weight: Tensor) -> bool:
    return weight.device.type != "cpu" and weight.dtype != torch.float32 and is_dense(weight)


def tournament(num_rows: int, contestants: Sequence[Way], measure: Measure) -> Way:
    """The quickest way for `num_rows` rows; PyTorch's own choice unless another one is clearly better."""
    finalists = _best(contestants, measure(num_rows, contestants, 1))
    finalists = list(dict.fromkeys([LIBRARIES[0], *finalists]))
    times = measure(num_rows, finalists, NUM_ROUNDS)
    usual, best = times[0], min(times)
    return finalists[times.index(best)] if best < MARGIN * usual else LIBRARIES[0]


def _best(ways: Sequence[Way], times: Sequence[float]) -> list[Way]:
    order = sorted(range(len(ways)), key=times.__getitem__)
    return [ways[i] for i in order[:FINALISTS] if times[i] < _NEVER]


class Bench:
    """Times products with weights of one shape on their device."""

    def __init__(self, weights: Sequence[Tensor], scratch: Tensor | None) -> None:
        self._weights, self._scratch = weights, scratch
        self._out_dtype = out_dtype = weights[0].dtype if scratch is None else scratch.dtype
        seeds = (
            Algorithm.configured(found, weights[0].dtype, out_dtype)
            for found in configurations(out_dtype == torch.float32)
        )
        self._seeds = [algorithm for algorithm in seeds if algorithm is not None]

    def contestants(self, num_rows: int) -> list[Way]:
        """What to try for a number of rows."""
        if not is_available():
            return list(LIBRARIES)
        x, out = self._operands(num_rows)
        with Product(x, self._weights[0], out) as product:
            listed = product.algorithms()
        return list(dict.fromkeys([*LIBRARIES, *self._seeds, *listed]))

    def measure(self, num_rows: int, ways: Sequence[Way], num_rounds: int) -> list[float]:
        """Milliseconds of a product in each way, the median of the rounds; infinite where it cannot be done so.

        Each call is over another weight where there are several: no cache holds them all.
        """
        weights = self._weights[:CALLS]
        x, out = self._operands(num_rows)
        times: list[list[float]] = [[] for _ in ways]
        with ExitStack() as stack:
            products = (
                [stack.enter_context(Product(x, weight, out)) for weight in weights] if is_available() else []
            )

            def call(way: Way) -> None:
                for i, weight in enumerate(weights):
                    if isinstance(way, Algorithm):
                        products[i].multiply(way)
                    else:
                        multiply(x, weight, out, way)

            usual = _timed([LIBRARIES[0]], call, 1)[0]
            num_warm = max(1, round(WARM_UP_MS / usual))
            for i in range(num_rounds):
                in_turns = range(len(ways))[:: -1 if i % 2 else 1]
                found = _timed([ways[place] for place in in_turns], call, num_warm)
                for place, elapsed in zip(in_turns, found, strict=True):
                    times[place].append(elapsed)
        return [statistics.median(found) for found in times]

    def remember(self, num_rows: int, way: Way) -> None:
        """Products of so many rows are made this way from now on, if it multiplies as PyTorch's choice does."""
        x, out = self._operands(num_rows)
        weight = self._weights[0]
        some_rows = slice(None, None, max(1, num_rows // CHECKED_ROWS))
        usual = multiply(x, weight, out, LIBRARIES[0])[some_rows].clone()
        out.fill_(float("nan"))
        error = (multiply(x, weight, out, way)[some_rows] - usual).abs().max()
        if not bool(error <= TOLERANCE * usual.abs().max()):
            logger.warning("%d × %s by %s comes out wrong: not used", num_rows, tuple(weight.shape), way)
            way = LIBRARIES[0]
        remember((num_rows, *weight.shape, self._out_dtype), way)

    def _operands(self, num_rows: int) -> tuple[Tensor, Tensor]:
        weight = self._weights[0]
        x = torch.randn(num_rows, weight.shape[0], dtype=weight.dtype, device=weight.device)
        out = x.new_empty(num_rows, weight.shape[1]) if self._scratch is None else self._scratch[:num_rows]
        return x, out


def _timed(ways: Sequence[Way], call: Callable[[Way], None], num_warm: int) -> list[float]:
    """Milliseconds of a call of each way, after `num_warm` calls of PyTorch's; infinite where it cannot be done so."""
    for _ in range(num_warm):
        call(LIBRARIES[0])
    borders: list[tuple[torch.cuda.Event, torch.cuda.Event] | None] = []
    for way in ways:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            call(way)
        except CublasLtError:
            borders.append(None)
            continue
        end.record()
        borders.append((begin, end))
    torch.cuda.synchronize()
    return [_NEVER if border is None else border[0].elapsed_time(border[1]) for border in borders]
