#!/usr/bin/env python3
"""What it is worth to price the tier that runs: pad-up pricing against SGLang's floor lookup, on measured step times.

    python benchmark/pad_up.py --out benchmark/results/pad_up_cpu.json

1. Survival traces. The shipped DFlash2 pair serves its held-out prompts (and the same prompts cut to three quarters
   and to half their length) in this process, with every block verified in full. What each plan would have read, the
   confidence of two steps ago, is kept for steps of exactly 4, 8, 16 and 32 requests, at temperature 0 and 1, once
   the estimator is warm. A request ends at a stop token, at 200 tokens, or in a loop.
2. Step times. Every tier of these batch sizes is timed with real steps of synthetic requests, in interleaved rounds.
   A tier's time is the median; where more rows seem to take less time, neighbours share their mean, as in the
   profiler's fit. The probes of the tables are some of these times, and all of them are what steps are charged: what
   is compared is how the rules read a table, not how well it was measured.
3. Replay. At each recorded step the planner chooses a budget by either rule, from the same 1-D table, which has few
   probes. `floor` looks up the largest probe up to the rows that it wants, and knows no tiers; `pad-up` looks up the
   smallest probe from the tier up. Either is then charged the measured time of the tier that really runs, and
   credited the expected tokens (tau) of the drafts that it verifies. Pad-up verifies real drafts in the rows that
   would be padding, as the server does; floor is shown without that, as in SGLang's default, and with it.

Tiers: `fine` is the CPU's default (nothing is padded while steps are small), `blocks` has one tier per 8 rows
(--speculative-verify-tier-tokens 8), like SGLang's. Tables: `tiers` has a probe at every tier, which is where a
profiler of captured graphs measures; `doubling` has probes at 1, 2, 4 and 8 rows per request, further apart than the
tiers; both are measured at the batch size that is planned. `diagonal` has full blocks of 1, 2, 4 … 32 requests, as
SGLang's profiler measures them in static mode, and so misprices trimmed steps under either rule.

The 95 % intervals are bootstraps over runs of 16 successive steps, which resemble each other; they do not hold the
error of the measured times. `exact` is the best any planner could do with this confidence: it knows what is charged.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]

from demo_pair.decode import loop_end  # noqa: E402
from flashspark.args import ServerArgs  # noqa: E402
from flashspark.demo import DEMO_PROMPTS  # noqa: E402
from flashspark.ipc import GenerateRequest, RequestOutput, SamplingParams  # noqa: E402
from flashspark.scheduler.build import build_scheduler  # noqa: E402
from flashspark.speculative.cost_table import LookupRule, SpsCostTable  # noqa: E402
from flashspark.speculative.drafter import make_scratch_source  # noqa: E402
from flashspark.speculative.objective import best_budget, candidates, fresh_rows, survivals  # noqa: E402
from flashspark.speculative.planner import VerifyPlanner  # noqa: E402
from flashspark.speculative.planner_input import PlanInput, PlannerSettings  # noqa: E402
from flashspark.speculative.startup_table import Shape, StepTimer  # noqa: E402
from flashspark.speculative.table_fit import pool_adjacent  # noqa: E402
from flashspark.speculative.tiers import TierGrid, TierRule, filled_budget  # noqa: E402

BATCH_SIZES = (4, 8, 16, 32)
TEMPERATURES = (0.0, 1.0)
MAX_NEW = 200
WARM_UP_STEPS, WARM_UP_REQUESTS = 110, 8  # per temperature; the estimator is warm after 200 steps
BLOCK_OF_STEPS = 16  # for the bootstrap
RULES = ("pad-up", "floor", "floor, tiers filled", "full", "exact")

StepTimes = Mapping[tuple[int, int], float]  # seconds by (requests, rows that run)


class Recorder:
    """Serves with full blocks and keeps what each plan was made from."""

    def __init__(self) -> None:
        args = ServerArgs(
            model_path="demo",
            speculative_algorithm="DFLASH",
            speculative_draft_model_path="demo-dflash2",
            max_running_requests=max(BATCH_SIZES),
            ragged_verify_mode="compact",
            speculative_cost_table="none",  # so everything is verified
            random_seed=1,
            decode_log_interval=10**6,
        )
        self.scheduler, self.ready = build_scheduler(args, self._receive)
        self.worker = self.scheduler._worker
        assert self.worker.adaptive is not None
        planner = self.worker.adaptive.planner
        self._plan, planner.plan = planner.plan, self._note  # type: ignore[method-assign]
        self._inputs: list[PlanInput] = []
        self._tokens: dict[str, list[int]] = {}
        self._looping: list[str] = []
        self._num_requests = 0

    def _note(self, batch: PlanInput) -> Any:
        self._inputs.append(batch)
        return self._plan(batch)

    def _receive(self, output: RequestOutput) -> None:
        tokens = self._tokens[output.request_id]
        tokens += output.token_ids
        if output.finish is not None:
            del self._tokens[output.request_id]
        elif loop_end(tokens):
            self._looping.append(output.request_id)

    def run(
        self, prompts: Sequence[list[int]], num_reqs: int, temperature: float, num_steps: int
    ) -> list[PlanInput]:
        """`num_steps` steps of exactly `num_reqs` requests; the next prompt takes the place of one that ended."""
        kept: list[PlanInput] = []
        while len(kept) < num_steps:
            while len(self._tokens) < num_reqs:
                self._num_requests += 1
                request_id = str(self._num_requests)
                self._tokens[request_id] = []
                sampling = SamplingParams(max_new_tokens=MAX_NEW, temperature=temperature)
                prompt = prompts[self._num_requests % len(prompts)]
                self.scheduler.add(GenerateRequest(request_id, prompt, sampling))
            self.scheduler.step()
            kept += [step for step in self._inputs if len(step.caps) == num_reqs]
            self._inputs = []
            self.scheduler.abort(self._looping, "a loop")
            self._looping = []
        self.scheduler.abort(list(self._tokens), "recorded")
        return kept[:num_steps]


def record(recorder: Recorder, num_steps: int) -> dict[tuple[int, float], list[PlanInput]]:
    """The traces, by batch size and temperature; the first steps only warm the estimator."""
    prompts = [p["token_ids"] for p in json.loads(DEMO_PROMPTS.read_text())]
    cut = [p[: max(8, int(len(p) * share))] for share in (1.0, 0.75, 0.5) for p in prompts]
    for temperature in TEMPERATURES:
        recorder.run(cut, WARM_UP_REQUESTS, temperature, WARM_UP_STEPS)
    return {
        (n, temperature): recorder.run(cut, n, temperature, num_steps)
        for n in BATCH_SIZES
        for temperature in TEMPERATURES
    }


def measure(recorder: Recorder, num_rounds: int, clock: Callable[[], float]) -> StepTimes:
    """Seconds of every fine tier of the batch sizes, and of the diagonal's full blocks."""
    worker, max_reqs = recorder.worker, max(BATCH_SIZES)
    assert worker.drafter is not None
    grid = TierGrid(TierRule(worker.width, max_reqs))
    shapes = [Shape(n, rows - n) for n in BATCH_SIZES for rows in tier_rows(grid, n)]
    shapes += [Shape(n, n * worker.gamma) for n in (1, 2)]
    source = make_scratch_source(worker.runner, max_reqs)
    timer = StepTimer(
        worker.runner, worker.drafter, source, grid, max_reqs, recorder.ready.context_length, clock
    )
    taken: dict[tuple[int, int], list[float]] = {(s.num_reqs, s.num_rows): [] for s in shapes}
    with timer:
        for shape in shapes:
            timer.run(shape)
        for _ in range(num_rounds):
            for shape in shapes:
                rows, seconds = timer.run(shape)
                taken[shape.num_reqs, rows].append(seconds)
    return never_falling({key: float(np.median(all_)) for key, all_ in taken.items()})


