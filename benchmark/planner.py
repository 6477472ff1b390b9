"""What planning costs the host: median and p99 of `VerifyPlanner.plan`, by default at 256 requests × 7 drafts.

    python benchmark/planner.py [--num-reqs 256] [--gamma 7] [--steps 2000] [--cold] [--out FILE]

Every step sees other confidence and other requests that are not fresh, as in serving. One CPU core. Wall time is
what counts on an idle machine; CPU time is what planning costs whatever else runs. `--cold` times the whole of
`AdaptiveVerifier.plan`, relay included, and `observe_step`, with the caches of the CPU emptied before each, as a step's
other work does: 8, 32 and 128 requests, drafting and where plain steps win.
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
import torch

from flashspark.speculative.adaptive import AdaptiveVerifier, VerifyMode
from flashspark.speculative.cost_table import (
    CostCorrection,
    PlainStepCosts,
    SpsAdditiveCostTable,
    SpsCostTable,
)
from flashspark.speculative.estimator import AcceptanceEstimator
from flashspark.speculative.looks import LookRule
from flashspark.speculative.planner import VerifyPlanner
from flashspark.speculative.planner_input import PlanInput, PlannerSettings
from flashspark.speculative.relay import RelayedConfidence
from flashspark.speculative.tiers import TierGrid, TierRule

NUM_BATCHES = 64  # distinct inputs, cycled
BUDGET_MS = 0.2
COLD_NUM_REQS = (8, 32, 128)
CACHE_BYTES = 32 << 20  # what is touched between two plans


def make_planner(num_reqs: int, gamma: int, table_kind: str, plain_seconds: float = 3.9e-3) -> VerifyPlanner:
    """A planner with everything switched on: grid, correction, plain costs (of one request)."""
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
    plain = PlainStepCosts((1, num_reqs + 1), (plain_seconds, plain_seconds + 1.1e-3))
    settings = PlannerSettings(gamma=gamma, min_drafts_every=16, look_rule=LookRule(1, 1, 1))
    return VerifyPlanner(settings, table, grid, plain, CostCorrection(grid.row_counts()))


def make_batches(num_reqs: int, gamma: int, steady: bool = False) -> list[PlanInput]:
    """Inputs as a busy server has them: 5 % of the rows are new, a few at their last tokens, a few starving. `steady`:
    none of that, as on most steps."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(NUM_BATCHES):
        generations = rng.integers(1, 50, num_reqs)
        stored = generations - (rng.random(num_reqs) < 0.05)
        caps = np.where(rng.random(num_reqs) < 0.03, rng.integers(1, gamma + 2, num_reqs), gamma + 1)
        confidence = rng.beta(4, 1.5, (num_reqs, gamma)).astype(np.float32)
        batches.append(
            PlanInput(
                relayed=RelayedConfidence(confidence, generations if steady else stored),
                generations=generations,
                caps=np.full(num_reqs, gamma + 1) if steady else caps,
                keeps_block=rng.random(num_reqs) < (0.0 if steady else 0.01),
                num_steps_without_draft=rng.integers(0, 8 if steady else 20, num_reqs),
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


def measure_cold(num_reqs: int, gamma: int, num_steps: int, plain_wins: bool) -> dict[str, float | str | int]:
    """Times `AdaptiveVerifier.plan` and `observe_step` in a loop that publishes other confidence at every drafted
    step."""
    planner = make_planner(256, gamma, "2-D", 1e-4 if plain_wins else 3.9e-3)
    batches = make_batches(num_reqs, gamma, steady=True)
    source = AcceptanceEstimator(256, gamma, torch.device("cpu"))
    source.num_refits = 100  # ready
    verifier = AdaptiveVerifier(VerifyMode.COMPACT, planner, source, 256, torch.device("cpu"))
    row_list = list(range(num_reqs))
    rows, evicted = torch.tensor(row_list), np.zeros(CACHE_BYTES, dtype=np.uint8)
    for row in row_list:
        verifier._generations.renew(row)
    times_ms, drafts, num_drafted = np.empty((2, num_steps)), True, 0
    for step in range(-NUM_BATCHES, num_steps):
        batch = batches[step % NUM_BATCHES]
        assert batch.relayed is not None
        if drafts:
            verifier.relay(rows, row_list, torch.from_numpy(batch.relayed.confidence))
        lists = [batch.caps.tolist(), batch.keeps_block.tolist(), batch.num_steps_without_draft.tolist()]
        evicted += 1
        started = time.perf_counter()
        plan = verifier.plan(row_list, *lists)
        planned = time.perf_counter()
        evicted += 1
        observing = time.perf_counter()
        verifier.observe_step(plan, 5e-3)
        drafts = plan.draft
        num_drafted += drafts and step >= 0
        if step >= 0:
            times_ms[:, step] = (planned - started) * 1e3, (time.perf_counter() - observing) * 1e3
    medians = np.median(times_ms, axis=1)
    return {
        "num_reqs": num_reqs,
        "gamma": gamma,
        "num_steps": num_steps,
        "num_drafted": num_drafted,
        "cold_median_ms": round(float(medians[0]), 4),
        "cold_p99_ms": round(float(np.percentile(times_ms[0], 99)), 4),
        "cold_observe_median_ms": round(float(medians[1]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-reqs", type=int, default=256)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cold", action="store_true", help="with the CPU's caches emptied before each plan")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cold:
        results = [
            measure_cold(n, args.gamma, args.steps, wins) for wins in (False, True) for n in COLD_NUM_REQS
        ]
        for result in results:
            print(
                f"{result['num_reqs']} × {args.gamma}, {result['num_drafted']} of {args.steps} steps drafted, cold: "
                f"median {result['cold_median_ms']:.3f} ms, "
                f"p99 {result['cold_p99_ms']:.3f} ms; the step's time taken in: "
                f"{result['cold_observe_median_ms']:.3f} ms"
            )
        write(args.out, results)
        return
    results = [measure(args.num_reqs, args.gamma, args.steps, kind) for kind in ("1-D", "2-D")]
    for result in results:
        verdict = "within" if result["median_ms"] <= BUDGET_MS else "OVER"
        print(
            f"{result['table']} table, {args.num_reqs} × {args.gamma}: median {result['median_ms']:.3f} ms, "
            f"p99 {result['p99_ms']:.3f} ms ({verdict} {BUDGET_MS} ms); of CPU time median "
            f"{result['cpu_median_ms']:.3f} ms, p99 {result['cpu_p99_ms']:.3f} ms; "
            f"memory growth {result['growth_bytes_second_half']} bytes over {args.steps} steps"
        )
    write(args.out, results)


def write(path: Path | None, results: list[dict[str, float | str | int]]) -> None:
    """`results` as JSON, where a file is asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
