"""The serving table of a GPU: concurrency × workload × arms, arms interleaved on one engine, ratios with their spread.

    python benchmark/gpu_serving.py --in-process --model-path PAIR/target --draft PAIR/dflash2 --out table.json
    python benchmark/gpu_serving.py --in-process … --concurrency 1,2,4 --resume --out table.json     # in pieces
    python benchmark/gpu_serving.py --in-process … --simulate-accept 4 --out simulated.json          # against a peer
    python benchmark/gpu_serving.py --in-process … --breakdown FOLDER --out table.json   # then `step_breakdown.py`

One engine plays every arm through its live switches, A B … B A …, on the same prompts with as many output tokens, and
in process with the same draws: sampled tokens are the same too, until the arms verify different numbers of rows. A run
is closed-loop. It ends when the first client is through with its requests (one; a single client has
`--min-requests`), or some seconds after every client has its first token (`seconds_of`). A figure is the median over
the repeats (`repeats_of`); a ratio is over the first arm of the same repeat, and is told apart into how long a step
takes and what it commits. Decode tokens/s is what a request decodes per second after its first token × concurrency
(`closed_loop.Segment`). The oracle verifies what will be accepted and one row more
(`serving.py`), from what the first static arm committed, priced with the engine's cost table. `--in-process` drives the
scheduler itself and needs no HTTP; without it a server is started, and what only the engine knows is missing (rows run,
oracle).

`--out` is written after each point; `--resume` goes on with the points it lacks. Arms: as in `serving.py`. `--lengths`
compares compact with the best fixed block length: one short run of each in the first repeat finds it, and it runs right
after compact in the others, so that the choice and the comparison are not of the same runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from closed_loop import Load
from engines import SIMULATE, Engine, InProcessEngine, Run, over_http
from prompt_files import PROMPT_SETS, cut_to, token_ids
from servers import ROOT

sys.path.insert(0, str(ROOT / "python"))

from serving import ARM, median_interval, oracle_ratio, settings_of
from serving_file import Point, Results, described, workload_of
from serving_report import show, show_peer, show_summary

from flashspark.heap import SCHEDULER_FULL_PASS_EVERY, freeze_heap

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORKLOADS = ("W1:0", "W1:1", "W2:0")
ARMS = ("static", "compact", "off", "cap-accept")
CAP_ACCEPT_AT = (8, 32, 128)  # full blocks with a cutoff are a check, not a way to serve
# Of an arm that speculates, in at most MORE_REPEATS times as many repeats: with few clients a run is of few texts, and
# one that parts at a near-tie, after a step of fewer rows, is accepted otherwise from there on.
MIN_PROMPTS, MORE_REPEATS = 64, 4
CONTEXT = 1024  # of the shipped pair; longer texts mean nothing to it
SETTLE_SECONDS = (
    180  # of compact at most, until its estimator is ready; seconds where steps take milliseconds
)
# From so many clients on a run counts after some steps of all of them: the first blocks of everybody are verified in
# full, since nothing is known of them, and of so many requests such a step takes as long as five without a draft. More
# steps than these would leave too few before the fastest client of a greedy workload is through.
SETTLING_FROM, SETTLING_STEPS = 128, 8
# Of a request. W1 and W2 were chosen by their first 128: a run ends with its fastest client, when the others have had
# two thirds of theirs or so.
OUTPUT_TOKENS = 160
PEER_PROMPT_TOKENS, PEER_OUTPUT_TOKENS = 128, 256


def points_of(options: argparse.Namespace) -> list[Point]:
    """In the order in which they are measured: light loads first."""
    return [
        Point(*workload_of(workload), concurrency)
        for concurrency in options.concurrency
        for workload in options.workloads
    ]


def turns_of(options: argparse.Namespace, concurrency: int) -> int:
    """Requests that a client sends before the run may end. Several clients one each: a later one's prefill would hold
    up the others."""
    turns: int = options.min_requests if concurrency == 1 else 1
    return turns


def repeats_of(options: argparse.Namespace, arm: str, concurrency: int) -> int:
    """How often an arm runs at a load; 0: not at all."""
    repeats: int = options.repeats
    if arm == "cap-accept":
        return int(concurrency in options.cap_accept_at)
    if arm == "off":
        return repeats
    return max(repeats, min(MORE_REPEATS * repeats, -(-MIN_PROMPTS // concurrency)))


def seconds_of(options: argparse.Namespace, arm: str, concurrency: int) -> float:
    """The longest that a run of an arm counts. Few clients need long to get through several prompts; many see many
    requests in little time, and without drafts one is like the other: half as long will do. Where compact too does
    without drafts it has to be as long, or its texts, and with them its attention, would be longer."""
    seconds: float = options.seconds_per_run
    if concurrency >= SETTLING_FROM:
        return 0.75 * seconds
    seconds *= 1.5 if concurrency == 1 else 1.0
    return seconds / 2 if arm == "off" else seconds


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

    def load(self, point: Point, repeat: int, arm: str = "compact") -> Load:
        """The clients of a point; each repeat has other prompts, as far as there are, and other draws."""
        options, prompts = self._options, self._prompts[point.prompts]
        turns = turns_of(options, point.concurrency)
        first = repeat * point.concurrency * turns % len(prompts)
        turned = [*prompts[first:], *prompts[:first]]
        seconds = seconds_of(options, arm, point.concurrency)
        return Load(
            turned,
            point.concurrency,
            turns,
            options.output_tokens,
            point.temperature,
            seconds,
            seed=1 + repeat,
            settling_steps=SETTLING_STEPS if point.concurrency >= SETTLING_FROM else 0,
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
        """All arms of a point, as often as each is to run; its row of the file."""
        repeats = {
            arm: count
            for arm in self._options.arms
            if (count := repeats_of(self._options, arm, point.concurrency))
        }
        arms, runs, swept = list(repeats), {arm: list[Run]() for arm in repeats}, dict[str, float]()
        best, fixed = "", list[Run]()
        self._warm_up(point, arms)
        for repeat in range(max(repeats.values())):
            for arm in arms if repeat % 2 == 0 else arms[::-1]:
                if repeat >= repeats[arm]:
                    continue
                self._become(arm)
                runs[arm].append(self._engine.run(self.load(point, repeat, arm)))
                if arm == "compact" and best:
                    fixed.append(self._run_fixed(best, self.load(point, repeat)))
            if repeat == 0 and point.workload in map(workload_of, self._options.lengths):
                swept = self._sweep(point)
                best = max(swept, key=lambda arm: swept[arm])
        oracle = self._oracle(point, [batch for run in runs[arms[0]] for batch in run.committed])
        figures = {
            arm: figures_of(runs[arm], runs[arms[0]], None if arm == arms[0] else oracle) for arm in arms
        }
        over_fixed = {"best_fixed": best_fixed_of(runs["compact"], fixed, best, swept)} if best else {}
        return {
            "prompts": point.prompts,
            "temperature": point.temperature,
            "concurrency": point.concurrency,
            "oracle": oracle,
            "arms": figures,
            **over_fixed,
        }

    def _sweep(self, point: Point) -> dict[str, float]:
        """Decode tokens/s of every fixed block length: a short run of each over the prompts of the first repeat."""
        load, rates = self.load(point, 0), {}
        load = replace(load, requests_per_client=-(-load.requests_per_client // 2), seconds=load.seconds / 2)
        for width in range(2, int(self._engine.info["speculative_num_draft_tokens"]) + 1):
            arm = f"static:{width}"
            rates[arm] = self._run_fixed(arm, load).segment.decode_rate
        return rates

    def _run_fixed(self, arm: str, load: Load) -> Run:
        """With prefill of its own: who finds prompts prefilled starts everybody at once, and counts other steps."""
        self._become(arm)
        return self._engine.run(load)

    def _become(self, arm: str) -> None:
        self._engine.set_state(settings_of(arm))
        self._engine.forget()

    def _warm_up(self, point: Point, arms: Sequence[str]) -> None:
        """Each arm for a moment at a load that it has not had yet; compact before every point, to see its texts."""
        for arm in arms:
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


def figures_of(runs: Sequence[Run], base: Sequence[Run], oracle: float | None) -> dict[str, Any]:
    """An arm's figures at one point, over the `base` arm's of the same repeats; medians; tokens/s and ms.

    `ratio` is `accept_ratio` (what a step commits) / `step_ratio` (how long it takes), but for the medians.
    """
    segments = [run.segment for run in runs]
    pairs = list(zip(segments, (run.segment for run in base[: len(runs)]), strict=True))
    ratios = [mine.decode_rate / other.decode_rate for mine, other in pairs]
    step_ratios = [mine.frame_seconds / other.frame_seconds for mine, other in pairs]
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
        "step_ratio": statistics.median(step_ratios),
        "accept_ratio": statistics.median(a * b for a, b in zip(ratios, step_ratios, strict=True)),
        "interval": median_interval(ratios),
        "output_rate": statistics.median(segment.output_rate for segment in segments),
        "accept_length": accept,
        "step_ms": statistics.median(segment.frame_seconds for segment in segments) * 1e3,
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


def best_fixed_of(
    compact: Sequence[Run], fixed: Sequence[Run], best: str, swept: Mapping[str, float]
) -> dict[str, Any]:
    """Compact over the best fixed block length, each of its runs over compact's of the same repeat; where there was one
    repeat alone, over the run that found it."""
    rates = [run.segment.decode_rate for run in fixed] or [swept[best]]
    mine = [run.segment.decode_rate for run in compact][-len(rates) :]
    ratios = [a / b for a, b in zip(mine, rates, strict=True)]
    return {
        "arm": best,
        "decode_rate": statistics.median(rates),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "swept": dict(swept),
    }


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
    parser.add_argument(
        "--lengths", nargs="*", help="sweep fixed block lengths (without a value: everywhere)"
    )
    parser.add_argument(
        "--cap-accept-at", type=numbers, default=list(CAP_ACCEPT_AT), help="where it runs, once"
    )
    parser.add_argument("--repeats", type=int, default=3, help="at least; more where runs are short")
    parser.add_argument("--output-tokens", type=int, help="of a request (default: 160; simulated: 256)")
    parser.add_argument("--prompt-tokens", type=int, help="cut and fill prompts to exactly so many")
    parser.add_argument("--min-requests", type=int, default=4, help="of a run with a single client")
    parser.add_argument(
        "--seconds-per-run", type=float, default=1.6, help="at most, more or less by the load"
    )
    parser.add_argument("--simulate-accept", type=float, help="simulated acceptance length, full blocks")
    parser.add_argument(
        "--budget-seconds", type=float, help="begin no point that would not be through by then"
    )
    parser.add_argument(
        "--breakdown", type=Path, help="folder: of a step, on the same engine after the points"
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
    if options.lengths is not None and "compact" not in options.arms:
        parser.error("--lengths compares compact with fixed lengths: --arms lacks compact")
    options.lengths = options.workloads if options.lengths == [] else options.lengths or []
    if options.arms[0] in ("off", "cap-accept"):
        parser.error(
            f"--arms {options.arms[0]} …: the first arm runs in every repeat: static, static:N or compact"
        )
    if options.breakdown is not None and not options.in_process:
        parser.error("--breakdown looks into the engine: --in-process")
    for arm in options.arms:
        if not re.fullmatch(ARM, arm):
            parser.error(f"--arms {arm}: static, static:N, compact, cap-accept or off")
    for workload in (*options.workloads, *options.lengths):
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
        engine = InProcessEngine(flags)
        freeze_heap(SCHEDULER_FULL_PASS_EVERY)  # as the server's scheduler process does
        yield engine
    else:
        with over_http(flags, environment) as engine:
            yield engine


def main() -> None:
    """Measures, prints, writes."""
    options = parse()
    results, began = Results(options), time.monotonic()
    missing = [point for point in points_of(options) if results.lacks(point)]
    print(f"{len(missing)} of {len(points_of(options))} points to measure", flush=True)
    if missing or lacks_breakdown(options):
        prompts = read_prompts(options)
        with started(options) as engine:
            table, ready_s = Table(options, engine, prompts), time.monotonic()
            results.describe(engine, ready_s - began)
            print(f"the engine is ready after {ready_s - began:.0f} s", flush=True)
            table.settle(missing)
            print(f"warm after {time.monotonic() - ready_s:.0f} s more", flush=True)
            _measure_all(options, table, results, missing, began)
            if lacks_breakdown(options):
                _break_down(options, engine)
    show_summary(results.rows)
    if options.simulate_accept is not None:
        show_peer(results.rows)
    left = sum(results.lacks(point) for point in points_of(options))
    print(f"{left} points to go: the same command with --resume" if left else "all points are measured")


def lacks_breakdown(options: argparse.Namespace) -> bool:
    """Whether one is asked for that was not made to its end, or not with `--resume`."""
    if options.breakdown is None:
        return False
    path = options.breakdown / "step_breakdown.json"
    return not (options.resume and path.exists() and "bars" in json.loads(path.read_text()))


def _break_down(options: argparse.Namespace, engine: Engine) -> None:
    from step_breakdown import Breakdown, trace_of
    from step_breakdown import parse as breakdown_options

    assert isinstance(engine, InProcessEngine)
    wanted, _ = breakdown_options(["--out", str(options.breakdown)])
    if (
        options.simulate_accept is not None
    ):  # steps beside their products is what the peer's figures are about
        wanted.traces = []
    wanted.commit = options.commit
    wanted.requests = [n for n in wanted.requests if n <= engine.info["max_running_requests"]]
    wanted.traces = [name for name in wanted.traces if trace_of(name)[1] in wanted.requests]
    if "compact" not in options.arms:
        wanted.modes.remove("compact")
        wanted.traces = [name for name in wanted.traces if not name.startswith("compact")]
    print("\nwhere the time goes", flush=True)
    started_s = time.monotonic()
    failures = Breakdown(
        engine.scheduler, engine.info["context_length"], described(engine.info), wanted
    ).run()
    print(f"broken down in {time.monotonic() - started_s:.0f} s, {len(failures)} failures", flush=True)


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
