"""What a sweep drives: a server over HTTP, or the scheduler itself in this process, behind one interface.

In process nothing but the scheduler's own requirements is imported (torch, triton, numpy, safetensors, tokenizers,
jinja2, pyyaml, msgspec, pyzmq), no socket is opened, and the clients are a loop between two steps: what is measured is
the step loop. Over HTTP it is the whole server, with clients in processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from closed_loop import Load, Seen, Segment, run_load, summarise
from servers import serve

SIMULATE = "SGLANG_SIMULATE_ACC_LEN"
MIN_STEPS = 16  # at full concurrency, for a run in process to have figures
COUNTERS = (
    *("verify_steps", "verify_tokens", "output_tokens"),
    *("draft_free_steps", "num_steps", "num_retractions"),
)


@dataclass(frozen=True)
class Run:
    """One load's figures, what the steps did meanwhile, and where it is known what each full batch committed."""

    segment: Segment
    counts: dict[str, float]  # COUNTERS; in process rows_run too
    committed: list[list[int]] = field(default_factory=list)


class Engine(Protocol):
    """Plays loads, one after the other. `info` is what `/server_info` says."""

    info: Mapping[str, Any]

    def set_state(self, settings: Mapping[str, Any]) -> None:
        """Changes live settings of the idle engine; RuntimeError where it refuses."""

    def forget(self) -> None:
        """Empties the prefix cache: an arm must not live off another one's prefill."""

    def state(self) -> Mapping[str, Any]:
        """Counters and live values."""

    def run(self, load: Load) -> Run:
        """Plays `load`; RuntimeError where a request does not run as asked."""


class HttpEngine:
    """A server at `port`, with clients in `num_processes` processes: one interpreter cannot read 256 fast streams."""

    def __init__(self, port: int, pool: ProcessPoolExecutor, num_processes: int) -> None:
        from flashspark.benchmark.live_server import LiveServer

        self._port, self._pool, self._num_processes = port, pool, num_processes
        self._server = LiveServer(f"http://127.0.0.1:{port}")
        self.info: Mapping[str, Any] = self._server.info()

    def set_state(self, settings: Mapping[str, Any]) -> None:
        """See `Engine`."""
        status, body = self._server.call("POST", "/set_internal_state", {"server_args": dict(settings)})
        if status != 200 or json.loads(body) != [True]:
            raise RuntimeError(f"{settings} refused: {status} {body[:300]!r}; the server's log says why")

    def forget(self) -> None:
        """See `Engine`. Requests that their clients have just left may still be on their way out."""
        deadline = time.monotonic() + 30
        while (answer := self._server.call("POST", "/flush_cache"))[0] != 200:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server does not flush its cache: {answer}")
            time.sleep(0.02)

    def state(self) -> Mapping[str, Any]:
        """See `Engine`."""
        return dict(self._server.info()["internal_states"][0])

    def run(self, load: Load) -> Run:
        """See `Engine`. How many rows ran and what a batch committed is not to be had over HTTP."""
        before = self.state()
        segment = run_load(self._port, load, self._pool, self._num_processes)
        self.forget()  # waits until it is idle
        after = self.state()
        counts = {name: after[name] - before[name] for name in COUNTERS}
        # A stream that was cut off does not tell how many steps it took.
        accept_length = counts["output_tokens"] / max(1, counts["verify_steps"])
        return Run(replace(segment, accept_length=accept_length), counts)


@contextlib.contextmanager
def over_http(
    flags: Sequence[str], environment: Mapping[str, str], num_processes: int = 4
) -> Iterator[HttpEngine]:
    """A server of its own with `flags`."""
    context = multiprocessing.get_context("spawn")
    with (
        serve([*flags, "--incremental-streaming-output"], environment, start_seconds=600) as port,
        ProcessPoolExecutor(num_processes, mp_context=context) as pool,
    ):
        yield HttpEngine(port, pool, num_processes)


class InProcessEngine:
    """The scheduler that `flags` describe, built as the server's scheduler process builds it."""

    def __init__(self, flags: Sequence[str]) -> None:
        from flashspark import envs
        from flashspark.args import configure_logging
        from flashspark.args.command_line import parse_args
        from flashspark.scheduler.build import build_scheduler
        from flashspark.scheduler.process import prepare_profiling

        args = parse_args(flags)
        envs.simulated_accept_length()  # a simulation that cannot be done says so before a model is loaded
        configure_logging(args.log_level)
        for warning in args.warnings():
            print(f"# {warning}", flush=True)
        self._outputs: list[Any] = []
        self.scheduler, ready = build_scheduler(args, self._receive)
        ready = prepare_profiling(self.scheduler, ready)
        limits = {"max_running_requests": ready.max_running_requests, "context_length": ready.context_length}
        self.info: Mapping[str, Any] = {**args.to_dict(), **ready.info, **limits}

    def _receive(self, output: Any) -> None:
        self._outputs.append(output)

    def set_state(self, settings: Mapping[str, Any]) -> None:
        """See `Engine`."""
        refusal = self.scheduler.set_internal_state(settings)
        if refusal is not None:
            raise RuntimeError(f"{dict(settings)} refused: {refusal}")

    def forget(self) -> None:
        """See `Engine`."""
        if not self.scheduler.flush_cache():
            raise RuntimeError("the prefix cache is not flushed: requests are running")

    def state(self) -> Mapping[str, Any]:
        """See `Engine`."""
        return {**self.scheduler.state(), **self.scheduler.verification_state()}

    def run(self, load: Load) -> Run:
        """See `Engine`. Every client goes on until the first one has had `requests_per_client`, or until `load.seconds`
        after it began to count: `load.settling_steps` after each has its first token; then all are aborted."""
        if load.concurrency > self.info["max_running_requests"]:
            raise RuntimeError(
                f"{load.concurrency} clients, --max-running-requests {self.info['max_running_requests']}"
            )
        if load.seed is not None and not self.scheduler.reseed(load.seed):
            raise RuntimeError("the scheduler is busy with requests of an earlier run")
        return _Clients(self.scheduler, self._outputs, load).run()


