"""Closed-loop load: clients that each send their next request when the last one ends, and what they saw."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Sequence
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

    def decoded(self, until_s: float) -> tuple[int, float]:
        """Tokens after the first frame, and seconds after it, up to the last frame that came by `until_s`."""
        frames = [frame for frame in self.frames if frame[0] <= until_s]
        if not frames:
            return 0, 0.0
        return sum(count for _, count in frames[1:]), frames[-1][0] - frames[0][0]


@dataclass(frozen=True)
class Segment:
    """What one run of a load came to. Times in seconds, rates in tokens per second."""

    # Tokens that requests got after their first frame, per second of a request after it, × concurrency: requests of
    # equal length weigh alike, and one that is cut off by the end of the window counts for what it got.
    decode_rate: float
    output_rate: float  # over the time in which every client had a request running
    ttft: tuple[float, float]  # p50, p99
    inter_token: tuple[float, float]  # p50, p99 of a frame's wait per token
    accept_length: float  # tokens per verify step
    num_tokens: int


def run_load(port: int, load: Load) -> Segment:
    """Runs `load` against the server at `port` to its end.

    Raises:
        RuntimeError: a request was refused or broke off.
    """
    seen: list[list[Seen]] = [[] for _ in range(load.concurrency)]
    errors: list[BaseException] = []
    start = threading.Barrier(load.concurrency)

    def client(index: int) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            start.wait()
            for turn in range(load.requests_per_client):
                prompt = load.prompts[(index + turn * load.concurrency) % len(load.prompts)]
                seen[index].append(_request(connection, prompt, load))
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(load.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if real:
        raise RuntimeError(f"a client failed: {real[0]!r}") from real[0]
    return summarise(seen, load.concurrency)


def summarise(seen: Sequence[Sequence[Seen]], concurrency: int) -> Segment:
    """The figures of a run, at full concurrency: of the time from when every client has its first token to when the
    first client is through with its requests. A mean over the requests that *ended* until then would favour fast ones,
    and more so in the arm whose requests differ more.
    """
    requests = [request for of_client in seen for request in of_client]
    window_start = max(of_client[0].frames[0][0] for of_client in seen)
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
    decoded = [request.decoded(window_end) for request in requests]
    seconds = window_end - window_start
    return Segment(
        decode_rate=sum(tokens for tokens, _ in decoded) / sum(spent for _, spent in decoded) * concurrency,
        output_rate=inside / seconds if seconds > 0 else float("nan"),
        ttft=_percentiles([request.frames[0][0] - request.sent_s for request in requests]),
        inter_token=_percentiles(waits),
        accept_length=sum(r.num_tokens for r in ended) / max(1, sum(r.num_verify_steps for r in ended)),
        num_tokens=sum(request.num_tokens for request in requests),
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (float("nan"), float("nan"))
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    return hundredths[49], hundredths[98]


def _request(connection: http.client.HTTPConnection, prompt: Sequence[int], load: Load) -> Seen:
    """One streamed request of a server with --incremental-streaming-output."""
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
    if sum(count for _, count in frames) != load.max_new_tokens:
        raise RuntimeError(f"{load.max_new_tokens} tokens were asked for, {frames} came")
    return Seen(sent_s, frames, int(last["meta_info"].get("spec_verify_ct", 0)))
