"""Measures what the steps of a running server cost, and fits the cost table that its planner reads.

    SGLANG_DSPARK_ENABLE_SPS_RECORD=1 SGLANG_SIMULATE_ACC_LEN=1.0 python -m flashspark.launch_server …
    python -m flashspark.benchmark.dspark_sps_profiler all --base-url http://127.0.0.1:30000 --out table.json

`run` collects, `fit` makes the table of what `run` collected, `plot` draws both, `all` does the three. Without
--fracs the server must verify statically, and the table prices rows alone; with --fracs it must be in mode compact,
and the table prices requests and rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flashspark
from flashspark.speculative.cost_table import load_cost_table

from .live_server import LiveServer, ProfileError, ServerFacts
from .sps_fit import fit_errors, fit_table
from .sps_plot import can_plot, draw
from .sps_rounds import ProfileFiles
from .sps_sweep import Progress, Sweep, SweepSettings, default_batch_sizes, plan_cells

WORST_ERROR_TO_PASS_OVER = 0.15


def run(args: argparse.Namespace, files: ProfileFiles) -> None:
    """Collects the cells."""
    server = LiveServer(args.base_url, args.api_key)
    facts = ServerFacts.check(server.info(), args.fracs is not None, args.local_tokenizer_path)
    settings = SweepSettings(
        input_len=args.input_len,
        temperature=args.temperature,
        min_steady_steps=args.min_steady_steps,
        min_steady_seconds=args.min_steady_seconds,
        round_timeout_s=args.round_timeout,
        ramp_token_slack=args.ramp_token_slack,
        poll_seconds=args.poll_seconds,
    )
    cells, skipped = plan_cells(facts, settings, _batch_sizes(args, facts), args.fracs, args.repeats)
    progress = Progress(len(cells))
    progress.note(
        f"{facts.algorithm} in mode {facts.mode}, blocks of {facts.width} rows; {len(cells)} cells of at least "
        f"{settings.min_steady_seconds:g} s and {settings.min_steady_steps} steps"
    )
    if facts.mode == "cap-accept":
        progress.note(
            "warning: cap-accept runs full blocks whatever is pinned, so these cells show that pins work, not what "
            "rows cost: for a table, profile in compact"
        )
    for line in skipped:
        progress.note(line)
    started = time.time()
    rounds = Sweep(server, facts, settings, files, progress).run(cells)
    progress.note("")
    manifest = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.time() - started, 1),
        "base_url": args.base_url,
        "kind": "1-D" if args.fracs is None else "2-D",
        "batch_size_per_rank": sorted({cell.batch_size for cell in cells}),
        "fracs": args.fracs,
        "repeats": args.repeats,
        "num_rounds": len(rounds),
        "skipped": skipped,
        "settings": vars(settings),
        "server": vars(facts),
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "flashspark": flashspark.__version__,
    }
    files.manifest.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    print(f"{len(rounds)} cells in {files.rounds}")


def fit(args: argparse.Namespace, files: ProfileFiles) -> None:
    """Makes the table, reads it back, and says how well it describes the cells."""
    rounds = files.load_rounds()
    table = fit_table(rounds, args.max_batch_tokens)
    files.table.write_text(table.to_json(), encoding="utf-8")
    print(f"wrote {files.table}")
    if args.self_check:
        _self_check(files)
    if not args.plot:
        return
    if can_plot():
        plot(args, files)
    else:
        print("no picture: matplotlib is not installed (pip install 'flashspark[bench]')")


def _self_check(files: ProfileFiles) -> None:
    """The planner must be able to load the file, and find in it what was measured."""
    table, rounds = load_cost_table(files.table), files.load_rounds()
    if table.is_uninitialized:
        raise ProfileError(
            f"{files.table} has a single probe and counts as no table: measure more batch sizes"
        )
    errors = sorted(fit_errors(table, rounds), key=lambda error: abs(error.relative))
    worst = errors[-1]
    mean = sum(abs(error.relative) for error in errors) / len(errors)
    print(
        f"the table against {len(errors)} measured cells: {mean:.1%} off on average, at worst {worst.relative:+.1%} "
        f"(batch {worst.batch_size}, {worst.num_rows} rows: {1e3 * worst.measured_seconds:.2f} ms)"
    )
    if abs(worst.relative) > WORST_ERROR_TO_PASS_OVER:
        print("that cell was probably disturbed: measure again with more --repeats", file=sys.stderr)


def plot(args: argparse.Namespace, files: ProfileFiles) -> None:
    """Draws the table over the cells."""
    if not files.table.is_file():
        raise ProfileError(f"{files.table} does not exist: `fit` with the same --out writes it")
    draw(load_cost_table(files.table), files.load_rounds(), files.plot, files.table.name)
    print(f"wrote {files.plot}")


def _batch_sizes(args: argparse.Namespace, facts: ServerFacts) -> list[int]:
    if args.batch_size is not None:
        return list(args.batch_size)
    limits = (args.max_batch_size, facts.max_batch_size, facts.running_cap)
    return default_batch_sizes(min(limit for limit in limits if limit is not None))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="dspark_sps_profiler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("run", "measure the cells of a running server"),
        ("fit", "make the table of what was measured"),
        ("plot", "draw table and cells"),
        ("all", "run, fit and plot"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument(
            "--out", type=Path, required=True, help="the table; the other files lie beside it"
        )
        if name in ("run", "all"):
            _add_run_flags(command)
        if name in ("fit", "all"):
            _add_fit_flags(command)
    return parser.parse_args(argv)


def _add_run_flags(command: argparse.ArgumentParser) -> None:
    def add(flag: str, kind: Any, default: Any, about: str, **more: Any) -> None:
        shown = about if default is None else f"{about} (default {default})"
        command.add_argument(flag, type=kind, default=default, help=shown, **more)

    add("--base-url", str, "http://127.0.0.1:30000", "the running server")
    add("--batch-size", _positive, None, "requests per rank, one or more", nargs="+")
    add("--max-batch-size", _positive, None, "end of the default sweep (default: what the server runs)")
    add("--fracs", _fraction, None, "shares of the drafts to verify, in (0, 1]: a 2-D table", nargs="+")
    add("--input-len", _positive, 16, "tokens of each prompt")
    add("--temperature", float, 1.0, "of the load")
    add("--min-steady-steps", _positive, 32, "steps per cell, at least")
    add("--min-steady-seconds", float, 10.0, "seconds per cell, at least")
    add("--round-timeout", float, 300.0, "seconds per cell, at most")
    add("--ramp-token-slack", int, 0, "more tokens per request, where prefilling the batch takes long")
    add("--poll-seconds", float, 2.0, "seconds between two looks at the records")
    add("--repeats", _positive, 1, "sweeps; the median counts")
    add(
        "--local-tokenizer-path",
        str,
        None,
        "tokenizer, where the server does not say how large its vocabulary is",
    )
    same = ("sps", "info")
    add("--recorder-source", str, None, "accepted for scripts: both name the one feed there is", choices=same)
    add("--api-key", str, None, "key of the server, the admin key where it has one")


def _add_fit_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-batch-tokens", type=_positive, help="of a 1-D table (default: its last probe)"
    )
    off_or_on = argparse.BooleanOptionalAction
    command.add_argument("--self-check", action=off_or_on, default=True, help="read the table back")
    command.add_argument("--plot", action=off_or_on, default=True, help="draw it, if matplotlib is installed")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 with a reason on stderr where something cannot be measured, 130 after Ctrl-C."""
    args = parse(argv)
    files = ProfileFiles(args.out)
    stages = {"run": (run,), "fit": (fit,), "plot": (plot,), "all": (run, fit)}[args.command]
    try:
        for stage in stages:
            stage(args, files)
    except (ProfileError, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was measured is in {files.rounds}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
