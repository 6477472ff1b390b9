"""Products of rows with a weight, by whichever library is quickest for their shape.

PyTorch has two libraries for a GPU's half-precision products, cuBLAS and cuBLASLt, and an idea of its own of which to
take. None is always the best: on an H200 the second is 4 % faster than the first at 1,024 rows of Qwen3-8B's layers and
3 % slower at 448. What runs is chosen by measuring, shape by shape, before steps are captured; a captured product keeps
the choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LIBRARIES = ("default", "cublas", "cublaslt")  # the first is PyTorch's own choice
CALLS = 6  # of a measurement, each over another weight where there are several: no cache holds them all
REPEATS = 3
MARGIN = 0.99  # of the time of PyTorch's choice, which another one has to beat

_chosen: dict[tuple[int, int, int], str] = {}  # (rows, in, out)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight`: [M, in] times [in, out], in their dtype."""
    library = _chosen.get((x.shape[0], *weight.shape)) if _chosen else None
    if library is None:
        return torch.mm(x, weight)
    with _Library(library):
        return torch.mm(x, weight)


def choose(weights: Sequence[Tensor], row_counts: Sequence[int]) -> None:
    """Measures which library is to multiply each of `row_counts` rows with weights of this shape, [in, out].

    Only a GPU in half precision has a choice. Waits for the device.
    """
    weight = weights[0]
    if weight.device.type == "cpu" or weight.dtype == torch.float32:
        return
    usual = LIBRARIES[0]
    for num_rows in row_counts:
        x = torch.randn(num_rows, weight.shape[0], dtype=weight.dtype, device=weight.device)
        times = {library: _measure(x, weights, library) for library in LIBRARIES}
        best = min(times, key=lambda library: times[library])
        key = (num_rows, *weight.shape)
        _chosen[key] = best if times[best] < MARGIN * times[usual] else usual


def chosen() -> dict[tuple[int, int, int], str]:
    """What was chosen, by (rows, in, out)."""
    return dict(_chosen)


class _Library:
    """Makes products within it go to one library."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.backends.cuda.preferred_blas_library(self._name)

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.preferred_blas_library(LIBRARIES[0])


def _measure(x: Tensor, weights: Sequence[Tensor], library: str) -> float:
    """Milliseconds of `CALLS` products in a graph; the best of some runs."""

    def run() -> None:
        for i in range(CALLS):
            torch.mm(x, weights[i % len(weights)])

    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream())
    with _Library(library), torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return min(times)