def never_falling(times: StepTimes) -> StepTimes:
    """More rows of the same requests cost no less: neighbours that say otherwise share their mean."""
    pooled = {}
    for num_reqs in {n for n, _ in times}:
        shapes = sorted(shape for shape in times if shape[0] == num_reqs)
        seconds = pool_adjacent([times[shape] for shape in shapes], [1] * len(shapes))
        pooled.update(zip(shapes, seconds, strict=True))
    return pooled


def tier_rows(grid: TierGrid, num_reqs: int) -> list[int]:
    """Rows of the tiers that a batch may run on."""
    tiers = grid.tiers(num_reqs)
    assert tiers is not None
    return [int(rows) for rows in tiers.num_tokens if rows >= num_reqs]


def sparse_table(times: StepTimes, probes: Sequence[tuple[int, int]]) -> SpsCostTable:
    """A 1-D table with the given (requests, rows) as its probes."""
    rows = tuple(rows for _, rows in probes)
    return SpsCostTable(rows, tuple(1.0 / times[probe] for probe in probes), rows[-1])


@dataclass(frozen=True)
class Outcome:
    """What a rule got out of a trace. S steps."""

    tokens: NDArray[np.float64]  # [S], expected
    seconds: NDArray[np.float64]  # [S], measured of the tier that runs
    rows: NDArray[np.int64]  # [S], that run

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return float(self.tokens.sum() / self.seconds.sum())


