"""What lies within a step's graphs, captured by itself and timed: products, planning and packing, the estimator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from device_trace import busy_us, trace
from graph_timing import time_graph
from torch import Tensor
from torch.nn.functional import linear

from flashspark.kernels.matmul import LIBRARIES, matmul, multiply
from flashspark.models.dflash2 import BlockConv
from flashspark.speculative.drafter import make_scratch_source
from flashspark.speculative.sampling import RowSampling
from flashspark.speculative.step_graphs import StepNumbers
from flashspark.speculative.worker import SpeculativeWorker

COPIES = 10  # of a body of microseconds in a graph: its own launch counts for little
NUM_CONTEXT_PRODUCTS = 2  # that a draft's `linears` begin with
LOAD_S = 0.3  # of products before those that are timed
ESTIMATOR_STEPS = 200  # two refits

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


Rows = tuple[int, Tensor, Tensor | None]  # how many, the weight [in, out], and where the result belongs


@torch.inference_mode()
def chain(worker: SpeculativeWorker, num_rows: int, num_drafts: int | None = None) -> dict[str, Any]:
    """Milliseconds of the products of a whole step of `num_rows` rows, one after the other, on a GPU under load.

    Layers and head of the target. With `num_drafts`, also what makes verified rows part of the draft's context, which a
    plain step does too; and unless that is 0, the draft's layers over as many rows and the head over its drafts.
    None: of the target alone. `chosen_ms`: in the way that the engine has chosen. `same_layout_ms`: by PyTorch's own
    choice. `cublas_ms`: likewise, by `torch.nn.functional.linear` over weights [out, in], as checkpoints have them and
    most engines leave them; the head's output is in half precision.
    """
    products = list(_products(worker, num_rows, num_drafts))
    ways: dict[str, Product] = {
        "chosen_ms": matmul,
        "same_layout_ms": _usual,
        "cublas_ms": _Transposed().product,
    }
    found: dict[str, Any] = {"rows": num_rows, "drafts": num_drafts}
    for name, product in ways.items():
        found[name] = round(time_graph([chained(products, product)], LOAD_S) * 1e-3, 4)
    return found


def _products(worker: SpeculativeWorker, num_rows: int, num_drafts: int | None) -> Iterator[Rows]:
    target, draft, graphs = worker.runner.target, worker.runner.draft, worker.graphs
    logits = None if graphs is None else graphs.logits

    def head(rows: int) -> Rows:
        return rows, target.tables.head_weight, None if logits is None else logits[:rows]

    linears = list(target.linears())
    yield from ((num_rows, linear.weight, None) for linear in linears if linear.weight is not None)
    yield head(num_rows)
    if num_drafts is None or draft is None:
        return
    linears = list(draft.linears())
    if num_drafts:
        parts = (part for layer in draft.layers for part in vars(layer).values())
        linears += [part.projection for part in parts if isinstance(part, BlockConv)]
    else:
        del linears[NUM_CONTEXT_PRODUCTS:]
    yield from ((num_rows, linear.weight, None) for linear in linears if linear.weight is not None)
    if num_drafts:
        yield head(num_drafts)


def chained(products: Sequence[Rows], product: Product) -> Callable[[], None]:
    """A call that makes all products, of random rows."""
    sizes = {(rows, weight.shape[0]) for rows, weight, _ in products}
    like = products[0][1]
    inputs = {size: torch.randn(size, dtype=like.dtype, device=like.device) for size in sizes}

    def body() -> None:
        for rows, weight, out in products:
            product(inputs[rows, weight.shape[0]], weight, out)

    return body


class _Transposed:
    """Products over copies [out, in] of the weights, one for each shape. A layer's together do not fit a GPU's cache:
    each is read from memory although the next layer takes the same."""

    def __init__(self) -> None:
        self._copies: dict[torch.Size, Tensor] = {}

    def product(self, x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        """`out` is for float32, which a linear layer does not give."""
        if weight.shape not in self._copies:
            self._copies[weight.shape] = weight.t().contiguous()
        return linear(x, self._copies[weight.shape])


def _usual(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    return multiply(x, weight, out, LIBRARIES[0])


@torch.inference_mode()
def plan_and_pack_us(worker: SpeculativeWorker, num_reqs: int) -> float:
    """Microseconds that a captured verify piece of half a budget takes where the target does nothing: the budget shared
    out, rows packed.

    Raises:
        RuntimeError: there are no captured steps, or none of so many requests.
    """
    graphs = worker.graphs
    num_drafts = num_reqs * worker.gamma // 2
    shape = None if graphs is None else graphs.shape(num_reqs, num_reqs + num_drafts)
    if graphs is None or shape is None:
        raise RuntimeError(f"no step of {num_reqs} requests is captured")
    num_slots = shape.num_slots
    scratch = worker.runner.request_rows.scratch_row
    caps, floors = [worker.width] * num_reqs, [1] * num_reqs
    graphs.load(StepNumbers([scratch] * num_reqs, caps, floors, [0] * num_reqs, num_drafts), num_slots)
    graphs.confidence(num_slots).uniform_()
    logits = torch.empty(0, device=worker.runner.device)
    with _replaced(worker.runner, "verify", lambda *_, **__: logits):
        return time_graph([lambda: graphs._verify(shape, worker.width)] * COPIES)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


@torch.inference_mode()
def estimator_us(worker: SpeculativeWorker, num_reqs: int) -> dict[str, Any]:
    """Microseconds a step of an estimator of its own, refits and settling spread over the steps: `predict_us` captured,
    as a launch of its own, which DFlash2's draft pieces save; `observe_us` what the kernels of `observe` take, and
    `observe_host_us` what launching them takes on the host. `total_us`: predict and observe on the device. On a CPU
    observing is the host's time alone."""
    runner = worker.runner
    source, device = make_scratch_source(runner, num_reqs), runner.device
    row_list = list(range(num_reqs))
    for row in row_list:
        source.assign(row, RowSampling(seed=row, temperature=0.0), is_visible=True)
    rows = torch.arange(num_reqs, device=device)
    signal = torch.randn(num_reqs, worker.gamma, device=device)
    verify_lens = torch.full((num_reqs,), worker.width, device=device)
    num_accepted = rows % worker.width
    predict = time_graph([lambda: source.predict(rows, signal)] * COPIES)
    host_s = 0.0

    def observe() -> None:
        nonlocal host_s
        started = time.perf_counter()
        for _ in range(ESTIMATOR_STEPS):
            source.observe(rows, row_list, num_accepted, verify_lens)
        host_s = time.perf_counter() - started

    observe()  # compiles
    observe()
    untraced_s = host_s
    on_device = untraced_s * 1e6 if device.type == "cpu" else busy_us(trace(observe))
    found = {
        "predict_us": predict,
        "observe_us": on_device / ESTIMATOR_STEPS,
        "observe_host_us": untraced_s * 1e6 / ESTIMATOR_STEPS,
    }
    found["total_us"] = found["predict_us"] + found["observe_us"]
    return {name: round(value, 2) for name, value in found.items()}
