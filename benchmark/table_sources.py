"""Serving with a profiled cost table against serving with the start-up table: the same load, two servers in turn.

    python benchmark/table_sources.py --table d/sps.json --out benchmark/results/table_sources_cpu.json

Both servers are up all the time and one of them has work: A B B A …, a median over `--pairs` with its 95 % interval,
as in `serving.py`. Each is warmed up until its acceptance estimator is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from closed_loop import run_load
from servers import ROOT, provenance, serve
from serving import Point, forget_prompts, load_of, median_interval

sys.path.insert(0, str(ROOT / "python"))

from flashspark.benchmark.live_server import LiveServer
from flashspark.demo import DEMO_PROMPTS

FLAGS = ["--model-path", "demo", "--speculative-algorithm", "DFLASH"]
FLAGS += ["--speculative-draft-model-path", "demo-dflash2", "--ragged-verify-mode", "compact"]
FLAGS += ["--incremental-streaming-output"]


class Server:
    """One of the two, with the load it is given."""

    def __init__(self, port: int, prompts: list[list[int]], options: argparse.Namespace) -> None:
        self.port, self.prompts, self.options = port, prompts, options
        self.live = LiveServer(f"http://127.0.0.1:{port}")

    def rate(self, concurrency: int, temperature: float, first: int) -> float:
        """Decode tokens/s of one run that begins at prompt `first`."""
        forget_prompts(self.live)
        load = load_of(self.options, self.prompts, Point(concurrency, temperature), first=first)
        return run_load(self.port, load).decode_rate

    def warm_up(self) -> None:
        """Until the estimator has learnt enough to trim, at every temperature and concurrency."""
        for turn in range(20):
            for temperature in self.options.temperature:
                self.rate(max(self.options.concurrency), temperature, 8 * turn)
            if self.live.info()["internal_states"][0]["confidence_is_ready"] and turn:
                return
        raise RuntimeError("the estimator does not get ready")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ratios of the profiled table over the start-up table, per point."""
    prompts = [prompt["token_ids"] for prompt in json.loads(DEMO_PROMPTS.read_text())]
    table = ["--speculative-dspark-sps-table-path", str(options.table)]
    points, sources = [], {}
    with contextlib.ExitStack() as stack:
        servers = {
            name: Server(stack.enter_context(serve([*FLAGS, *flags])), prompts, options)
            for name, flags in (("start-up", []), ("profiled", table))
        }
        for name, server in servers.items():
            sources[name] = server.live.info()["speculative_cost_table_source"]
            server.warm_up()
        for temperature in options.temperature:
            for concurrency in options.concurrency:
                rates: dict[str, list[float]] = {name: [] for name in servers}
                for number in range(options.pairs):
                    for name in list(servers)[:: 1 if number % 2 == 0 else -1]:
                        rates[name].append(servers[name].rate(concurrency, temperature, concurrency * number))
                pairs = [b / a for a, b in zip(rates["start-up"], rates["profiled"], strict=True)]
                points.append(
                    {
                        "concurrency": concurrency,
                        "temperature": temperature,
                        "ratio": statistics.median(pairs),
                        "interval": median_interval(pairs),
                        "pairs": pairs,
                        "decode_rate": {name: statistics.median(rate) for name, rate in rates.items()},
                    }
                )
                low, high = points[-1]["interval"]
                print(
                    f"T={temperature:g}, {concurrency} at once: profiled / start-up "
                    f"{points[-1]['ratio']:.3f} ({low:.3f} … {high:.3f})",
                    flush=True,
                )
    return {"sources": sources, "points": points, "table": json.loads(options.table.read_text())}


def main() -> None:
    """Measures, prints, and writes the result if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--table", type=Path, required=True, help="what the profiler wrote")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.table.is_file():
        parser.error(f"--table {options.table}: no such file; profile a server first (docs/profiling.md)")
    result = {**provenance(), **measure(options)}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
