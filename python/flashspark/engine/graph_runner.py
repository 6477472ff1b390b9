"""Captured work by key: a body is captured once and replayed from then on, or simply called where nothing captures."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class StepRunner(Protocol):
    """Runs the pieces of a step.

    A body takes no arguments: it reads tensors that stay where they are, queues work on the current stream, never asks
    the device for a value, and returns tensors. What it returned may be overwritten when a body of any key runs again.
    """

    def run(self, key: Hashable, body: Callable[[], T]) -> T:
        """What `body` returns, computed anew."""
        ...


class EagerRunner:
    """Calls the bodies: the CPU, and `--disable-cuda-graph`."""

    def run(self, key: Hashable, body: Callable[[], T]) -> T:
        """See `StepRunner`."""
        return body()


def make_step_runner(device: torch.device, captures: bool) -> StepRunner | None:
    """What runs steps in pieces of fixed shape on `device`; None where a step had better have the shape it needs."""
    if device.type != "cuda":
        return None
    return GraphRunner(device) if captures else EagerRunner()


def used_bytes(device: torch.device) -> int:
    """A GPU's memory in use, by whomever, caches of unused blocks left out. Waits for it."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class GraphRunner:
    """CUDA graphs of one memory pool, replayed on one stream, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    @property
    def keys(self) -> set[Hashable]:
        """What is captured."""
        return set(self._graphs)

    def run(self, key: Hashable, body: Callable[[], T]) -> T:
        """See `StepRunner`. A key that was not captured is called."""
        found = self._graphs.get(key)
        if found is None:
            return body()
        graph, outputs = found
        graph.replay()
        result: T = outputs
        return result

    def capture(self, key: Hashable, body: Callable[[], object]) -> None:
        """Captures `body`, after one call that compiles its kernels and makes the libraries' workspaces.

        Not through `torch.cuda.graph`, which collects garbage and empties caches before each of some hundred captures.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = body()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs[key] = (graph, outputs)
