"""The serving table of a GPU: concurrency × workload × arms, arms interleaved on one engine, ratios with their spread.

    python benchmark/gpu_serving.py --in-process --model-path PAIR/target --draft PAIR/dflash2 --out table.json
    python benchmark/gpu_serving.py --in-process … --concurrency 1,2,4 --resume --out table.json     # in pieces
    python benchmark/gpu_serving.py --in-process … --simulate-accept 4 --out simulated.json          # against a peer

One engine plays every arm through its live switches, A B … B A …, on the same prompts with as many output tokens. A run
is closed-loop. It ends when the first client is through with its requests (one, or more where there are few clients:
`--min-requests`), or `--seconds-per-run` after every client has its first token. A figure is the median over
`--repeats`; a ratio is over the first arm of the same repeat. Decode tokens/s is what a request decodes per second
after its first token × concurrency (`closed_loop.Segment`). The oracle verifies what will be accepted and one row more
(`serving.py`), from what the first static arm committed, priced with the engine's cost table. `--in-process` drives the
scheduler itself and needs no HTTP; without it a server is started, and what only the engine knows is missing (rows run,
oracle).

`--out` is written after each point; `--resume` goes on with the points it lacks. Arms: as in `serving.py`; `--lengths`
adds every fixed block length.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from closed_loop import Load
from engines import SIMULATE, Engine, InProcessEngine, Run, over_http
from prompt_files import PROMPT_SETS, cut_to, token_ids
from servers import ROOT, provenance

sys.path.insert(0, str(ROOT / "python"))

from serving import ARM, median_interval, oracle_ratio, settings_of

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORKLOADS = ("W1:0", "W1:1", "W2:0")
ARMS = ("static", "compact", "cap-accept", "off")
CONTEXT = 1024  # of the shipped pair; longer texts mean nothing to it
SETTLE_SECONDS = (
    180  # of compact at most, until its estimator is ready; seconds where steps take milliseconds
)
# Of a request. W1 and W2 were chosen by their first 128: a run ends with its fastest client, when the others have had
# two thirds of theirs or so.
OUTPUT_TOKENS = 160
PEER_PROMPT_TOKENS, PEER_OUTPUT_TOKENS = 128, 256
# Decode tokens/s of SGLang 0.5.17 on an H200 at Qwen3-8B's geometry, random weights, 128 prompt and 256 output tokens:
# without a draft, and DFLASH with full blocks of 8 and a simulated acceptance length of 4.
PEER = {
    1: (199.5, 617.9),
    4: (776.7, 2413.0),
    8: (1513.0, 4521.0),
    16: (2993.0, 8549.0),
    32: (5601.0, 13117.0),
    64: (9910.0, 15681.0),
    128: (15238.0, 16369.0),
}


@dataclass(frozen=True)
class Point:
    """A workload at one load."""

    prompts: str
    temperature: float
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompts} T={self.temperature:g} c={self.concurrency}"


def points_of(options: argparse.Namespace) -> list[Point]:
    """In the order in which they are measured: light loads first."""
    return [
        Point(name, float(temperature), concurrency)
        for concurrency in options.concurrency
        for name, _, temperature in (workload.partition(":") for workload in options.workloads)
    ]


def read_prompts(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """The prompts of every workload; before an engine is started, since they may be wrong.

    Raises:
        SystemExit: prompt and output together are longer than what the pair was trained for.
    """
    prompts = {name: token_ids(name) for name in {point.prompts for point in points_of(options)}}
    if options.prompt_tokens is not None:
        prompts = {name: cut_to(found, options.prompt_tokens) for name, found in prompts.items()}
    longest = max(len(ids) for found in prompts.values() for ids in found)
    if longest + options.output_tokens > CONTEXT:
        raise SystemExit(
            f"--output-tokens {options.output_tokens}: with a prompt of {longest} tokens that is more than {CONTEXT}"
        )
    return prompts


class Table:
    """Measures points on one engine."""

    def __init__(
        self, options: argparse.Namespace, engine: Engine, prompts: Mapping[str, list[list[int]]]
    ) -> None:
        self._options, self._engine, self._prompts = options, engine, prompts
        self._warm: set[int] = set()

    def load(self, point: Point, repeat: int) -> Load:
        """The clients of a point; each repeat has other prompts, as far as there are."""
        options, prompts = self._options, self._prompts[point.prompts]
        turns = -(-options.min_requests // point.concurrency)
        first = repeat * point.concurrency * turns % len(prompts)
        turned = [*prompts[first:], *prompts[:first]]
        return Load(
            turned,
            point.concurrency,
            turns,
            options.output_tokens,
            point.temperature,
            options.seconds_per_run,
        )

    def settle(self, points: Sequence[Point]) -> None:
        """Compact, until its estimator knows enough to plan by."""
        if "compact" not in self._options.arms or not points:
            return
        self._become("compact")
        busiest = max(points, key=lambda point: point.concurrency)
        started, turn = time.monotonic(), 0
        while not self._engine.state()["confidence_is_ready"]:
            if time.monotonic() - started > SETTLE_SECONDS:
                raise RuntimeError(f"the estimator is not ready after {SETTLE_SECONDS} s and {turn} turns")
            for temperature in sorted({point.temperature for point in points}):
                point = replace(busiest, temperature=temperature, concurrency=min(busiest.concurrency, 32))
                self._engine.run(replace(self.load(point, turn), max_new_tokens=64))
            turn += 1

    def measure(self, point: Point) -> dict[str, Any]:
        """All arms of a point, `repeats` times; its row of the file."""
        arms, runs = self._options.arms, {arm: list[Run]() for arm in self._options.arms}
        self._warm_up(point)
        for repeat in range(self._options.repeats):
            for arm in arms if repeat % 2 == 0 else arms[::-1]:
                self._become(arm)
                runs[arm].append(self._engine.run(self.load(point, repeat)))
        oracle = self._oracle(point, [batch for run in runs[arms[0]] for batch in run.committed])
        figures = {
            arm: figures_of(runs[arm], runs[arms[0]], point.concurrency, None if arm == arms[0] else oracle)
            for arm in arms
        }
        return {
            "prompts": point.prompts,
            "temperature": point.temperature,
            "concurrency": point.concurrency,
            "oracle": oracle,
            "arms": figures,
        }

    def _become(self, arm: str) -> None:
        self._engine.set_state(settings_of(arm))
        self._engine.forget()

    def _warm_up(self, point: Point) -> None:
        """Each arm for a moment at a load that it has not had yet; compact before every point, to see its texts."""
        for arm in self._options.arms:
            if arm == "compact" or point.concurrency not in self._warm:
                self._become(arm)
                num_tokens = min(48 if arm == "compact" else 16, self._options.output_tokens)
                self._engine.run(replace(self.load(point, self._options.repeats), max_new_tokens=num_tokens))
        self._warm.add(point.concurrency)

    def _oracle(self, point: Point, committed: Sequence[Sequence[int]]) -> float | None:
        """Its ratio over full blocks; None where what full batches committed or step costs are not known."""
        from flashspark.scheduler.graph_build import GPU_RELATIVE, GPU_RELATIVE_REQS
        from flashspark.speculative.cost_table import parse_cost_table
        from flashspark.speculative.tiers import TierGrid, TierRule

        info, is_static = self._engine.info, self._options.arms[0] == "static"
        text = info.get("speculative_cost_table_json")
        if not committed or text is None or not is_static:
            return None
        width, finest = (
            int(info[f"speculative_{name}"]) for name in ("num_draft_tokens", "verify_tier_tokens")
        )
        on_gpu = str(info["device"]).startswith("cuda")
        spacing = {"relative": GPU_RELATIVE, "relative_reqs": GPU_RELATIVE_REQS} if on_gpu else {}
        grid = TierGrid(TierRule(width, int(info["max_running_requests"]), finest_tokens=finest, **spacing))
        return oracle_ratio(committed, parse_cost_table(text), grid)


def figures_of(
    runs: Sequence[Run], base: Sequence[Run], concurrency: int, oracle: float | None
) -> dict[str, Any]:
    """An arm's figures at one point, over the `base` arm's; medians, rates in tokens/s, times in ms."""
    ratios = [
        run.segment.decode_rate / other.segment.decode_rate for run, other in zip(runs, base, strict=True)
    ]
    segments = [run.segment for run in runs]
    counts = {name: sum(run.counts[name] for run in runs) for name in runs[0].counts}
    num_steps, ratio = max(1.0, counts["verify_steps"]), statistics.median(ratios)
    rate, accept = (
        statistics.median(getattr(segment, name) for segment in segments)
        for name in ("decode_rate", "accept_length")
    )
    figures: dict[str, Any] = {
        "decode_rate": rate,
        "decode_rates": [segment.decode_rate for segment in segments],
        "ratio": ratio,
        "ratios": ratios,
        "interval": median_interval(ratios),
        "output_rate": statistics.median(segment.output_rate for segment in segments),
        "accept_length": accept,
        "step_ms": accept * concurrency / rate * 1e3,
        "verified": counts["verify_tokens"] / num_steps,
        "padded": counts["rows_run"] / num_steps if "rows_run" in counts else None,
        "draft_free": counts["draft_free_steps"] / max(1.0, counts["num_steps"]),
        "retractions": counts["num_retractions"],
        "share": None if oracle is None or oracle <= 1 else (ratio - 1) / (oracle - 1),
    }
    for name in ("ttft", "inter_token"):
        for place, percentile in enumerate(("p50", "p99")):
            values = [getattr(segment, name)[place] * 1e3 for segment in segments]
            figures[f"{name}_{percentile}_ms"] = statistics.median(values)
    return figures


def show(row: Mapping[str, Any]) -> None:
    """One point's table."""
    point = Point(row["prompts"], row["temperature"], row["concurrency"])
    oracle = "" if row["oracle"] is None else f", oracle {row['oracle']:.3f}"
    print(f"\n{point}{oracle}")
    print(
        f"{'arm':11s} {'decode/s':>9s} {'ratio':>6s} {'from':>6s} {'to':>6s} {'output/s':>9s} {'TTFT ms':>7s} "
        f"{'p99':>6s} {'token ms':>8s} {'p99':>6s} {'accept':>6s} {'verified':>8s} {'run':>5s} {'free':>5s} "
        f"{'step ms':>7s} {'share':>6s}"
    )
    for arm, f in row["arms"].items():
        print(
            f"{arm:11s} {f['decode_rate']:9.1f} {f['ratio']:6.3f} {min(f['ratios']):6.3f} {max(f['ratios']):6.3f} "
            f"{f['output_rate']:9.1f} {f['ttft_p50_ms']:7.1f} {f['ttft_p99_ms']:6.1f} {f['inter_token_p50_ms']:8.2f} "
            f"{f['inter_token_p99_ms']:6.2f} {f['accept_length']:6.2f} {f['verified']:8.2f} "
            f"{_or_dash(f['padded'], '5.2f')} {f['draft_free']:5.0%} {f['step_ms']:7.2f} {_or_dash(f['share'], '6.2f')}"
        )
    sys.stdout.flush()