def expected_tokens(step: PlanInput) -> NDArray[np.float64]:
    """tau of every budget from 0 up; later drafts add nothing."""
    assert step.relayed is not None
    fresh = fresh_rows(step.relayed.generations, step.generations)
    survival = survivals(step.relayed.confidence, fresh)
    eps = PlannerSettings(survival.shape[1]).survival_eps
    return candidates(survival, np.ones_like(step.caps), step.caps, eps).expected_tokens()


def replay(
    trace: Sequence[PlanInput], table: SpsCostTable, grid: TierGrid, charged: StepTimes
) -> dict[str, Outcome]:
    """Both rules, and the two bounds, along a trace. Neither planner knows what it is charged."""
    gamma = grid.rule.width - 1

    def planner(rule: LookupRule, tiers: TierGrid | None) -> VerifyPlanner:
        settings = PlannerSettings(gamma, lookup_rule=rule, draft_free=None)
        return VerifyPlanner(settings, table, tiers)

    pad_up, floor = planner(LookupRule.PAD_UP, grid), planner(LookupRule.FLOOR, None)
    parts: dict[str, list[tuple[float, float, int]]] = {name: [] for name in RULES}
    for step in trace:
        num_reqs, most = len(step.caps), int(step.caps.sum()) - len(step.caps)
        tiers, tau = grid.tiers(num_reqs), expected_tokens(step)
        assert tiers is not None
        rows_of = tiers.num_tokens[tiers.tier_of_tokens[num_reqs : num_reqs + most + 1]]
        seconds_of = np.array([charged[num_reqs, int(rows)] for rows in rows_of])
        wanted = floor.plan(step).verify.budget
        assert wanted is not None
        budgets = {
            "pad-up": pad_up.plan(step).verify.budget,
            "floor": wanted,
            "floor, tiers filled": filled_budget(wanted, num_reqs, most, int(rows_of[wanted])),
            "full": most,
            "exact": best_budget(tau, seconds_of),
        }
        for name, budget in budgets.items():
            assert budget is not None
            parts[name].append(
                (float(tau[min(budget, len(tau) - 1)]), float(seconds_of[budget]), int(rows_of[budget]))
            )
    return {
        name: Outcome(*(np.array(column) for column in zip(*part, strict=True)))
        for name, part in parts.items()
    }


def ratio_interval(one: Outcome, other: Outcome, num_draws: int = 2000) -> tuple[float, float]:
    """95 % of one.rate / other.rate over resampled runs of successive steps, the same for both."""
    starts = np.arange(0, len(one.tokens), BLOCK_OF_STEPS)
    sums = np.array(
        [np.add.reduceat(x, starts) for x in (one.tokens, one.seconds, other.tokens, other.seconds)]
    )
    drawn = np.random.default_rng(0).integers(len(starts), size=(num_draws, len(starts)))
    tokens, seconds, other_tokens, other_seconds = sums[:, drawn].sum(axis=2)
    low, high = np.quantile(tokens / seconds / (other_tokens / other_seconds), (0.025, 0.975))
    return float(low), float(high)


