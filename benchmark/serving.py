"""Closed-loop serving of the shipped held-out prompts: arms interleaved on one server, ratios with their bounds.

    python benchmark/serving.py --sweep --out benchmark/results/serving_cpu.json

One server, started in compact, plays every arm through its live switches (`/set_internal_state`), A B B A …, so that
a slow minute of the machine hits all of them. For each concurrency and temperature, `--pairs` times: the same clients
send the same prompts and ask for as many tokens. The figure is the median over pairs of arm / first arm, of decode
tokens/s (a request's tokens after its first frame per second after it, mean over requests, times concurrency), with
the distribution-free 95 % interval of a median: order statistics of the pairs.

The oracle is computed, not run: a second server in static mode keeps a record of every step, and each step's price is
taken from the first server's cost table, once as it ran and once for exactly the accepted drafts and one row more of
each request. What a ratio captures of that is (ratio - 1) / (oracle - 1). It drafts on every step, as static does, so
an arm that does without drafts where they do not pay can go beyond it.

Arms: `static`, `compact`, `cap-accept`, `off` (no speculation), `static:N` (blocks of N rows).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from closed_loop import Load, Segment, run_load
from servers import ROOT, provenance, serve

sys.path.insert(0, str(ROOT / "python"))

from flashspark.benchmark.live_server import LiveServer
from flashspark.demo import DEMO_PROMPTS
from flashspark.speculative.cost_table import CostTable, parse_cost_table
from flashspark.speculative.tiers import TierGrid, TierRule

SWEEP_CONCURRENCY = (1, 2, 4, 8, 16, 32)
SWEEP_TEMPERATURES = (0.0, 1.0)
SHARE_AT = (16, 32)  # where the share of the oracle's gain is held to its bar
BARS = {"everywhere": 0.97, "at 32": 1.15, "share": 0.5}
COMPONENTS = {"SGLANG_DSPARK_DEBUG_DUMP": "reqs"}


@dataclass(frozen=True)
class Point:
    """One load level."""

    concurrency: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.concurrency} at T={self.temperature:g}"


def settings_of(arm: str) -> dict[str, Any]:
    """The live settings that make the server this arm."""
    name, _, width = arm.partition(":")
    if name == "off":
        return {"ragged_verify_mode": "static", "speculative_num_draft_tokens": None, "speculation": False}
    mode = {"ragged_verify_mode": name, "speculation": True}
    return {**mode, "speculative_num_draft_tokens": int(width) if width else None}


def switch(server: LiveServer, arm: str) -> None:
    """Makes the idle server this arm."""
    status, body = server.call("POST", "/set_internal_state", {"server_args": settings_of(arm)})
    if status != 200 or json.loads(body) != [True]:
        raise RuntimeError(f"the server does not become {arm}: {status} {body[:300]!r}; its log says why")


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median from order statistics; all that was seen where there are too few for one."""
    ordered, n = sorted(values), len(values)
    k = 0
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= 0.05:
        k += 1
    return ordered[max(k - 1, 0)], ordered[n - max(k, 1)]


def oracle_ratio(steps: Sequence[Sequence[int]], table: CostTable, grid: TierGrid) -> float:
    """How much faster a planner would be that verifies what will be accepted and one row more.

    Args:
        steps: of full batches, the tokens that each request's full block committed.
    """
    as_run = oracle = 0.0
    for committed in steps:
        num_reqs = len(committed)
        tiers = grid.tiers(num_reqs)
        assert tiers is not None
        rows = [tiers.max_tokens, tiers.round_up(sum(committed))]
        full, exact = table.step_seconds(num_reqs, np.array(rows))
        as_run, oracle = as_run + float(full), oracle + float(exact)
    return as_run / oracle


