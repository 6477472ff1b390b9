"""Closed-loop serving of the shipped held-out prompts: arms interleaved on one server, ratios with their bounds.

    python benchmark/serving.py --sweep --out benchmark/results/serving_cpu.json

One server, started in compact, plays every arm through its live switches (`/set_internal_state`), A B B A …, so that
a slow minute of the machine hits all of them. For each concurrency and temperature, `--pairs` times: the same clients
send the same prompts, new to the server, and ask for as many tokens. The figure is the median over pairs of arm /
first arm, of decode tokens/s (`closed_loop.Segment.decode_rate`), with the distribution-free 95 % interval of a
median: order statistics of the pairs.

Points are measured one after the other, and `--out` is written after each. `--resume` goes on with the points that the
file lacks, on the same commit and with the same settings; `--max-points` ends a run early.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
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
ARM = r"static(:[2-9]\d*)?|compact|cap-accept|off"
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


def forget_prompts(server: LiveServer) -> None:
    """Empties the idle server's prefix cache: the second arm of a pair must not live off the first one's prefill."""
    status, body = server.call("POST", "/flush_cache")
    if status != 200:
        raise RuntimeError(f"the server does not flush its cache: {status} {body[:300]!r}")


def load_of(
    options: argparse.Namespace,
    prompts: Sequence[Sequence[int]],
    point: Point,
    requests_per_client: int | None = None,
    first: int = 0,
) -> Load:
    """The clients of a point. `first`: the prompt that client 0 begins with.

    Where it is not said how many requests a client sends, more where there are few clients, so that no run is over in
    a moment.
    """
    if requests_per_client is None:
        requests_per_client = max(options.requests_per_client, -(-options.min_requests // point.concurrency))
    turned = [*prompts[first:], *prompts[:first]]
    return Load(turned, point.concurrency, requests_per_client, options.max_new_tokens, point.temperature)


class Benchmark:
    """The sweep: owns what has been measured so far."""

    def __init__(self, options: argparse.Namespace, points: Sequence[Point]) -> None:
        self.options = options
        self.prompts = [prompt["token_ids"] for prompt in json.loads(DEMO_PROMPTS.read_text())]
        self.points = list(points)
        self.segments: dict[Point, dict[str, list[Segment]]] = {
            point: {arm: [] for arm in options.arms} for point in self.points
        }
        self.counts: dict[Point, dict[str, list[dict[str, float]]]] = {
            point: {arm: [] for arm in options.arms} for point in self.points
        }
        self.traces: dict[Point, list[list[int]]] = {}
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

    def load(self, point: Point, requests_per_client: int | None = None, first: int = 0) -> Load:
        """See `load_of`."""
        return load_of(self.options, self.prompts, point, requests_per_client, first)

    def run(self) -> Iterator[Point]:
        """Warms up, then measures point after point, and yields each when it is through."""
        options = self.options
        with serve([*self.flags(), "--ragged-verify-mode", "compact"]) as port:
            server = LiveServer(f"http://127.0.0.1:{port}")
            self.info = server.info()
            self._warm_up(server, port)
            for point in self.points:
                for number in range(options.pairs):
                    arms = options.arms if number % 2 == 0 else options.arms[::-1]
                    for arm in arms:
                        self._measure(server, port, point, arm, number)
                    self._show_progress(number, point)
                yield point

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
        forget_prompts(server)
        load = self.load(point, first=point.concurrency * number)
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

    def trace(self) -> None:
        """Keeps, from records of a static server, what each full batch's blocks committed, for the oracle."""
        with serve([*self.flags(), "--ragged-verify-mode", "static"], COMPONENTS) as port:
            server = LiveServer(f"http://127.0.0.1:{port}")
            for point in self.points:
                server.set_state("dspark_clear_info_records", True)
                run_load(port, self.load(point, max(1, 24 // point.concurrency)))
                records = server.info()["internal_states"][0]["dspark_info_record"]["records"]
                self.traces[point] = [
                    [req["acc_len"] for req in record["reqs"]]
                    for record in records
                    if record["bs"] == point.concurrency and len(record["reqs"]) == point.concurrency
                ]

    def oracle(self, point: Point) -> float | None:
        """The oracle's ratio, at the prices of the server that was measured; None without a trace."""
        if point not in self.traces:
            return None
        text = self.info.get("speculative_cost_table_json")
        if text is None:
            raise RuntimeError("the server has no cost table: there is nothing to price an oracle with")
        width, finest = (
            int(self.info[f"speculative_{name}"]) for name in ("num_draft_tokens", "verify_tier_tokens")
        )
        grid = TierGrid(TierRule(width, int(self.info["max_running_requests"]), finest_tokens=finest))
        return oracle_ratio(self.traces[point], parse_cost_table(text), grid)

    def rows(self, point: Point) -> list[dict[str, Any]]:
        """One result per arm after the first."""
        first, *others = self.options.arms
        oracle = self.oracle(point)
        rows = []
        for arm in others:
            base, mine = self.segments[point][first], self.segments[point][arm]
            ratios = [b.decode_rate / a.decode_rate for a, b in zip(base, mine, strict=True)]
            output = [b.output_rate / a.output_rate for a, b in zip(base, mine, strict=True)]
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

    def figures(self, point: Point) -> list[dict[str, Any]]:
        """Absolute figures of every arm: medians over its runs."""
        rows = []
        for arm, segments in self.segments[point].items():
            names = ("decode_rate", "output_rate", "accept_length")
            figures = {name: statistics.median(getattr(s, name) for s in segments) for name in names}
            for name in ("ttft", "inter_token"):
                for i, percentile in enumerate(("p50", "p99")):
                    figures[f"{name}_{percentile}"] = statistics.median(getattr(s, name)[i] for s in segments)
            rows.append({**asdict(point), "arm": arm, **figures})
        return rows


class Results:
    """What has been measured, in the order of the sweep, and the file it is kept in."""

    def __init__(self, options: argparse.Namespace, source: dict[str, Any]) -> None:
        skipped = ("out", "resume", "max_points", "sweep")
        self.settings = {name: value for name, value in vars(options).items() if name not in skipped}
        self.path: Path | None = options.out
        self.content: dict[str, Any] = {**source, "settings": self.settings, "seconds": 0}
        self.content |= {"cost_tables": [], "ratios": [], "figures": [], "verdicts": []}
        if options.resume:
            self._resume()

    def _resume(self) -> None:
        assert self.path is not None
        if not self.path.exists():
            return
        old = json.loads(self.path.read_text())
        for name in ("commit", "settings", "machine"):
            mine, theirs = (_without_load(content.get(name)) for content in (self.content, old))
            if mine != theirs:
                raise SystemExit(
                    f"--resume: {self.path} was measured with another {name} ({theirs}, now {mine}); "
                    "give another --out, or leave out --resume"
                )
        self.content = old

    def lacks(self, point: Point) -> bool:
        """Whether `point` has still to be measured."""
        return all(
            (row["concurrency"], row["temperature"]) != astuple(point) for row in self.content["ratios"]
        )

    def add(
        self,
        rows: Sequence[dict[str, Any]],
        figures: Sequence[dict[str, Any]],
        seconds: float,
        table: str | None,
    ) -> None:
        """A point is through: into the file with it."""
        content = self.content
        order = {point: i for i, point in enumerate(points_of(self.settings))}
        for name, more in (("ratios", rows), ("figures", figures)):
            content[name] = sorted(
                [*content[name], *_rounded(more)],
                key=lambda row: order[Point(row["concurrency"], row["temperature"])],
            )
        content["seconds"] = round(content["seconds"] + seconds)
        if table is not None and table not in content["cost_tables"]:
            content["cost_tables"].append(table)
        content["verdicts"] = verdicts(content["ratios"])
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(content, indent=1) + "\n")


def points_of(settings: Mapping[str, Any]) -> list[Point]:
    """All of a sweep."""
    return [Point(c, t) for t in settings["temperature"] for c in settings["concurrency"]]


def _without_load(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "load_average"} if isinstance(value, dict) else value


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
    parser.add_argument("--min-requests", type=int, default=32, help="of a run, whatever the concurrency")
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
    parser.add_argument("--resume", action="store_true", help="go on with the points that --out lacks")
    parser.add_argument("--max-points", type=int, help="measure so many points and end")
    options = parser.parse_args()
    for name, least in (
        ("pairs", 1),
        ("requests_per_client", 1),
        ("max_new_tokens", 16),
        ("min_requests", 1),
    ):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if options.resume and options.out is None:
        parser.error("--resume needs --out, the file to go on with")
    if options.max_points is not None and options.max_points < 1:
        parser.error("--max-points must be at least 1")
    if min(options.concurrency) < 1 or min(options.temperature) < 0:
        parser.error("--concurrency must be at least 1, --temperature at least 0")
    for arm in options.arms:
        if not re.fullmatch(ARM, arm):
            parser.error(f"--arms {arm}: static, static:N, compact, cap-accept or off")
    if options.sweep:
        options.concurrency, options.temperature = list(SWEEP_CONCURRENCY), list(SWEEP_TEMPERATURES)
    return options


def main() -> None:
    """Measures, prints, and writes the result if asked to."""
    options = parse()
    results = Results(options, provenance())
    missing = [point for point in points_of(vars(options)) if results.lacks(point)]
    benchmark = Benchmark(options, missing[: options.max_points])
    if benchmark.points and not options.no_oracle:
        benchmark.trace()
    started = time.monotonic()
    for point in benchmark.run() if benchmark.points else ():
        seconds, started = time.monotonic() - started, time.monotonic()
        table = benchmark.info.get("speculative_cost_table_json")
        results.add(benchmark.rows(point), benchmark.figures(point), seconds, table)
    show(results.content["ratios"], options.arms[0])
    for line in results.content["verdicts"]:
        print(line)
    left = len(missing) - len(benchmark.points)
    if left:
        print(f"{left} points to go: the same command with --resume")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