class _Clients:
    """A closed loop around a scheduler: one run of one load."""

    def __init__(self, scheduler: Any, outputs: list[Any], load: Load) -> None:
        self._scheduler, self._outputs, self._load = scheduler, outputs, load
        self._ended: list[list[Seen]] = [[] for _ in range(load.concurrency)]
        self._sent = [0.0] * load.concurrency
        self._frames: list[list[tuple[float, int]]] = [[] for _ in range(load.concurrency)]
        self._waiting = set(range(load.concurrency))  # for their first token
        self._is_full, self._num_full_steps = False, 0  # everybody has one; steps since then
        self._counts_from: float | None = None
        self._before: dict[str, Any] = {}  # the scheduler's counters then
        self._rows = [0, 0, 0]  # requests × steps, rows verified, rows run
        self._last_step = scheduler.num_steps
        self._committed: list[list[int]] = []

    def run(self) -> Run:
        """Plays it."""
        load, scheduler = self._load, self._scheduler
        for client in range(load.concurrency):
            self._send(client)
        end_s, now = float("inf"), 0.0
        while now < end_s and not self._is_through:
            scheduler.step()
            now = time.perf_counter()
            self._take(now)
            if self._counts_from is None and self._is_full and self._num_full_steps >= load.settling_steps:
                self._counts_from, self._before = now, scheduler.state()
                if load.seconds is not None:
                    end_s = now + load.seconds
        after = scheduler.state()
        scheduler.abort(
            [_name(client, len(seen)) for client, seen in enumerate(self._ended)], "the run is over"
        )
        while scheduler.has_work:
            scheduler.step()
        self._outputs.clear()
        seen = [
            [*ended, Seen(sent, frames, len(frames))] if frames else ended
            for ended, sent, frames in zip(self._ended, self._sent, self._frames, strict=True)
        ]
        counts = {name: after[name] - self._before[name] for name in COUNTERS}
        counts |= {"verify_steps": self._rows[0], "verify_tokens": self._rows[1], "rows_run": self._rows[2]}
        return Run(summarise(seen, load.concurrency, now, self._counts_from), counts, self._committed)

    @property
    def _is_through(self) -> bool:
        """Not later than it must be: the next request of whoever is through is prefilled, which all others wait for."""
        enough = self._num_full_steps >= max(MIN_STEPS, self._load.settling_steps + 1)
        return enough and max(map(len, self._ended)) >= self._load.requests_per_client

    def _send(self, client: int) -> None:
        from flashspark.ipc import GenerateRequest, SamplingParams

        load, turn = self._load, len(self._ended[client])
        sampling = SamplingParams(
            max_new_tokens=load.max_new_tokens, temperature=load.temperature, ignore_eos=True
        )
        self._sent[client], self._frames[client] = time.perf_counter(), []
        self._scheduler.add(GenerateRequest(_name(client, turn), list(load.prompt(client, turn)), sampling))

    def _take(self, now: float) -> None:
        """What the last step handed out."""
        outputs, through = self._outputs[:], []
        self._outputs.clear()
        for output in outputs:
            client = int(output.request_id.partition("/")[0])
            if output.token_ids:
                self._frames[client].append((now, len(output.token_ids)))
                self._waiting.discard(client)
            if output.finish is not None:
                self._check(output, client)
                frames = self._frames[client]
                self._ended[client].append(Seen(self._sent[client], frames, len(frames)))
                through.append(client)
        if self._is_full:
            self._num_full_steps += 1
        if self._counts_from is not None:
            self._count_rows()
            if not through and len(outputs) == self._load.concurrency:
                self._committed.append([len(output.token_ids) for output in outputs])
        self._is_full = not self._waiting
        self._last_step = self._scheduler.num_steps
        for client in through:
            self._send(client)

    def _check(self, output: Any, client: int) -> None:
        num_tokens = sum(count for _, count in self._frames[client])
        if output.finish.type != "length" or num_tokens != self._load.max_new_tokens:
            raise RuntimeError(
                f"request {output.request_id} ended after {num_tokens} tokens: {output.finish}"
            )

    def _count_rows(self) -> None:
        """Of the steps since the last look."""
        for record in reversed(self._scheduler.records):
            if record.forward_ct <= self._last_step:
                break
            found = (record.num_reqs, record.num_verify_tokens, record.num_rows_run)
            self._rows = [total + more for total, more in zip(self._rows, found, strict=True)]


def _name(client: int, turn: int) -> str:
    return f"{client}/{turn}"
