"""Chooses how products are made (`matmul`), by measuring before steps are captured: some seconds for a model.

Some hundred algorithms can do a product, too many to try. Those that won elsewhere are tried (`matmul_seeds`), and
those that the library lists; the best of them run in turns. Large products keep a GPU at its power limit, where its
clock falls by the energy that they take, which a burst of calls is too short to show: there the best run again, each
for long enough, without a break.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

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
# Work before a round, at least so many milliseconds and calls of it: a busy GPU's clock is lower than a resting one's,
# and the host gets ahead of it.
WARM_UP_MS, WARM_UP_CALLS = 1.0, 3

# Products of so many rows are chosen under load, unless the device could end one before the host launches the next.
LOAD_ROWS, LOAD_FLOPS = 512, 1e10
LOAD_SECONDS = 15.0  # for all of them
# Of those that this does not reach, instead of `MARGIN`: under load 7 % gained in a burst has turned into 5 % lost.
BURST_MARGIN = 0.92
# Which ways run, besides PyTorch's choice: so many of the burst's best, if within so much of the quickest. Of 15
# products on an H200, that is within 2 % of the best of 71 to 243 ways under load, of 13 within 1 %.
LOAD_FINALISTS, LOAD_REACH = 5, 1.12
LEAN_REACH = (
    1.01  # an algorithm without workspace takes at most so much longer in a burst than with, to be preferred
)
LOAD_SURVIVAL = 1.03  # within so much of the first round's quickest, to run in the second
BLOCK_MS = 60.0  # of one way; the second half is timed
# Until the clock has settled, from rest and after the host was busy with something else.
HEAT_MS, REHEAT_MS = 300.0, 50.0

PROGRESS_SECONDS = 2.0  # between lines of the log
# Of the largest value, between a way and PyTorch's: what rounding to bfloat16 allows several times.
TOLERANCE = 0.02
CHECKED_ROWS = 64
_NEVER = float("inf")

Measure = Callable[[int, Sequence[Way], int], list[float]]  # (rows, ways, rounds) -> time of each
Group = tuple[Sequence[Tensor], Tensor | None]


@dataclass(frozen=True, eq=False)
class HeavyProduct:
    """One to choose under load."""

    num_rows: int
    flops: float  # of all weights of the shape
    times: Mapping[Way, float]  # ms in the burst of PyTorch's choice, which is first, and the quickest


# (product, ways, ms of work before) -> time of each
LoadMeasure = Callable[[HeavyProduct, Sequence[Way], float], list[float]]


def choose(groups: Sequence[Group], row_counts: Sequence[int]) -> int:
    """Measures how to multiply each of `row_counts` rows with the weights of each group, and remembers it.

    Only a GPU in half precision has a choice. Waits for the device.

    Args:
        groups: weights [in, out] of one shape, and a tensor [rows, out], written over: what comes out has its dtype.
            None: that of what goes in.

    Returns:
        How many products were chosen under load.
    """
    progress = _Progress()
    heavy: dict[HeavyProduct, Bench] = {}
    for weights, scratch in groups:
        usable = [weight for weight in weights if _has_choice(weight)]
        if not usable:
            continue
        bench = Bench(usable, scratch)
        for num_rows in sorted(row_counts):
            flops = 2.0 * num_rows * usable[0].numel()
            is_heavy = num_rows >= LOAD_ROWS and flops >= LOAD_FLOPS
            num_finalists = LOAD_FINALISTS if is_heavy else FINALISTS
            times = burst(num_rows, bench.contestants(num_rows), bench.measure, num_finalists)
            if is_heavy:
                heavy[HeavyProduct(num_rows, flops * len(usable), times)] = bench
            else:
                bench.remember(num_rows, quickest(times, MARGIN))
            progress("matrix products: %d rows × %s", num_rows, tuple(usable[0].shape))

    def measure(product: HeavyProduct, ways: Sequence[Way], heat_ms: float) -> list[float]:
        call_ms = product.times[LIBRARIES[0]]
        return heavy[product].measure_loaded(product.num_rows, ways, call_ms, heat_ms)

    found: dict[HeavyProduct, Way] = {}
    for product, way in under_load(heavy, measure):
        found[product] = way
        progress("matrix products under load: %d of %d", len(found), len(heavy))
    for product, bench in heavy.items():
        way = found[product] if product in found else quickest(product.times, BURST_MARGIN)
        bench.remember(product.num_rows, way)
    return len(found)


def _has_choice(weight: Tensor) -> bool:
    return weight.device.type != "cpu" and weight.dtype != torch.float32 and is_dense(weight)


class _Progress:
    """Logs, now and then."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def __call__(self, message: str, *arguments: object) -> None:
        if time.monotonic() - self._shown >= PROGRESS_SECONDS:
            self._shown = time.monotonic()
            logger.info(message, *arguments)


