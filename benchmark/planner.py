"""What planning costs the host: median and p99 of `VerifyPlanner.plan`, by default at 256 requests × 7 drafts.

    python benchmark/planner.py [--num-reqs 256] [--gamma 7] [--steps 2000] [--out FILE]

Every step sees other confidence and other requests that are not fresh, as in serving. One CPU core. Wall time is
what counts on an idle machine; CPU time is what planning costs whatever else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import tracemalloc
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from flashspark.speculative.cost_table import (
    CostCorrection,
    PlainStepCosts,
    SpsAdditiveCostTable,
    SpsCostTable,
)
from flashspark.speculative.planner import PlanInput, PlannerSettings, VerifyPlanner
from flashspark.speculative.relay import RelayedConfidence
from flashspark.speculative.tiers import TierGrid, TierRule

NUM_BATCHES = 64  # distinct inputs, cycled
BUDGET_MS = 0.2


def make_planner(num_reqs: int, gamma: int, table_kind: str) -> VerifyPlanner:
    """A planner with everything switched on: grid, correction, plain costs."""
    width = gamma + 1
    grid = TierGrid(TierRule(width=width, max_num_reqs=num_reqs, finest_reqs=8, finest_tokens=8))
    rows = tuple(range(width, num_reqs * width + 1, width))
    seconds = tuple(4e-3 + 8e-6 * m for m in rows)
    table: SpsCostTable | SpsAdditiveCostTable
    if table_kind == "1-D":
        table = SpsCostTable(rows, tuple(1 / s for s in seconds), rows[-1])
    else:
        table = SpsAdditiveCostTable(
            4e-3, (1, num_reqs + 1), (0.0, 1e-3), (0, *rows), (0.0, *(8e-6 * m for m in rows))
        )
    plain = PlainStepCosts((1, num_reqs + 1), (3.9e-3, 5e-3))
    settings = PlannerSettings(gamma=gamma, min_drafts_every=16)
    return VerifyPlanner(settings, table, grid, plain, CostCorrection(grid.row_counts()))


def make_batches(num_reqs: int, gamma: int) -> list[PlanInput]:
    """Inputs as a busy server has them: 5 % of the rows are new, a few at their last tokens, a few starving."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(NUM_BATCHES):
        generations = rng.integers(1, 50, num_reqs)
        stored = generations - (rng.random(num_reqs) < 0.05)
        confidence = rng.beta(4, 1.5, (num_reqs, gamma)).astype(np.float32)
        batches.append(
            PlanInput(
                relayed=RelayedConfidence(confidence, stored),
                generations=generations,
                caps=np.where(rng.random(num_reqs) < 0.03, rng.integers(1, gamma + 2, num_reqs), gamma + 1),
                keeps_block=rng.random(num_reqs) < 0.01,
                num_steps_without_draft=rng.integers(0, 20, num_reqs),
            )
        )
    return batches


def measure(num_reqs: int, gamma: int, num_steps: int, table_kind: str) -> dict[str, float | str | int]:
    """Times `num_steps` plans and the growth of memory over as many more."""
    planner, batches = make_planner(num_reqs, gamma, table_kind), make_batches(num_reqs, gamma)
    for batch in batches:
        planner.plan(batch)
    times_ms, cpu_ms = np.empty(num_steps), np.empty(num_steps)
    for step in range(num_steps):
        batch = batches[step % NUM_BATCHES]
        started, cpu_started = time.perf_counter(), time.thread_time()
        plan = planner.plan(batch)
        cpu_ms[step] = (time.thread_time() - cpu_started) * 1e3
        times_ms[step] = (time.perf_counter() - started) * 1e3
        planner.observe_step(plan, 5e-3)
    tracemalloc.start()
    growth = []
    for _ in range(2):
        before = tracemalloc.get_traced_memory()[0]
        for step in range(num_steps):
            planner.observe_step(planner.plan(batches[step % NUM_BATCHES]), 5e-3)
        growth.append(tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    return {
        "table": table_kind,
        "num_reqs": num_reqs,
        "gamma": gamma,
        "num_steps": num_steps,
        "median_ms": round(float(np.median(times_ms)), 4),
        "p99_ms": round(float(np.percentile(times_ms, 99)), 4),
        "cpu_median_ms": round(float(np.median(cpu_ms)), 4),
        "cpu_p99_ms": round(float(np.percentile(cpu_ms, 99)), 4),
        "growth_bytes_second_half": growth[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-reqs", type=int, default=256)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [measure(args.num_reqs, args.gamma, args.steps, kind) for kind in ("1-D", "2-D")]
    for result in results:
        verdict = "within" if result["median_ms"] <= BUDGET_MS else "OVER"
        print(
            f"{result['table']} table, {args.num_reqs} × {args.gamma}: median {result['median_ms']:.3f} ms, "
            f"p99 {result['p99_ms']:.3f} ms ({verdict} {BUDGET_MS} ms); of CPU time median "
            f"{result['cpu_median_ms']:.3f} ms, p99 {result['cpu_p99_ms']:.3f} ms; "
            f"memory growth {result['growth_bytes_second_half']} bytes over {args.steps} steps"
        )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
