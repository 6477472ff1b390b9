"""Where a decode step's time goes: draft, verify, accept and idle on the device; plan, launch and the rest on the host.

In process, by mode and concurrency.

    python benchmark/step_breakdown.py --model-path demo --speculative-algorithm DFLASH \\
        --speculative-draft-model-path demo-dflash2 --out FOLDER [--requests 1,8,32,128] [--modes plain,static,compact]

Flags that it does not know are the server's. One engine runs all modes, through the live switches. Of every mode and
number of requests, `--steps` steps are timed in which all of them decode and nobody is prefilled. Device times are from
CUDA events at the stages' borders (`engine/stage_clock.py`); idle is what passes from the end of a step's device work
to the beginning of the next. On the host: `plan`, `launch` (from the first border to the last) and `busy`, all of a
turn of the loop but the waits for events. Prints a table of medians, writes `step_breakdown.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from servers import provenance  # noqa: E402

from flashspark.args.command_line import parse_args  # noqa: E402
from flashspark.demo import DEMO_PROMPTS  # noqa: E402
from flashspark.engine.stage_clock import StageClock, StageTimes  # noqa: E402
from flashspark.ipc import GenerateRequest, SamplingParams  # noqa: E402
from flashspark.scheduler.build import build_scheduler  # noqa: E402
from flashspark.scheduler.scheduler import Scheduler  # noqa: E402

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {"speculation": False, "ragged_verify_mode": "static"},
    "static": {"speculation": True, "ragged_verify_mode": "static"},
    "cap-accept": {"speculation": True, "ragged_verify_mode": "cap-accept"},
    "compact": {"speculation": True, "ragged_verify_mode": "compact"},
}


class HostTimes:
    """Seconds that a step's turn of the loop spent planning and waiting."""

    def __init__(self) -> None:
        self.plan = self.wait = 0.0

    @contextmanager
    def counting(self, scheduler: Scheduler) -> Iterator[None]:
        """Wraps the planner and the waits for events while it lasts."""
        adaptive, wait = scheduler._worker.adaptive, torch.cuda.Event.synchronize
        if adaptive is not None:
            adaptive.plan = self._timed(adaptive.plan, "plan")  # type: ignore[method-assign]
        torch.cuda.Event.synchronize = self._timed(wait, "wait")  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
            if adaptive is not None:
                del adaptive.plan

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - started)

        return timed


class Engine:
    """A scheduler in this process, and the requests that keep it busy."""

    def __init__(self, server_flags: list[str], num_prompt_tokens: int, temperature: float) -> None:
        self.scheduler, self.ready = build_scheduler(parse_args(server_flags), lambda output: None)
        self._temperature = temperature
        texts = [prompt["token_ids"] for prompt in json.loads(DEMO_PROMPTS.read_text())]
        joined = list(itertools.chain.from_iterable(texts))
        size = num_prompt_tokens
        self._prompts = [joined[i : i + size] for i in range(0, len(joined) - size, size)]
        self._num_sent = 0

    def fill(self, num_reqs: int) -> None:
        """`num_reqs` requests, as long as the context allows, and steps until all of them decode."""
        for _ in range(num_reqs):
            prompt = self._prompts[self._num_sent % len(self._prompts)]
            self._num_sent += 1
            sampling = SamplingParams(
                max_new_tokens=self.ready.context_length - len(prompt),
                temperature=self._temperature,
                ignore_eos=True,
            )
            self.scheduler.add(GenerateRequest(str(self._num_sent), list(prompt), sampling))
        residency = self.scheduler.residency
        for _ in range(1000):
            self.scheduler.step()
            if len(residency.residents) == num_reqs and all(r.is_decodable for r in residency.residents):
                return
        raise RuntimeError(f"{num_reqs} requests do not all decode: raise --max-running-requests or the pool")

    def empty(self) -> None:
        """Aborts everybody."""
        self.scheduler.abort([r.request_id for r in self.scheduler.residency.residents], "measured")
        while self.scheduler.has_work:
            self.scheduler.step()
        self.scheduler.flush_cache()

    def measure(self, mode: str, num_reqs: int, num_warm_up: int, num_steps: int) -> dict[str, Any]:
        """One cell of the table.

        Raises:
            RuntimeError: the mode cannot be switched on, or the requests end too early.
        """
        refusal = self.scheduler.set_internal_state(SWITCHES[mode])
        if refusal is not None:
            raise RuntimeError(refusal)
        self.fill(num_reqs)
        for _ in range(num_warm_up):
            self.scheduler.step()
        clock, host, times = StageClock(self.scheduler._worker.runner.device), HostTimes(), []
        self.scheduler._worker.stage_clock = clock
        first = self.scheduler.num_steps
        with host.counting(self.scheduler):
            for _ in range(num_steps + 1):
                before = host.plan, host.wait, time.perf_counter()
                self.scheduler.step()
                now = host.plan, host.wait, time.perf_counter()
                times.append([b - a for a, b in zip(before, now, strict=True)])
        self.scheduler._worker.stage_clock = None
        steps = clock.steps()
        records = [r for r in self.scheduler.records if r.forward_ct > first]
        if len(steps) < num_steps or any(r.num_reqs != num_reqs for r in records):
            raise RuntimeError(
                f"requests ended within {num_steps} steps: give fewer --steps or a longer context"
            )
        self.empty()
        return cell(mode, num_reqs, steps, times[1:], records)


