"""How long the cost table of a server takes to measure, and how well it predicts shapes it was not fitted to.

    python benchmark/startup_table.py [--model-path demo] [--draft demo-dflash2] [--num-reqs 48] [--out FILE]

Measures the start-up table as a server does, then steps of batch sizes and budgets in between. Metric: relative
error of the table's seconds against the median of `--repeats` steps of each held-out shape.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from flashspark.args import ServerArgs
from flashspark.engine.fingerprint import device_fingerprint
from flashspark.scheduler.build import build_scheduler
from flashspark.speculative.drafter import make_scratch_source
from flashspark.speculative.startup_table import Shape, StepTimer, measure_tables
from flashspark.speculative.tiers import TierGrid, TierRule


def held_out_shapes(max_reqs: int, gamma: int) -> list[Shape]:
    """Batch sizes between those that are measured, a third and three quarters of their drafts."""
    batches = [n for n in (5, 7, 10, 20, 28, 40) if n <= max_reqs]
    return [Shape(n, int(share * n * gamma)) for n in batches for share in (1 / 3, 3 / 4)]


def main() -> None:
    """Measures, compares, prints, and writes the record if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--draft", default="demo-dflash2")
    parser.add_argument("--algorithm", default="DFLASH")
    parser.add_argument("--num-reqs", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time the thread, not the wall: for a busy machine, one torch thread",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    args = ServerArgs(
        model_path=options.model_path,
        speculative_algorithm=options.algorithm,
        speculative_draft_model_path=options.draft,
        max_running_requests=options.num_reqs,
        ragged_verify_mode="static",
    )
    scheduler, ready = build_scheduler(args, lambda output: None)
    worker, max_reqs = scheduler._worker, options.num_reqs
    grid = TierGrid(TierRule(worker.width, max_reqs))
    if worker.drafter is None or not worker.drafter.has_signal:
        parser.error("the draft has no confidence, so there is nothing to measure for")
    source = make_scratch_source(worker.runner, max_reqs)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    timer = StepTimer(worker.runner, worker.drafter, source, grid, max_reqs, ready.context_length, clock)
    started = time.monotonic()
    fitted, measured = measure_tables(timer, max_reqs, worker.gamma)
    seconds = time.monotonic() - started
    cells = []
    shapes = held_out_shapes(max_reqs, worker.gamma)
    times: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    with timer:
        for _ in range(options.repeats):
            for shape in shapes:
                rows, step_seconds = timer.run(shape)
                times[shape].append(step_seconds)
                if len(times[shape]) == options.repeats:
                    taken = statistics.median(times[shape])
                    told = float(fitted.table.step_seconds(shape.num_reqs, np.array([rows]))[0])
                    cells.append([shape.num_reqs, rows, 1e3 * taken, 1e3 * told, told / taken - 1])
    errors = [abs(cell[-1]) for cell in cells]
    record = {
        "device": device_fingerprint(worker.runner.device),
        "clock": "CPU time of the thread" if options.cpu_time else "wall",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "measured_seconds": seconds,
        "shapes": len(measured.samples),
        "shapes_left_out": measured.num_left_out,
        "rounds": measured.num_rounds,
        "fit_error_mean": fitted.mean_error,
        "fit_error_worst": fitted.worst_error,
        "held_out_error_mean": statistics.mean(errors),
        "held_out_error_worst": max(errors),
        "held_out_cells": {"columns": ["requests", "rows", "ms", "predicted ms", "error"], "cells": cells},
        "table": json.loads(fitted.table.to_json()),
        "plain": None if fitted.plain is None else [fitted.plain.num_reqs_probes, fitted.plain.seconds],
    }
    print(f"measured in {seconds:.1f} s: {len(measured.samples)} shapes, {measured.num_rounds} rounds")
    print(f"fit: mean error {fitted.mean_error:.1%}, worst {fitted.worst_error:.1%}")
    for num_reqs, rows, taken_ms, told_ms, error in cells:
        print(
            f"  {num_reqs:3d} requests, {rows:3d} rows: {taken_ms:7.2f} ms, predicted {told_ms:7.2f} ({error:+.1%})"
        )
    print(
        f"held out: mean error {record['held_out_error_mean']:.1%}, worst {record['held_out_error_worst']:.1%}"
    )
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