def compare(
    traces: Mapping[tuple[int, float], Sequence[PlanInput]], times: StepTimes, width: int
) -> list[dict[str, Any]]:
    """A cell per tiers, table, batch size and temperature."""
    diagonal = [(n, n * width) for n in (1, 2, *BATCH_SIZES)]
    cells = []
    for tiers_name, finest in (("fine", 1), ("blocks", width)):
        grid = TierGrid(TierRule(width, max(BATCH_SIZES), finest_tokens=finest))
        for table_name in ("tiers", "doubling", "diagonal"):
            for (n, temperature), trace in traces.items():
                probes = {
                    "tiers": [(n, rows) for rows in tier_rows(grid, n)],
                    "doubling": [(n, n * per_req) for per_req in (1, 2, 4, 8)],
                    "diagonal": diagonal,
                }
                table = sparse_table(times, probes[table_name])
                outcomes = replay(trace, table, grid, times)
                cell: dict[str, Any] = {
                    "tiers": tiers_name,
                    "table": table_name,
                    "requests": n,
                    "temperature": temperature,
                    "tokens_per_second": {name: round(o.rate, 1) for name, o in outcomes.items()},
                    "mean_rows": {name: round(float(o.rows.mean()), 1) for name, o in outcomes.items()},
                }
                for name in ("floor", "floor, tiers filled"):
                    low, high = ratio_interval(outcomes["pad-up"], outcomes[name])
                    ratio = outcomes["pad-up"].rate / outcomes[name].rate
                    cell[f"pad-up over {name}"] = [round(x, 4) for x in (ratio, low, high)]
                cells.append(cell)
    return cells


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Geometric mean over batch sizes and temperatures of pad-up's rate over floor's, by tiers and table."""
    logs: dict[str, list[float]] = {}
    for cell in cells:
        for name in ("floor", "floor, tiers filled"):
            key = f"{cell['tiers']} tiers, {cell['table']} table: pad-up over {name}"
            logs.setdefault(key, []).append(float(np.log(cell[f"pad-up over {name}"][0])))
    return {key: round(float(np.exp(np.mean(values))), 4) for key, values in logs.items()}


def show(cells: Sequence[dict[str, Any]]) -> None:
    """A line per cell."""
    print(
        "tiers  table     requests  T   pad-up    floor   ratio  [95 %]           filled   ratio    full    exact"
    )
    for cell in cells:
        rate = cell["tokens_per_second"]
        ratio, low, high = cell["pad-up over floor"]
        print(
            f"{cell['tiers']:6} {cell['table']:8} {cell['requests']:9d} {cell['temperature']:2g} "
            f"{rate['pad-up']:8.1f} {rate['floor']:8.1f}  {ratio:.3f}  [{low:.3f}, {high:.3f}] "
            f"{rate['floor, tiers filled']:8.1f}  {cell['pad-up over floor, tiers filled'][0]:.3f} "
            f"{rate['full']:8.1f} {rate['exact']:8.1f}"
        )
    for name, ratio in summary(cells).items():
        print(f"{ratio:.3f}  {name}")


def main() -> None:
    """Records, measures, replays, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=256, help="recorded per batch size and temperature")
    parser.add_argument("--rounds", type=int, default=9, help="of timing")
    parser.add_argument("--cpu-time", action="store_true", help="time the thread: for a machine that is busy")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    recorder = Recorder()
    traces = record(recorder, args.steps)
    print(f"recorded {len(traces)} traces of {args.steps} steps after {time.monotonic() - started:.0f} s")
    clock = time.thread_time if args.cpu_time else time.perf_counter
    times = measure(recorder, args.rounds, clock)
    cells = compare(traces, times, recorder.worker.width)
    show(cells)
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    figures = {
        "machine": f"{torch.get_num_threads()} CPU thread, {platform.machine()}, torch {torch.__version__}",
        "commit": commit.stdout.strip() or "unknown",
        "command": " ".join(["python", "benchmark/pad_up.py", *sys.argv[1:]]),
        "clock": "CPU time of the thread" if args.cpu_time else "wall",
        "load_average": round(os.getloadavg()[0], 2),
        "seconds": round(time.monotonic() - started),
        "summary": summary(cells),
        "cells": cells,
        "step_ms": {
            "columns": ["requests", "rows", "ms"],
            "cells": [[n, rows, round(1e3 * seconds, 3)] for (n, rows), seconds in times.items()],
        },
    }
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
