"""Where a decode step's time goes, kernel by kernel, and what of it the bars are about.

    python benchmark/step_breakdown.py --model-path demo --speculative-algorithm DFLASH \\
        --speculative-draft-model-path demo-dflash2 --out FOLDER [--requests 1,8,32,128] [--modes plain,static,compact]
    python benchmark/gpu_serving.py … --breakdown FOLDER     # the same on the engine of a serving table

Flags that it does not know are the server's. One engine runs all modes, through the live switches. Of every mode and
number of requests, `--steps` steps are timed in which all of them decode and nobody is prefilled. Device times are from
CUDA events at the stages' borders (`engine/stage_clock.py`); idle is what passes from the end of a step's device work
to the beginning of the next. On the host: `plan`, `launch` (from the first border to the last) and `busy`, all of a
turn of the loop but the waits for events.

On a GPU also: the products of whole steps by themselves, planning with packing, the estimator (`step_parts.py`), and
last, since a profiler slows down what follows, the kernels of some cells' steps (`device_trace.py`). What fails is
reported and does not end the run. Prints tables, writes `step_breakdown.json` and `step_breakdown.txt`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import device_trace  # noqa: E402
import step_parts  # noqa: E402
from servers import provenance  # noqa: E402
from serving_file import described  # noqa: E402

from flashspark.args.command_line import parse_args  # noqa: E402
from flashspark.demo import DEMO_PROMPTS  # noqa: E402
from flashspark.engine.stage_clock import StageClock, StageTimes  # noqa: E402
from flashspark.heap import SCHEDULER_FULL_PASS_EVERY, freeze_heap  # noqa: E402
from flashspark.ipc import GenerateRequest, SamplingParams  # noqa: E402
from flashspark.scheduler.build import build_scheduler  # noqa: E402
from flashspark.scheduler.scheduler import Scheduler  # noqa: E402
from flashspark.scheduler.step_record import StepRecord  # noqa: E402
from flashspark.speculative.drafter import make_confidence_source  # noqa: E402
from flashspark.speculative.worker import SpeculativeWorker  # noqa: E402

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {"speculation": False, "ragged_verify_mode": "static"},
    "static": {"speculation": True, "ragged_verify_mode": "static"},
    "cap-accept": {"speculation": True, "ragged_verify_mode": "cap-accept"},
    "compact": {"speculation": True, "ragged_verify_mode": "compact"},
}


TRACES = (
    "plain:1",
    "static:1",
    "compact:1",
    "static:32",
    "compact:32",
    "static:128",
    "compact:128",
    "compact:128:1",
)
MAX_SETTLING_TURNS, SETTLING_STEPS = 20, 60
# What is asked of an H200 with the pair at Qwen3-8B's size, at most.
IDLE_SHARE, PLAN_MS, PACK_US, ESTIMATOR_US = 0.03, 0.2, 40.0, 60.0
OVER_CHAIN = {("plain", 1): 1.10, ("static", 1): 1.15, ("static", 32): 1.15, ("static", 128): 1.10}
PRODUCT_ROWS, OVER_CUBLAS = (160, 192, 224, 256, 320, 384, 448), 0.85  # where trimmed batches are


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


class Cells:
    """An idle scheduler, and the requests that keep it busy while a cell is measured."""

    def __init__(
        self, scheduler: Scheduler, context_length: int, num_prompt_tokens: int, temperature: float
    ) -> None:
        self.scheduler, self._context_length = scheduler, context_length
        self.temperature = temperature
        texts = [prompt["token_ids"] for prompt in json.loads(DEMO_PROMPTS.read_text())]
        joined = list(itertools.chain.from_iterable(texts))
        size = num_prompt_tokens
        self._prompts = [joined[i : i + size] for i in range(0, len(joined) - size, size)]
        self._num_sent = 0

    @property
    def worker(self) -> SpeculativeWorker:
        """What runs the steps."""
        return self.scheduler._worker

    def become(self, mode: str) -> None:
        """Switches the idle scheduler; RuntimeError where it refuses."""
        refusal = self.scheduler.set_internal_state(SWITCHES[mode])
        if refusal is not None:
            raise RuntimeError(refusal)

    def settle(self, num_reqs: int) -> None:
        """Compact, greedy and sampled in turn, until its estimator knows enough of both to plan by."""
        self.become("compact")
        usual = self.temperature
        for turn in range(MAX_SETTLING_TURNS):
            assert self.worker.adaptive is not None
            if self.worker.adaptive.source.is_ready:
                self.temperature = usual
                return
            self.temperature = float(turn % 2)
            self.fill(num_reqs)
            for _ in range(SETTLING_STEPS):
                self.scheduler.step()
            self.empty()
        raise RuntimeError("the estimator does not get ready: compact is measured with full blocks")

    def fill(self, num_reqs: int) -> None:
        """`num_reqs` requests, as long as the context allows, and steps until all of them decode."""
        if num_reqs > self.scheduler.limits.max_running_requests:
            raise RuntimeError(f"{num_reqs} requests do not run at once: raise --max-running-requests")
        for _ in range(num_reqs):
            prompt = self._prompts[self._num_sent % len(self._prompts)]
            self._num_sent += 1
            sampling = SamplingParams(
                max_new_tokens=self._context_length - len(prompt),
                temperature=self.temperature,
                ignore_eos=True,
            )
            self.scheduler.add(GenerateRequest(str(self._num_sent), list(prompt), sampling))
        residency = self.scheduler.residency
        for _ in range(1000):
            self.scheduler.step()
            if len(residency.residents) == num_reqs and all(r.is_decodable for r in residency.residents):
                return
        raise RuntimeError(f"{num_reqs} requests do not all decode: they end too soon, or the pool is small")

    def empty(self) -> None:
        """Aborts everybody."""
        self.scheduler.abort([r.request_id for r in self.scheduler.residency.residents], "measured")
        while self.scheduler.has_work:
            self.scheduler.step()
        self.scheduler.flush_cache()

    def begin(self, mode: str, num_reqs: int, num_warm_up: int) -> None:
        """Everybody decodes in `mode`, and has for some steps."""
        self.become(mode)
        self.fill(num_reqs)
        for _ in range(num_warm_up):
            self.scheduler.step()

    def trace(self, mode: str, num_reqs: int, num_warm_up: int, num_steps: int) -> list[device_trace.Span]:
        """What the device does in `num_steps` steps.

        Raises:
            RuntimeError: the mode cannot be switched on, the profiler sees nothing, or the requests end too early.
        """
        self.begin(mode, num_reqs, num_warm_up)
        first = self.scheduler.num_steps

        def run() -> None:
            for _ in range(num_steps):
                self.scheduler.step()

        spans = device_trace.trace(run)
        self._check_records(num_reqs, num_steps, first)
        self.empty()
        return spans

    def _check_records(self, num_reqs: int, num_steps: int, first: int) -> list[StepRecord]:
        """Of the steps after turn `first`."""
        records = [r for r in self.scheduler.records if r.forward_ct > first]
        if any(r.num_reqs != num_reqs for r in records):
            raise RuntimeError(
                f"requests ended within {num_steps} steps: give fewer --steps or a longer context"
            )
        return records

    def measure(self, mode: str, num_reqs: int, num_warm_up: int, num_steps: int) -> dict[str, Any]:
        """One cell of the table.

        Raises:
            RuntimeError: the mode cannot be switched on, or the requests end too early.
        """
        self.begin(mode, num_reqs, num_warm_up)
        clock, host, times = StageClock(self.worker.runner.device), HostTimes(), []
        self.worker.stage_clock = clock
        first = self.scheduler.num_steps
        try:
            with host.counting(self.scheduler):
                for _ in range(num_steps + 1):
                    before = host.plan, host.wait, time.perf_counter()
                    self.scheduler.step()
                    now = host.plan, host.wait, time.perf_counter()
                    times.append([b - a for a, b in zip(before, now, strict=True)])
        finally:
            self.worker.stage_clock = None
        steps = clock.steps()
        records = self._check_records(num_reqs, num_steps, first)
        if len(steps) < num_steps:
            raise RuntimeError(f"only {len(steps)} of {num_steps} steps were seen")
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


class Breakdown:
    """Measures cell after cell and part after part; keeps what came out and what failed."""

    def __init__(
        self, scheduler: Scheduler, context_length: int, info: Any, options: argparse.Namespace
    ) -> None:
        self._options = options
        self._cells = Cells(scheduler, context_length, options.prompt_tokens, options.temperature)
        source = provenance()
        source["commit"] = options.commit or source["commit"]
        self.content: dict[str, Any] = {**source, "engine": info, "cells": [], "failures": []}
        self._shown: list[str] = []

    def run(self) -> list[str]:
        """Everything; returns what failed."""
        options, cells = self._options, self._cells
        if "compact" in options.modes:
            self._try("settling", lambda: cells.settle(min(32, max(options.requests))))
        self._show(HEADER)
        for num_reqs in options.requests:
            for mode in options.modes:
                self._try(f"{mode}, {num_reqs} requests", lambda m=mode, n=num_reqs: self._measure(m, n))
        if cells.worker.runner.device.type == "cuda" and not options.cells_only:
            self._parts()
            for name in options.traces:
                self._try(f"trace of {name}", lambda name=name: self._trace(name))
        self._show("\n".join(bars(self.content)))
        failures: list[str] = self.content["failures"]
        return failures

    def _measure(self, mode: str, num_reqs: int) -> None:
        found = self._cells.measure(mode, num_reqs, self._options.warm_up, self._options.steps)
        self.content["cells"].append(found)
        self._show(line(found))

    def _parts(self) -> None:
        worker, requests = self._cells.worker, self._options.requests
        content = self.content
        content["chains"], content["products"] = [], []
        content["plan_and_pack_us"], content["estimator_us"] = {}, {}
        for mode, num_reqs in OVER_CHAIN:
            if mode in self._options.modes and num_reqs in requests:
                width, gamma = (1, 0) if mode == "plain" else (worker.width, worker.gamma)
                what = {"mode": mode, "num_reqs": num_reqs}
                self._try(
                    f"products of {mode}, {num_reqs} requests",
                    lambda what=what, n=num_reqs, w=width, g=gamma: content["chains"].append(
                        {**what, **step_parts.chain(worker, n * w, n * g)}
                    ),
                )
        for num_rows in PRODUCT_ROWS:
            if num_rows <= worker.width * max(requests):
                self._try(
                    f"products of {num_rows} rows",
                    lambda n=num_rows: content["products"].append(step_parts.chain(worker, n)),
                )
        parts: dict[str, Callable[[SpeculativeWorker, int], Any]]
        parts = {"plan_and_pack_us": step_parts.plan_and_pack_us} if worker.gamma else {}
        if make_confidence_source(worker.runner, 1) is not None:
            parts["estimator_us"] = step_parts.estimator_us
        for name, part in parts.items():
            for n in requests:
                self._try(
                    f"{name}, {n} requests",
                    lambda name=name, part=part, n=n: content[name].update({str(n): part(worker, n)}),
                )
        for name in ("chains", "products", "plan_and_pack_us", "estimator_us"):
            self._show(f"{name}: {json.dumps(content[name])}")

    def _trace(self, name: str) -> None:
        options, cells = self._options, self._cells
        mode, num_reqs, temperature = trace_of(name, options.temperature)
        cells.temperature = temperature
        if temperature == options.temperature:
            untraced = cell_of(self.content, mode, num_reqs)
        else:
            untraced = cells.measure(mode, num_reqs, options.warm_up, options.steps)
            self._show(f"{line(untraced)} at temperature {temperature:g}")
        spans = cells.trace(mode, num_reqs, options.warm_up, options.traced_steps)
        step_us = None if untraced is None else untraced["step_ms"] * 1e3
        found = device_trace.summary(spans, options.traced_steps, step_us)
        self.content.setdefault("traces", {})[name] = found
        self._show(device_trace.table(f"\n{mode}, {num_reqs} requests, temperature {temperature:g}", found))

    def _try(self, what: str, measure: Callable[[], object]) -> None:
        """A part that fails does not take the others' figures with it; after each the file is written."""
        try:
            measure()
        except Exception as error:
            self.content["failures"].append(f"{what}: {error}")
            self._show(f"FAILED {what}: {traceback.format_exc()}")
            self._cells.empty()
        self._write()

    def _show(self, text: str) -> None:
        self._shown.append(text)
        print(text, flush=True)
        self._write()

    def _write(self) -> None:
        folder: Path | None = self._options.out
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.content, indent=1, default=str)
            (folder / "step_breakdown.json").write_text(text + "\n")
            (folder / "step_breakdown.txt").write_text("\n".join(self._shown) + "\n")