class Benchmark:
    """The sweep: owns what has been measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.prompts = [prompt["token_ids"] for prompt in json.loads(DEMO_PROMPTS.read_text())]
        self.points = [Point(c, t) for t in options.temperature for c in options.concurrency]
        self.segments: dict[Point, dict[str, list[Segment]]] = {
            point: {arm: [] for arm in options.arms} for point in self.points
        }
        self.counts: dict[Point, dict[str, list[dict[str, float]]]] = {
            point: {arm: [] for arm in options.arms} for point in self.points
        }
        self.info: dict[str, Any] = {}

    def flags(self) -> list[str]:
        """Of both servers."""
        options = self.options
        draft = [
            "--speculative-algorithm",
            options.algorithm,
            "--speculative-draft-model-path",
            options.draft,
        ]
        return [
            "--model-path",
            options.model_path,
            *draft,
            "--incremental-streaming-output",
            *options.server_flag,
        ]

    def requests_per_client(self, point: Point) -> int:
        """More where there are few clients, so that no run is over in a moment."""
        options = self.options
        return max(options.requests_per_client, -(-options.min_requests // point.concurrency))

    def load(self, point: Point, requests_per_client: int, first: int = 0) -> Load:
        """The clients of a point. `first`: the prompt that client 0 begins with."""
        prompts = self.prompts[first:] + self.prompts[:first]
        tokens = self.options.max_new_tokens
        return Load(prompts, point.concurrency, requests_per_client, tokens, point.temperature)

    def run(self) -> None:
        """Warms up, then measures every point in every round."""
        options = self.options
        with serve([*self.flags(), "--ragged-verify-mode", "compact"]) as port:
            server = LiveServer(f"http://127.0.0.1:{port}")
            self.info = server.info()
            self._warm_up(server, port)
            for number in range(options.pairs):
                for point in self.points:
                    arms = options.arms if number % 2 == 0 else options.arms[::-1]
                    for arm in arms:
                        self._measure(server, port, point, arm, number)
                    self._show_progress(number, point)

    def _warm_up(self, server: LiveServer, port: int) -> None:
        """Every arm once, and compact until its estimator has settled at every temperature."""
        biggest = max(self.options.concurrency)
        for temperature in self.options.temperature:
            for arm in self.options.arms:
                switch(server, arm)
                run_load(port, self.load(Point(biggest, temperature), 1))
        switch(server, "compact")
        for turn in range(20):
            for temperature in self.options.temperature:
                run_load(port, self.load(Point(8, temperature), 4, first=8 * turn))
            state = server.info()["internal_states"][0]
            if state["confidence_is_ready"] and turn >= self.options.warm_up_turns:
                return
        raise RuntimeError("the estimator does not get ready")

    def _measure(self, server: LiveServer, port: int, point: Point, arm: str, number: int) -> None:
        switch(server, arm)
        before = server.info()["internal_states"][0]
        load = self.load(point, self.requests_per_client(point), first=point.concurrency * number)
        self.segments[point][arm].append(run_load(port, load))
        after = server.info()["internal_states"][0]
        names = (
            "verify_steps",
            "verify_tokens",
            "trimmed_steps",
            "draft_free_steps",
            "num_steps",
            "num_retractions",
        )
        self.counts[point][arm].append({name: after[name] - before[name] for name in names})

    def _show_progress(self, number: int, point: Point) -> None:
        first, *others = self.options.arms
        rates = self.segments[point]
        shown = ", ".join(
            f"{arm} {rates[arm][-1].decode_rate / rates[first][-1].decode_rate:.3f}" for arm in others
        )
        print(f"pair {number + 1} of {self.options.pairs}, {point}: {shown}", file=sys.stderr, flush=True)

    def oracles(self) -> dict[Point, float]:
        """The oracle's ratio per point, from records of a static server."""
        text = self.info.get("speculative_cost_table_json")
        if text is None:
            raise RuntimeError("the server has no cost table: there is nothing to price an oracle with")
        table = parse_cost_table(text)
        width = int(self.info["speculative_num_draft_tokens"])
        finest = int(self.info["speculative_verify_tier_tokens"])
        grid = TierGrid(TierRule(width, int(self.info["max_running_requests"]), finest_tokens=finest))
        found = {}
        with serve([*self.flags(), "--ragged-verify-mode", "static"], COMPONENTS) as port:
            server = LiveServer(f"http://127.0.0.1:{port}")
            for point in self.points:
                server.set_state("dspark_clear_info_records", True)
                run_load(port, self.load(point, max(1, 24 // point.concurrency)))
                records = server.info()["internal_states"][0]["dspark_info_record"]["records"]
                steps = [
                    [req["acc_len"] for req in record["reqs"]]
                    for record in records
                    if record["bs"] == point.concurrency and len(record["reqs"]) == point.concurrency
                ]
                found[point] = oracle_ratio(steps, table, grid)
        return found

    def rows(self, oracles: dict[Point, float]) -> list[dict[str, Any]]:
        """One result per point and arm after the first."""
        first, *others = self.options.arms
        rows = []
        for point, arm in ((point, arm) for point in self.points for arm in others):
            base, mine = self.segments[point][first], self.segments[point][arm]
            ratios = [b.decode_rate / a.decode_rate for a, b in zip(base, mine, strict=True)]
            output = [b.output_rate / a.output_rate for a, b in zip(base, mine, strict=True)]
            oracle = oracles.get(point)
            median = statistics.median(ratios)
            counts = {
                name: sum(count[name] for count in self.counts[point][arm])
                for name in self.counts[point][arm][0]
            }
            rows.append(
                {
                    **asdict(point),
                    "arm": arm,
                    "ratio": median,
                    "interval": median_interval(ratios),
                    "output_ratio": statistics.median(output),
                    "oracle": oracle,
                    "share": None if oracle is None or oracle <= 1 else (median - 1) / (oracle - 1),
                    "pairs": ratios,
                    "verified_per_request": counts["verify_tokens"] / max(1, counts["verify_steps"]),
                    "counts": counts,
                }
            )
        return rows

    def figures(self) -> list[dict[str, Any]]:
        """Absolute figures of every arm: medians over its runs."""
        rows = []
        for point in self.points:
            for arm, segments in self.segments[point].items():
                names = ("decode_rate", "output_rate", "accept_length")
                figures = {name: statistics.median(getattr(s, name) for s in segments) for name in names}
                for name in ("ttft", "inter_token"):
                    for i, percentile in enumerate(("p50", "p99")):
                        figures[f"{name}_{percentile}"] = statistics.median(
                            getattr(s, name)[i] for s in segments
                        )
                rows.append({**asdict(point), "arm": arm, **figures})
        return rows


def show(rows: Sequence[dict[str, Any]], first: str) -> None:
    """The table."""
    print(
        f"\nT    c   arm          / {first:8s}  95 % interval    output  oracle  share  verified  draft-free"
    )
    for row in rows:
        low, high = row["interval"]
        oracle = "     -" if row["oracle"] is None else f"{row['oracle']:6.3f}"
        share = "    -" if row["share"] is None else f"{row['share']:5.2f}"
        free = row["counts"]["draft_free_steps"] / max(1, row["counts"]["num_steps"])
        print(
            f"{row['temperature']:<4g} {row['concurrency']:<3d} {row['arm']:12s} {row['ratio']:9.3f}   "
            f"{low:6.3f} … {high:6.3f}  {row['output_ratio']:6.3f}  {oracle}  {share}  "
            f"{row['verified_per_request']:8.2f}  {free:9.0%}"
        )


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How compact stands to its bars, against static."""
    compact = [row for row in rows if row["arm"] == "compact"]
    if not compact:
        return []
    worst = min(compact, key=lambda row: row["ratio"])
    lines = [
        f"worst compact / static {worst['ratio']:.3f} (bar {BARS['everywhere']}) at {worst['concurrency']} requests, "
        f"T={worst['temperature']:g}"
    ]
    for row in compact:
        if row["concurrency"] == 32:
            lines.append(f"at 32, T={row['temperature']:g}: {row['ratio']:.3f} (bar {BARS['at 32']})")
        if row["concurrency"] in SHARE_AT and row["share"] is not None:
            where = f"{row['concurrency']}, T={row['temperature']:g}"
            lines.append(f"share of the oracle's gain at {where}: {row['share']:.2f} (bar {BARS['share']})")
    return lines


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sweep", action="store_true", help="concurrency 1 … 32, temperatures 0 and 1")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--arms", nargs="+", default=["static", "compact"], help="the first is what others are over"
    )
    parser.add_argument("--pairs", type=int, default=6, help="at least 6 for a 95 %% interval")
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=16, help="of a run, whatever the concurrency")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--warm-up-turns", type=int, default=3)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--draft", default="demo-dflash2")
    parser.add_argument("--algorithm", default="DFLASH", choices=["DFLASH", "DSPARK"])
    parser.add_argument(
        "--server-flag", action="append", default=[], help="one more flag of the server; repeat it"
    )
    parser.add_argument("--no-oracle", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name, least in (
        ("pairs", 1),
        ("requests_per_client", 1),
        ("max_new_tokens", 16),
        ("min_requests", 1),
    ):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if min(options.concurrency) < 1 or min(options.temperature) < 0:
        parser.error("--concurrency must be at least 1, --temperature at least 0")
    for arm in options.arms:
        if not re.fullmatch(r"static(:[2-9]\d*)?|compact|cap-accept|off", arm):
            parser.error(f"--arms {arm}: static, static:N, compact, cap-accept or off")
    if options.sweep:
        options.concurrency, options.temperature = list(SWEEP_CONCURRENCY), list(SWEEP_TEMPERATURES)
    return options


def main() -> None:
    """Measures, prints, and writes the result if asked to."""
    options = parse()
    started = time.monotonic()
    source = provenance()
    benchmark = Benchmark(options)
    benchmark.run()
    oracles = {} if options.no_oracle else benchmark.oracles()
    rows = benchmark.rows(oracles)
    result = {
        **source,
        "seconds": round(time.monotonic() - started),
        "cost_table": benchmark.info.get("speculative_cost_table_json"),
        "cost_table_source": benchmark.info.get("speculative_cost_table_source"),
        "ratios": rows,
        "figures": benchmark.figures(),
        "verdicts": verdicts(rows),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(_rounded(result), indent=1) + "\n")
    show(rows, options.arms[0])
    for line in result["verdicts"]:
        print(line)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
