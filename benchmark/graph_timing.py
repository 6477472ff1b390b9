"""How long captured work takes on a GPU; called as it is where there is none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPLAY_S = 0.03  # of what is timed, all replays together
MIN_REPLAYS, MAX_REPLAYS = 5, 50


def time_calls(call: Callable[[], Any], num_calls: int = 1, load_s: float = 0.0) -> float:
    """Median microseconds of one of the `num_calls` calls that `call` makes.

    `load_s`: seconds of calls before those that are timed. A GPU that was idle runs faster than one that works for
    long, by a tenth and more where products are large.
    """
    if DEVICE == "cpu":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) / num_calls * 1e6
    times: list[float] = []
    spent, started = 0.0, time.perf_counter()
    while time.perf_counter() - started < load_s:
        call()
        torch.cuda.synchronize()
    while len(times) < MIN_REPLAYS or (spent < REPLAY_S and len(times) < MAX_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_calls)
        spent += start.elapsed_time(end) * 1e-3
    return statistics.median(times)


def time_graph(calls: list[Callable[[], Any]], load_s: float = 0.0) -> float:
    """Microseconds of one of `calls`, captured one after the other; `load_s` as in `time_calls`."""
    if DEVICE == "cpu":
        return time_calls(calls[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:  # compiles, and makes cuBLAS choose
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return time_calls(graph.replay, len(calls), load_s)