def trace_of(name: str, usual_temperature: float = 0.0) -> tuple[str, int, float]:
    """`MODE:REQUESTS` or `MODE:REQUESTS:TEMPERATURE`."""
    mode, num_reqs, *temperature = name.split(":")
    return mode, int(num_reqs), float(temperature[0]) if temperature else usual_temperature


def cell_of(content: dict[str, Any], mode: str, num_reqs: int) -> dict[str, Any] | None:
    """The cell, if it was measured."""
    found = (c for c in content["cells"] if (c["mode"], c["num_reqs"]) == (mode, num_reqs))
    return next(found, None)


def bars(content: dict[str, Any]) -> list[str]:
    """Each figure that has a bar, beside it."""
    found: list[tuple[str, float, float]] = [
        (f"idle share, {c['mode']}, {c['num_reqs']} requests", c["idle_share"], IDLE_SHARE)
        for c in content["cells"]
    ]
    planned = [c["host_ms"]["plan"] for c in content["cells"] if c["mode"] == "compact"]
    if planned:
        found.append(("planning on the host, ms, most", max(planned), PLAN_MS))
    for num_reqs, us in content.get("plan_and_pack_us", {}).items():
        found.append((f"planning and packing, µs, {num_reqs} requests", us, PACK_US))
    for num_reqs, parts in content.get("estimator_us", {}).items():
        found.append((f"estimator, µs, {num_reqs} requests", parts["total_us"], ESTIMATOR_US))
    for chain in content.get("chains", ()):
        key = (chain["mode"], chain["num_reqs"])
        if (c := cell_of(content, *key)) is not None:
            what = f"step over its products, {key[0]}, {key[1]} requests"
            times = f"{c['step_ms']:.2f} / {chain['cublas_ms']:.2f} ms"
            found.append((f"{what} ({times})", c["step_ms"] / chain["cublas_ms"], OVER_CHAIN[key]))
    for chain in content.get("products", ()):
        times = f"{chain['chosen_ms']:.2f} / {chain['cublas_ms']:.2f} ms"
        ratio = chain["chosen_ms"] / chain["cublas_ms"]
        found.append((f"products of {chain['rows']} rows over cuBLAS's ({times})", ratio, OVER_CUBLAS))
    content["bars"] = [{"what": what, "value": value, "bar": bar} for what, value, bar in found]
    return [
        "\nbars (at most)",
        *(
            f"{'met   ' if value <= bar else 'MISSED'} {value:8.3f} of {bar:6.3f}  {what}"
            for what, value, bar in found
        ),
    ]


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the server's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    names = lambda text: [name for name in text.split(",") if name]  # noqa: E731
    parser.add_argument("--requests", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--modes", type=names, default=["plain", "static", "compact"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument(
        "--traces", type=names, default=list(TRACES), help="MODE:REQUESTS[:TEMPERATURE],…: kernels"
    )
    parser.add_argument("--traced-steps", type=int, default=20)
    parser.add_argument("--cells-only", action="store_true", help="neither parts nor traces")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--commit", help="to record, where there is no repository to ask")
    parser.add_argument("--out", type=Path, help="folder of step_breakdown.json")
    options, flags = parser.parse_known_args(arguments)
    for mode in (*options.modes, *(name.partition(":")[0] for name in options.traces)):
        if mode not in SWITCHES:
            parser.error(f"no such mode: {mode}; there are {', '.join(SWITCHES)}")
    return options, flags


def main() -> int:
    """Exit code 1 where something could not be measured."""
    options, flags = parse()
    if "--max-running-requests" not in flags:
        flags += ["--max-running-requests", str(max(options.requests))]
    if {"cap-accept", "compact"} & set(options.modes) and "--ragged-verify-mode" not in flags:
        flags += ["--ragged-verify-mode", "compact"]
    scheduler, ready = build_scheduler(parse_args(flags), lambda output: None)
    freeze_heap(SCHEDULER_FULL_PASS_EVERY)
    return 1 if Breakdown(scheduler, ready.context_length, described(ready.info), options).run() else 0


if __name__ == "__main__":
    sys.exit(main())