def cell(
    mode: str, num_reqs: int, steps: list[StageTimes], times: list[list[float]], records: list[Any]
) -> dict[str, Any]:
    """Medians of a mode at a number of requests: milliseconds, and what the steps did."""
    names = sorted({name for step in steps for name in step.stages}, key=order)
    plan, wait, turn = ([1e3 * values[i] for values in times] for i in range(3))
    launch = [step.launch for step in steps]
    total = sum(step.total for step in steps)
    num_tokens = sum(record.num_output_tokens for record in records)
    return {
        "mode": mode,
        "num_reqs": num_reqs,
        "num_steps": len(steps),
        "step_ms": middle([step.total for step in steps]),
        "device_ms": {name: middle([step.stages.get(name, 0.0) for step in steps]) for name in names},
        "idle_ms": middle([step.idle for step in steps]),
        "idle_share": round(sum(step.idle for step in steps) / total, 4),
        "host_ms": {
            "turn": middle(turn),
            "plan": middle(plan),
            "launch": middle(launch),
            "wait": middle(wait),
            "busy": middle([t - w for t, w in zip(turn, wait, strict=True)]),
        },
        "rows_run": statistics.mean(record.num_rows_run for record in records),
        "accept_length": round(num_tokens / len(records) / num_reqs, 3),
        "tokens_per_s": round(num_tokens / len(records) / (total / len(steps)) * 1e3, 1),
    }


def order(name: str) -> int:
    """Of stages, as they come."""
    known = ["prefill", "draft", "verify", "accept", "results"]
    return known.index(name) if name in known else len(known)


def middle(values: list[float]) -> float:
    """The median, in microseconds' precision."""
    return round(statistics.median(values), 4)


HEADER = (
    f"{'mode':11} {'reqs':>5} {'step ms':>8} {'draft':>8} {'verify':>8} {'accept':>8} {'idle':>7} {'idle %':>7} "
    f"{'| plan':>8} {'launch':>8} {'busy':>8} {'rows':>7} {'accepted':>8} {'tok/s':>9}"
)


def line(c: dict[str, Any]) -> str:
    """A row of the table."""
    device, host = c["device_ms"], c["host_ms"]
    stages = " ".join(f"{device.get(name, 0.0):8.3f}" for name in ("draft", "verify", "accept"))
    return (
        f"{c['mode']:11} {c['num_reqs']:5} {c['step_ms']:8.3f} {stages} {c['idle_ms']:7.3f} "
        f"{100 * c['idle_share']:7.2f} {host['plan']:8.3f} {host['launch']:8.3f} {host['busy']:8.3f} "
        f"{c['rows_run']:7.1f} {c['accept_length']:8.2f} {c['tokens_per_s']:9.1f}"
    )


def main() -> int:
    """Exit code 1 where a cell could not be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["plain", "static", "compact"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, help="folder of step_breakdown.json")
    options, flags = parser.parse_known_args()
    for mode in options.modes:
        if mode not in SWITCHES:
            parser.error(f"no such mode: {mode}; there are {', '.join(SWITCHES)}")
    if "--max-running-requests" not in flags:
        flags += ["--max-running-requests", str(max(options.requests))]
    if {"cap-accept", "compact"} & set(options.modes) and "--ragged-verify-mode" not in flags:
        flags += ["--ragged-verify-mode", "compact"]
    engine = Engine(flags, options.prompt_tokens, options.temperature)
    cells, failures = [], []
    print(HEADER, flush=True)
    for num_reqs in options.requests:
        for mode in options.modes:
            try:
                cells.append(engine.measure(mode, num_reqs, options.warm_up, options.steps))
                print(line(cells[-1]), flush=True)
            except RuntimeError as error:
                failures.append(f"{mode}, {num_reqs} requests: {error}")
                print(failures[-1], flush=True)
                engine.empty()
    result = {**provenance(), "engine": engine.ready.info, "cells": cells, "failures": failures}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "step_breakdown.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    print("\n".join([HEADER, *(line(c) for c in cells), *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