def show_summary(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per point: every arm over the first, and compact over the best fixed length where those were run."""
    print("\nratios of decode tokens/s over the first arm")
    for row in rows:
        arms = row["arms"]
        shown = "  ".join(f"{arm} {f['ratio']:.3f}" for arm, f in list(arms.items())[1:])
        point = str(Point(row["prompts"], row["temperature"], row["concurrency"]))
        fixed = {arm: f["decode_rate"] for arm, f in arms.items() if arm.startswith("static")}
        if "compact" in arms and len(fixed) > 1:
            best = max(fixed, key=lambda arm: fixed[arm])
            shown += f"  | compact / {best} {arms['compact']['decode_rate'] / fixed[best]:.3f}"
        print(f"{point:14s} {shown}")


def show_peer(rows: Sequence[Mapping[str, Any]]) -> None:
    """Simulated acceptance against the peer's figures."""
    print("\nsimulated acceptance: decode tokens/s here / SGLang 0.5.17 = ratio")
    for row in rows:
        peer = PEER.get(row["concurrency"])
        if peer is None:
            continue
        ours = {arm: figures["decode_rate"] for arm, figures in row["arms"].items()}
        pairs = [
            f"{arm} {ours[arm]:.1f} / {theirs:.1f} = {ours[arm] / theirs:.3f}"
            for arm, theirs in (("static", peer[1]), ("off", peer[0]))
            if arm in ours
        ]
        print(f"c={row['concurrency']:<4d} {', '.join(pairs)}")


class Results:
    """The file of a table: measured points, in order, and what they were measured with."""

    _RUN = ("out", "resume", "budget_seconds", "concurrency", "max_running_requests", "commit")

    def __init__(self, options: argparse.Namespace) -> None:
        source = provenance()
        source["commit"] = options.commit or source["commit"]
        source["machine"] |= _accelerator()
        settings = {name: value for name, value in vars(options).items() if name not in self._RUN}
        self.path: Path = options.out
        self.content: dict[str, Any] = {**source, "settings": settings, "points": [], "engines": []}
        if options.resume and self.path.exists():
            old = json.loads(self.path.read_text())
            for name in ("commit", "settings"):
                if old[name] != json.loads(json.dumps(self.content[name])):
                    raise SystemExit(
                        f"--resume: {self.path} was measured with another {name}: {old[name]}, now "
                        f"{self.content[name]}; give another --out, or leave out --resume"
                    )
            self.content = old

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All that is measured."""
        rows: list[dict[str, Any]] = self.content["points"]
        return rows

    def lacks(self, point: Point) -> bool:
        """Whether `point` has still to be measured."""
        return all(
            Point(row["prompts"], row["temperature"], row["concurrency"]) != point for row in self.rows
        )

    def describe(self, engine: Engine, seconds: float) -> None:
        """Adds the engine that the next points are measured with."""
        names = (
            "max_running_requests",
            "max_total_num_tokens",
            "dtype",
            "device",
            "attention_backend",
            "speculative_cost_table_json",
            "speculative_num_draft_tokens",
        )
        known = {name: engine.info[name] for name in names if name in engine.info}
        self.content["engines"].append(
            {"command": self.content["command"], "start_seconds": seconds, **known}
        )

    def add(self, row: Mapping[str, Any], seconds: float) -> None:
        """A point is through: into the file with it."""
        engine = len(self.content["engines"]) - 1
        rows = [*self.rows, {**_rounded(row), "seconds": round(seconds, 1), "engine": engine}]
        self.content["points"] = sorted(
            rows, key=lambda row: (row["prompts"], row["temperature"], row["concurrency"])
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def _accelerator() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"torch": torch.__version__}
    return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _or_dash(value: float | None, form: str) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--draft", default="demo-dflash2")
    parser.add_argument("--algorithm", default="DFLASH", choices=["DFLASH", "DSPARK"])
    parser.add_argument("--in-process", action="store_true", help="drive the scheduler itself: no HTTP")
    parser.add_argument("--server-args", default="", help="further flags of the engine, one quoted string")
    parser.add_argument(
        "--max-running-requests", type=int, help="of the engine (default: the highest concurrency)"
    )
    parser.add_argument("--concurrency", type=numbers, default=list(CONCURRENCY), help="1,2,4")
    parser.add_argument("--workloads", nargs="+", help=f"SET:TEMPERATURE (default: {' '.join(WORKLOADS)})")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="the first is what others are over")
    parser.add_argument("--lengths", action="store_true", help="also every fixed block length, static:2 … 7")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, help="of a request (default: 160; simulated: 256)")
    parser.add_argument("--prompt-tokens", type=int, help="cut and fill prompts to exactly so many")
    parser.add_argument("--min-requests", type=int, default=3, help="of a run, whatever the concurrency")
    parser.add_argument("--seconds-per-run", type=float, default=3.0, help="at full concurrency")
    parser.add_argument("--simulate-accept", type=float, help="simulated acceptance length, full blocks")
    parser.add_argument(
        "--budget-seconds", type=float, help="begin no point that would not be through by then"
    )
    parser.add_argument("--commit", help="to record, where there is no repository to ask")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on with the points that --out lacks")
    options = parser.parse_args(arguments)
    if options.simulate_accept is not None:
        options.arms, options.workloads = ["static", "off"], options.workloads or ["W1:0"]
        options.prompt_tokens = options.prompt_tokens or PEER_PROMPT_TOKENS
        options.output_tokens = options.output_tokens or PEER_OUTPUT_TOKENS
    options.output_tokens = options.output_tokens or OUTPUT_TOKENS
    options.workloads = options.workloads or list(WORKLOADS)
    if options.lengths:
        options.arms = [*options.arms, *(f"static:{width}" for width in range(2, 8))]
    for arm in options.arms:
        if not re.fullmatch(ARM, arm):
            parser.error(f"--arms {arm}: static, static:N, compact, cap-accept or off")
    for workload in options.workloads:
        if not re.fullmatch(rf"({'|'.join(PROMPT_SETS)}):\d+(\.\d+)?", workload):
            parser.error(
                f"--workloads {workload}: one of {', '.join(PROMPT_SETS)}, a colon and a temperature"
            )
    if min(options.concurrency) < 1 or options.repeats < 1 or options.min_requests < 1:
        parser.error("--concurrency, --repeats and --min-requests must be at least 1")
    return options


@contextlib.contextmanager
def started(options: argparse.Namespace) -> Iterator[Engine]:
    """The engine that the command line describes."""
    is_ragged = any(arm in ("compact", "cap-accept") for arm in options.arms)
    flags = [
        *("--model-path", options.model_path, "--speculative-draft-model-path", options.draft),
        *("--speculative-algorithm", options.algorithm, "--random-seed", "1"),
        *("--max-running-requests", str(options.max_running_requests or max(options.concurrency))),
        *("--ragged-verify-mode", "compact" if is_ragged else "static"),
        *("--decode-log-interval", "1000000"),
        *shlex.split(options.server_args),
    ]
    simulated = options.simulate_accept
    environment = {} if simulated is None else {SIMULATE: f"{simulated:g}"}
    if options.in_process:
        os.environ.update(environment)
        yield InProcessEngine(flags)
    else:
        with over_http(flags, environment) as engine:
            yield engine


def main() -> None:
    """Measures, prints, writes."""
    options = parse()
    results, began = Results(options), time.monotonic()
    missing = [point for point in points_of(options) if results.lacks(point)]
    print(f"{len(missing)} of {len(points_of(options))} points to measure", flush=True)
    if missing:
        prompts = read_prompts(options)
        with started(options) as engine:
            table, ready_s = Table(options, engine, prompts), time.monotonic()
            results.describe(engine, ready_s - began)
            print(f"the engine is ready after {ready_s - began:.0f} s", flush=True)
            table.settle(missing)
            print(f"warm after {time.monotonic() - ready_s:.0f} s more", flush=True)
            _measure_all(options, table, results, missing, began)
    show_summary(results.rows)
    if options.simulate_accept is not None:
        show_peer(results.rows)
    left = sum(results.lacks(point) for point in points_of(options))
    print(f"{left} points to go: the same command with --resume" if left else "all points are measured")


def _measure_all(
    options: argparse.Namespace, table: Table, results: Results, points: Sequence[Point], began: float
) -> None:
    took: list[float] = []
    for place, point in enumerate(points):
        left = sum(_weight(other) for other in points[place:])
        per_weight = sum(took) / sum(map(_weight, points[:place])) if place else 0.0
        elapsed, next_s = time.monotonic() - began, per_weight * _weight(point)
        print(
            f"\n[{place + 1} of {len(points)}] {point}: {elapsed:.0f} s gone, about {per_weight * left:.0f} s left",
            flush=True,
        )
        if options.budget_seconds is not None and elapsed + next_s > options.budget_seconds:
            print(f"it would not be through after {options.budget_seconds:g} s: stopping here")
            return
        started_s = time.monotonic()
        row = table.measure(point)
        took.append(time.monotonic() - started_s)
        results.add(row, took[-1])
        show(row)


def _weight(point: Point) -> float:
    """How long a point takes beside others, roughly: steps get longer with the load, few clients get more turns."""
    return 1 + point.concurrency / 64 + 2 / point.concurrency


if __name__ == "__main__":
    main()
