"""Closed-loop load: clients that each send their next request when the last one ends, and what they saw."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """What the clients ask for."""

    prompts: Sequence[Sequence[int]]  # client i begins at prompt i and goes on in steps of `concurrency`
    concurrency: int
    requests_per_client: int
    max_new_tokens: int
    temperature: float
    seconds: float | None = None  # the run is cut off after so long; None: it runs to its end
    # Of what is drawn, in process: runs of one seed draw alike. A request's own seed would keep its blocks full.
    seed: int | None = None
    settling_steps: int = 0  # in process: at full concurrency, before the run counts

    def prompt(self, client: int, turn: int) -> Sequence[int]:
        """What `client` sends as its request number `turn`."""
        return self.prompts[(client + turn * self.concurrency) % len(self.prompts)]


@dataclass(frozen=True)
class Seen:
    """One request: when it was sent and when its tokens came."""

    sent_s: float
    frames: list[tuple[float, int]]  # (time, tokens)
    num_verify_steps: int

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return sum(count for _, count in self.frames)

    def decoded(self, start_s: float, until_s: float) -> tuple[int, float, int]:
        """Tokens, seconds and frames after the first frame, of the frames that came from `start_s` to `until_s`."""
        frames = [frame for frame in self.frames if start_s <= frame[0] <= until_s]
        if not frames:
            return 0, 0.0, 0
        return sum(count for _, count in frames[1:]), frames[-1][0] - frames[0][0], len(frames) - 1


@dataclass(frozen=True)
class Segment:
    """What one run of a load came to. Times in seconds, rates in tokens per second."""

    # Tokens that requests got after their first frame, per second of a request after it, × concurrency, while every
    # client had its first token: requests of equal length weigh alike, one that is cut off counts for what it got.
    decode_rate: float
    output_rate: float  # over the time in which every client had a request running
    ttft: tuple[float, float]  # p50, p99
    inter_token: tuple[float, float]  # p50, p99 of a frame's wait per token
    accept_length: float  # tokens per verify step
    num_tokens: int
    frame_seconds: (
        float  # from one frame of a request to its next, where `decode_rate` counts; in process: a step
    )


def run_load(port: int, load: Load, pool: Executor | None = None, num_processes: int = 1) -> Segment:
    """Runs `load` against the server at `port` to its end.

    Args:
        pool: where to run the clients, `num_processes` groups of them; None: in threads of this process.

    Raises:
        RuntimeError: a request was refused or broke off.
    """
    everybody = range(load.concurrency)
    if pool is None:
        return summarise(_run_clients(port, load, everybody), load.concurrency)
    groups = [everybody[i::num_processes] for i in range(min(num_processes, load.concurrency))]
    futures = [pool.submit(_run_clients, port, load, group) for group in groups]
    return summarise([seen for future in futures for seen in future.result()], load.concurrency)


def _run_clients(port: int, load: Load, indices: Sequence[int]) -> list[list[Seen]]:
    """Some of a load's clients, a thread each. Clocks of processes agree: `perf_counter` is the machine's."""
    seen: list[list[Seen]] = [[] for _ in indices]
    errors: list[BaseException] = []
    start = threading.Barrier(len(indices))

    def client(place: int) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            start.wait()
            end_s = float("inf") if load.seconds is None else time.perf_counter() + load.seconds
            for turn in range(load.requests_per_client):
                if turn == 0 or time.perf_counter() < end_s:
                    seen[place].append(_request(connection, load.prompt(indices[place], turn), load, end_s))
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=client, args=(place,)) for place in range(len(indices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if real:
        raise RuntimeError(f"a client failed: {real[0]!r}") from real[0]
    return seen


def summarise(
    seen: Sequence[Sequence[Seen]],
    concurrency: int,
    window_end: float | None = None,
    window_start: float | None = None,
) -> Segment:
    """The figures of a run, at full concurrency: of the time from when every client has its first token to when the
    first client is through with its requests. A mean over the requests that *ended* until then would favour fast ones,
    and more so in the arm whose requests differ more.

    Args:
        window_end: when full concurrency ended, where clients do not stop sending by themselves.
        window_start: when the run began to count, if later than with the last client's first token.
    """
    requests = [request for of_client in seen for request in of_client]
    if window_start is None:
        window_start = max(of_client[0].frames[0][0] for of_client in seen)
    if window_end is None:
        window_end = min(of_client[-1].frames[-1][0] for of_client in seen)
    inside = sum(
        count for request in requests for at, count in request.frames if window_start < at <= window_end
    )
    ended = [request for request in requests if request.frames[-1][0] <= window_end]
    waits = [
        (at - before) / count
        for request in ended
        for (before, _), (at, count) in zip(request.frames, request.frames[1:], strict=False)
    ]
    decoded = [request.decoded(window_start, window_end) for request in requests]
    seconds = window_end - window_start
    tokens, spent, num_frames = (sum(column) for column in zip(*decoded, strict=True))
    return Segment(
        decode_rate=tokens / spent * concurrency if spent > 0 else float("nan"),
        output_rate=inside / seconds if seconds > 0 else float("nan"),
        ttft=_percentiles([request.frames[0][0] - request.sent_s for request in requests]),
        inter_token=_percentiles(waits),
        accept_length=sum(r.num_tokens for r in ended) / max(1, sum(r.num_verify_steps for r in ended)),
        num_tokens=sum(request.num_tokens for request in requests),
        frame_seconds=spent / num_frames if num_frames else float("nan"),
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (float("nan"), float("nan"))
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    return hundredths[49], hundredths[98]


def _request(connection: http.client.HTTPConnection, prompt: Sequence[int], load: Load, end_s: float) -> Seen:
    """One streamed request of a server with --incremental-streaming-output; the client hangs up at `end_s`, once it
    has a token."""
    sampling = {
        "temperature": load.temperature,
        "max_new_tokens": load.max_new_tokens,
        "ignore_eos": True,
    }
    body = json.dumps({"input_ids": list(prompt), "sampling_params": sampling, "stream": True})
    sent_s = time.perf_counter()
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"/generate answers {response.status}: {response.read()[:500]!r}")
    frames: list[tuple[float, int]] = []
    last: dict[str, Any] = {}
    for line in response:
        if line.startswith(b"data: {"):
            at = time.perf_counter()
            last = json.loads(line[6:])
            if "error" in last:
                raise RuntimeError(f"a stream broke off: {last}")
            frames.append((at, len(last["output_ids"])))
            if at > end_s:
                connection.close()
                break
    else:
        _check_complete(frames, load)
    return Seen(sent_s, frames, int(last["meta_info"].get("spec_verify_ct", 0)))


def _check_complete(frames: Sequence[tuple[float, int]], load: Load) -> None:
    if sum(count for _, count in frames) != load.max_new_tokens:
        raise RuntimeError(f"{load.max_new_tokens} tokens were asked for, {frames} came")