def burst(
    num_rows: int, contestants: Sequence[Way], measure: Measure, num_finalists: int = FINALISTS
) -> dict[Way, float]:
    """Times of PyTorch's choice, first, and of those that are quickest by a few calls of each."""
    times = measure(num_rows, contestants, 1)
    order = sorted(range(len(contestants)), key=times.__getitem__)[:num_finalists]
    finalists = [LIBRARIES[0], *(contestants[i] for i in order if times[i] < _NEVER)]
    finalists += [way.lean for way in finalists if isinstance(way, Algorithm)]
    finalists = list(dict.fromkeys(finalists))
    found = dict(zip(finalists, measure(num_rows, finalists, NUM_ROUNDS), strict=True))
    return {way: elapsed for way, elapsed in found.items() if elapsed < _NEVER and not _has_lean(way, found)}


def _has_lean(way: Way, times: Mapping[Way, float]) -> bool:
    """Whether the same algorithm without workspace is as quick, so that this one need not run again."""
    if not isinstance(way, Algorithm) or not way.has_workspace:
        return False
    return times.get(way.lean, _NEVER) <= LEAN_REACH * times[way]


def quickest(times: Mapping[Way, float], margin: float) -> Way:
    """The way that takes least; PyTorch's own choice unless that takes less than `margin` of its time."""
    best = min(times, key=times.__getitem__)
    return best if times[best] < margin * times[LIBRARIES[0]] else LIBRARIES[0]


def in_order(products: Iterable[HeavyProduct]) -> list[HeavyProduct]:
    """Those first whose choice matters most: by their work, times how usual so many rows are.

    The largest batch is usual, then batches of round sizes: what counts is the largest power of two in their number.
    """
    products = list(products)
    largest = max((product.num_rows for product in products), default=0)

    def weight(product: HeavyProduct) -> float:
        rows = product.num_rows
        return product.flops * (rows if rows == largest else rows & -rows)

    return sorted(products, key=weight, reverse=True)


def under_load(
    products: Iterable[HeavyProduct], measure: LoadMeasure, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[HeavyProduct, Way]]:
    """The quickest ways on a busy device, product by product in the order of weight, until the time is up.

    In two rounds, the second the other way round: a block begins at the clock that the one before it left.
    """
    begin, heat_ms = clock(), HEAT_MS
    for product in in_order(products):
        if clock() - begin >= LOAD_SECONDS:
            return
        ways = _within(product.times, LOAD_REACH)
        if len(ways) > 1:
            first = dict(zip(ways, measure(product, ways, heat_ms), strict=True))
            ways, heat_ms = _within(first, LOAD_SURVIVAL)[::-1], REHEAT_MS
        if len(ways) > 1:
            second = dict(zip(ways, measure(product, ways, 0.0), strict=True))
            yield product, quickest({way: first[way] + second[way] for way in ways}, MARGIN)
        else:
            yield product, LIBRARIES[0]


def _within(times: Mapping[Way, float], reach: float) -> list[Way]:
    """PyTorch's choice, and who takes at most `reach` times what the quickest takes."""
    limit = reach * min(times.values())
    return [way for way, elapsed in times.items() if way == LIBRARIES[0] or elapsed <= limit]


class Bench:
    """Times products with weights of one shape on their device."""

    def __init__(self, weights: Sequence[Tensor], scratch: Tensor | None) -> None:
        self._weights, self._scratch = weights, scratch
        self._launched: set[Way] = set()
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
        times: list[list[float]] = [[] for _ in ways]
        with self._ready(num_rows) as call:
            self._launch_once(ways, call)
            usual = _timed([LIBRARIES[0]], call, 1)[0]
            num_warm = max(WARM_UP_CALLS, round(WARM_UP_MS / usual))
            for i in range(num_rounds):
                start = i * len(ways) // num_rounds  # the median is without what being the first costs
                in_turns = [*range(start, len(ways)), *range(start)]
                found = _timed([ways[place] for place in in_turns], call, num_warm)
                for place, elapsed in zip(in_turns, found, strict=True):
                    times[place].append(elapsed)
        return [statistics.median(found) for found in times]

    def measure_loaded(
        self, num_rows: int, ways: Sequence[Way], call_ms: float, heat_ms: float
    ) -> list[float]:
        """As `measure`, of one block of each way without a break; all must be able to do it.

        Args:
            call_ms: about what `measure` gives.
            heat_ms: of work with PyTorch's choice before.
        """
        blocks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        num_calls = max(1, round(BLOCK_MS / 2 / call_ms))
        with self._ready(num_rows) as call:
            for _ in range(round(heat_ms / call_ms)):
                call(LIBRARIES[0])
            for way in ways:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for event in (begin, end):
                    for _ in range(num_calls):
                        call(way)
                    event.record()
                blocks.append((begin, end))
            torch.cuda.synchronize()
        return [begin.elapsed_time(end) / num_calls for begin, end in blocks]

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

    @contextmanager
    def _ready(self, num_rows: int) -> Iterator[Callable[[Way], None]]:
        """What multiplies in a way, as `measure` times it."""
        weights = self._weights[:CALLS]
        x, out = self._operands(num_rows)
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

            yield call

    def _launch_once(self, ways: Sequence[Way], call: Callable[[Way], None]) -> None:
        """A kernel's first launch loads it, while the device waits."""
        for way in ways:
            if way not in self._launched:
                self._launched.add(way)
                with suppress(CublasLtError):
                    call(way)

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
