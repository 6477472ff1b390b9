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

from flashspark.engine.model_runner import ModelRunner
from flashspark.kernels.matmul import LIBRARIES, matmul, multiply
from flashspark.layers.linear import Linear
from flashspark.speculative.drafter import make_scratch_source
from flashspark.speculative.sampling import RowSampling
from flashspark.speculative.step_graphs import StepNumbers
from flashspark.speculative.worker import SpeculativeWorker

COPIES = 10  # of a body of microseconds in a graph: its own launch counts for little
NUM_CONTEXT_PRODUCTS = 2  # that a draft's `linears` begin with
ESTIMATOR_STEPS = 200  # two refits

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@torch.inference_mode()
def chain(worker: SpeculativeWorker, num_reqs: int, with_draft: bool) -> dict[str, Any]:
    """Milliseconds of the products of a whole step of full blocks, or of anchors alone, one after the other.

    `verify_ms` has the target's layers and head, `draft_ms` the draft's layers over whole blocks and the head over its
    drafts; each in the way that the engine has chosen, and by PyTorch's own choice (`default_ms` of both).
    `inject_ms`, which no chain counts, are the products that make verified rows part of the draft's context.
    """
    runner, graphs = worker.runner, worker.graphs
    width = worker.width if with_draft else 1
    num_rows, draft, target = num_reqs * width, runner.draft, runner.target
    out = None if graphs is None else graphs.logits

    def head(count: int, product: Product) -> Callable[[], None]:
        def body() -> None:
            hidden = _rows(count, target.config.hidden_size, runner)
            if out is None:
                target.logits(hidden)
            else:
                product(hidden, target.tables.head_weight, out[:count])

        return body

    def verify(product: Product) -> Callable[[], None]:
        return _chained(runner, list(target.linears()), num_rows, product, head(num_rows, product))

    found: dict[str, Any] = {"rows": num_rows, "verify_ms": time_graph([verify(matmul)]) * 1e-3}
    default = time_graph([verify(_usual)]) * 1e-3
    found["draft_ms"] = 0.0
    if draft is not None:
        linears = list(draft.linears())
        context, layers = linears[:NUM_CONTEXT_PRODUCTS], linears[NUM_CONTEXT_PRODUCTS:]
        found["inject_ms"] = time_graph([_chained(runner, context, num_rows, matmul, None)]) * 1e-3
        if with_draft:
            last = num_reqs * worker.gamma
            bodies = (_chained(runner, layers, num_rows, p, head(last, p)) for p in (matmul, _usual))
            found["draft_ms"], default_draft = (time_graph([body]) * 1e-3 for body in bodies)
            default += default_draft
    found["chain_ms"] = found["verify_ms"] + found["draft_ms"]
    found["default_ms"] = default
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def _usual(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    return multiply(x, weight, out, LIBRARIES[0])


def _rows(count: int, size: int, runner: ModelRunner) -> Tensor:
    return torch.full((count, size), 0.01, dtype=runner.target.tables.table.dtype, device=runner.device)


def _chained(
    runner: ModelRunner,
    linears: Sequence[Linear],
    num_rows: int,
    product: Product,
    last: Callable[[], None] | None,
) -> Callable[[], None]:
    weights = [linear.weight for linear in linears if linear.weight is not None]
    inputs = {
        size: torch.randn(num_rows, size, dtype=weights[0].dtype, device=runner.device)
        for size in {weight.shape[0] for weight in weights}
    }

    def body() -> None:
        for weight in weights:
            product(inputs[weight.shape[0]], weight, None)
        if last is not None:
            last()

    return body


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
    as in a draft piece; `observe_us` what the kernels of `observe` take, and `observe_host_us` what launching them
    takes on the host. `total_us`: predict and observe on the device. On a CPU observing is the host's time alone."""
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
