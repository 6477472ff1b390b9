"""Measures what steps cost, with the worker's own steps over synthetic requests, before the first real one comes.

The requests live in rows and pages that nobody owns yet; sampling state, estimator and relay are those of a second
worker over the same runner, so that the serving one knows nothing of it. Rows and K/V are put back as they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import msgspec
import numpy as np
import torch

from flashspark.engine.model_runner import ModelRunner
from flashspark.upload import upload

from .adaptive import AdaptiveVerifier, VerifyMode
from .confidence import ConfidenceSource
from .cost_table import PlainStepCosts
from .drafter import Drafter
from .planner import Plan, VerifyBudget, VerifyPlanner
from .planner_input import PlannerSettings
from .sampling import RowSampling, SamplingRows
from .step_graphs import StepGraphs
from .table_fit import FittedTables, StepSample, fit_plain, fit_tables
from .tiers import TierGrid
from .types import StepBatch
from .worker import SpeculativeWorker

logger = logging.getLogger(__name__)

CONTEXT_TOKENS = (
    256  # committed tokens of a synthetic request; longer ones make attention dearer for every plan alike
)
BUDGET_SECONDS = 10.0
PLAIN_BUDGET_SECONDS = 2.0  # where only draft-free steps are measured
MAX_ROUNDS = 15
NUM_WARM_UP_SHAPES = 4
STEPS_IN_A_ROW = 4  # where they are captured
BUDGET_SHARES = (0.0, 0.25, 0.5, 1.0)  # of the drafts of a batch
FEWER_BUDGET_SHARES = (0.0, 0.5, 1.0)
LARGE_BATCH = 16  # from here on a step costs much, and rows lie far apart anyway
NUM_ALWAYS = 3  # corners: the smallest batch's
CORNER_TIME = 4.0  # times the budget


@dataclass(frozen=True)
class Shape:
    """A step to time: requests, and drafts verified among them. None: a step without a draft."""

    num_reqs: int
    budget: int | None

    @property
    def num_rows(self) -> int:
        """Rows before padding."""
        return self.num_reqs + (self.budget or 0)


def shapes_to_measure(max_reqs: int, gamma: int) -> list[Shape]:
    """Batch sizes from 1 to `max_reqs` with a few budgets and without a draft, the cheapest first.

    Doubling sizes, and while they are small those between too: matrix products like powers of two, and a table made
    of these alone promised batches of 3 and 6 some 15 % too little.
    """
    doubling = {1 << i for i in range(max_reqs.bit_length())}
    between = {size for size in (3, 6, 12) if size < max_reqs}
    shapes = set()
    for num_reqs in doubling | between | {max_reqs}:
        is_fine = num_reqs in doubling and num_reqs < LARGE_BATCH
        shares = BUDGET_SHARES if is_fine else FEWER_BUDGET_SHARES
        shapes |= {Shape(num_reqs, int(share * num_reqs * gamma)) for share in shares}
        shapes.add(Shape(num_reqs, None))
    return sorted(shapes, key=lambda shape: (shape.num_rows, shape.num_reqs, shape.budget is not None))


class StepTimer:
    """Real steps of synthetic requests. A context manager: it must be left before anybody is served."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        source: ConfidenceSource,
        grid: TierGrid,
        max_reqs: int,
        context_length: int,
        clock: Callable[[], float] = time.perf_counter,
        graphs: StepGraphs | None = None,
    ) -> None:
        """
        Args:
            source: of confidence, which the synthetic requests may teach: not the one that serves.
            context_length: of the server; each request needs a block's room in it.
            graphs: the serving worker's captured steps, if it has any. Steps are then timed as they run one after the
                other, without the host between them; its state of rows that nobody owns yet is written over.
        """
        width = drafter.gamma + 1
        self._num_steps = 1 if graphs is None else STEPS_IN_A_ROW
        num_runs = 1 if graphs is None else self._num_steps + 1
        self._context_len = min(CONTEXT_TOKENS, context_length - num_runs * width)
        if self._context_len < 1:
            raise ValueError(f"a context of {context_length} tokens has no room for a block of {width}")
        sampling = SamplingRows(max_reqs, runner.target.config.vocab_size, runner.device)
        planner = VerifyPlanner(PlannerSettings(drafter.gamma), None, grid)
        adaptive = AdaptiveVerifier(VerifyMode.COMPACT, planner, source, max_reqs, runner.device)
        self._worker = SpeculativeWorker(runner, sampling, drafter, adaptive)
        self._worker.graphs = graphs
        # Half of the requests sample: neither kind's costs alone would be right for both. A GPU judges them outside of
        # the graphs, while the next step is not queued yet, so that its times would be the host's.
        self._hottest = 1.0 if graphs is None else 0.0
        self._planner, self._adaptive, self._grid = planner, adaptive, grid
        self._runner, self._max_reqs, self._clock = runner, max_reqs, clock
        rows = runner.request_rows
        self._kept = (rows.context_lens.clone(), rows.anchors.clone(), rows.page_table.clone())
        self._num_pages = runner.target_pool.num_slots // rows.page_size - 1
        self._pages_per_req = -(-(self._context_len + num_runs * width) // rows.page_size)

    def __enter__(self) -> StepTimer:
        rows = self._runner.request_rows
        per_req = self._pages_per_req
        for row in range(self._max_reqs):
            # Page 0 is scratch. In a pool too small for all of them, requests share pages: what is in them is
            # nonsense anyway, and reading it takes as long.
            rows.set_pages(row, [1 + (row * per_req + i) % self._num_pages for i in range(per_req)])
            params = RowSampling(seed=row, temperature=row % 2 * self._hottest)
            self._worker.assign(row, params, [0], [], 0, speculates=True)
        self._clear_pages()  # a page's first touch costs more than a step: not on the clock
        self._anchors = torch.arange(self._max_reqs, device=self._runner.device)
        self._anchors %= self._runner.target.config.vocab_size
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rows = self._runner.request_rows
        for row in range(self._max_reqs):
            self._worker.release(row)
        for tensor, kept in zip((rows.context_lens, rows.anchors, rows.page_table), self._kept, strict=True):
            tensor.copy_(kept)
        self._clear_pages()

    def _clear_pages(self) -> None:
        """K/V of the pages in use, as it was made. The rest is never touched, and need not become resident."""
        num_pages = 1 + min(self._max_reqs * self._pages_per_req, self._num_pages)
        num_slots = num_pages * self._runner.request_rows.page_size
        for pool in (self._runner.target_pool, self._runner.draft_pool):
            for cache in [] if pool is None else [*pool.k, *pool.v]:
                cache[:num_slots].zero_()

    def run(self, shape: Shape) -> tuple[int, float]:
        """One step: the rows the target ran, and seconds from the plan to the tokens on the host."""
        rows, row_list = self._runner.request_rows, list(range(shape.num_reqs))
        rows.context_lens[: self._max_reqs].fill_(self._context_len)
        rows.anchors[: self._max_reqs].copy_(self._anchors)
        caps = [self._worker.width] * shape.num_reqs
        device = self._runner.device
        batch = StepBatch(upload(row_list, device), row_list, upload(caps, device), caps)
        batch = replace(batch, plan=self._plan(shape, caps))
        if self._num_steps > 1:
            self._worker.decode(batch).tokens.tolist()  # the host starts out ahead of an idle device
        started = self._clock()
        for _ in range(self._num_steps):
            accepted = self._worker.decode(batch)
        accepted.tokens.tolist()
        accepted.num_tokens.tolist()
        accepted.verify_lens.tolist()
        return accepted.num_rows_run, (self._clock() - started) / self._num_steps

    def _plan(self, shape: Shape, caps: list[int]) -> Plan:
        num_drafts = shape.num_reqs * (self._worker.width - 1)
        # Any fraction that comes out as the budget; of 0 drafts too, which no fraction names.
        self._planner.pin(min(((shape.budget or 0) + 0.5) / num_drafts, 1.0))
        nobody = [False] * shape.num_reqs
        plan = self._adaptive.plan(list(range(shape.num_reqs)), caps, nobody, [0] * shape.num_reqs)
        if shape.budget is not None:
            assert plan.verify.budget == shape.budget, (shape, plan.verify)
            return plan
        anchors = np.ones(shape.num_reqs, dtype=np.int64)
        verify = VerifyBudget(0, True, shape.num_reqs, self._grid.plain_key(shape.num_reqs))
        return msgspec.structs.replace(plan, verify=verify, draft=False, floors=anchors, caps=anchors)


@dataclass(frozen=True)
class Measurement:
    """What was timed, and what was not."""

    samples: list[StepSample]
    num_left_out: int  # shapes
    num_rounds: int  # complete ones


def measure_steps(
    run: Callable[[Shape], tuple[int, float]],
    shapes: Sequence[Shape],
    budget_seconds: float = BUDGET_SECONDS,
    max_rounds: int = MAX_ROUNDS,
    clock: Callable[[], float] = time.monotonic,
) -> Measurement:
    """Times the shapes in rounds, so that a slow second of the machine hits all of them, until the time is up.

    In the first round, shapes that do not fit are left out: first those between the corners of the table, which may
    take `CORNER_TIME` times the budget. The smallest batch is always measured.
    """
    started = clock()
    progress = _Progress(clock)
    for shape in shapes[:NUM_WARM_UP_SHAPES]:
        run(shape)
    corners = corners_of(shapes)
    rows_run: dict[Shape, int] = {}
    times: dict[Shape, list[float]] = {}
    num_left_out, per_row = 0, 0.0
    for shape in [*corners, *(shape for shape in shapes if shape not in corners)]:
        limit = budget_seconds * (CORNER_TIME if shape in corners else 1.0)
        if len(times) >= NUM_ALWAYS and clock() - started + per_row * shape.num_rows > limit:
            num_left_out += 1
            continue
        rows_run[shape], seconds = run(shape)
        times[shape], per_row = [seconds], seconds / shape.num_rows
        progress(1, len(times), len(shapes))
    for i in range(len(times), max_rounds * len(times)):
        shape = list(times)[i % len(times)]
        if clock() - started + times[shape][-1] > budget_seconds:
            break
        times[shape].append(run(shape)[1])
        progress(i // len(times) + 1, i % len(times) + 1, len(times))
    samples = [
        StepSample(shape.num_reqs, rows_run[shape], shape.budget is not None, tuple(seconds))
        for shape, seconds in times.items()
    ]
    return Measurement(samples, num_left_out, min(len(sample.seconds) for sample in samples))


def corners_of(shapes: Sequence[Shape]) -> list[Shape]:
    """The smallest, a middle and the largest batch, each in full, trimmed to nothing, and without a draft."""
    batches = sorted({shape.num_reqs for shape in shapes})
    chosen = {batches[0], batches[len(batches) // 2], batches[-1]}
    corners = []
    for num_reqs in sorted(chosen):
        of_batch = [shape for shape in shapes if shape.num_reqs == num_reqs]
        full = max(shape.budget or 0 for shape in of_batch)
        corners += [shape for shape in of_batch if shape.budget in (None, 0, full)]
    return corners


def measure_tables(
    timer: StepTimer, max_reqs: int, gamma: int, budget_seconds: float = BUDGET_SECONDS
) -> tuple[FittedTables, Measurement]:
    """Both tables of this server, measured now."""
    with timer:
        measured = measure_steps(timer.run, shapes_to_measure(max_reqs, gamma), budget_seconds)
    return fit_tables(measured.samples, max_reqs, max_reqs * (gamma + 1)), measured


def measure_plain_costs(
    timer: StepTimer, max_reqs: int, gamma: int, budget_seconds: float = PLAIN_BUDGET_SECONDS
) -> PlainStepCosts | None:
    """What draft-free steps cost alone: beside a table file, which says nothing of them."""
    shapes = [shape for shape in shapes_to_measure(max_reqs, gamma) if shape.budget is None]
    with timer:
        measured = measure_steps(timer.run, shapes, budget_seconds)
    return fit_plain(measured.samples, max_reqs)


class _Progress:
    """A line while it lasts: at most one every two seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._shown = clock, clock()

    def __call__(self, round_number: int, done: int, total: int) -> None:
        if self._clock() - self._shown >= 2.0:
            self._shown = self._clock()
            logger.info("measuring step costs: round %d, %d of %d shapes", round_number, done, total)
