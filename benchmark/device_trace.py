"""What ran on the device, kernel by kernel, in replayed graphs too: torch's profiler, read and summed.

A traced step is slower than others, since the profiler stretches what lies between two kernels of a graph. What a
kernel takes is true all the same, so the gaps of a step are what is left of the time that it takes untraced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

# As torch.profiler itself sets where it knows of graphs: with the tracing library torn down in between, replays crash.
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")

# What a kernel is for, by its name; the first that fits.
KINDS = (
    ("copies", r"^mem(cpy|set)"),
    ("attention", r"attention"),
    ("products", r"nvjet|gemm|gemv|cutlass|split_?k|cublas|xmma|matmul"),
)
NUM_SHOWN = 25  # kernels of a printed table


class Span(NamedTuple):
    """One kernel or copy on the device."""

    name: str
    start_ns: int
    end_ns: int
    launch: int  # equal for all that one call, a graph's replay say, has launched


def trace(run: Callable[[], None]) -> list[Span]:
    """What `run` has the device do, in order of time.

    Raises:
        RuntimeError: the profiler saw nothing there.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    spans = [] if results is None else spans_of(results.events())
    if not spans:
        raise RuntimeError("torch's profiler saw nothing on the device")
    return spans


def spans_of(events: Iterable[Any], device: DeviceType = DeviceType.CUDA) -> list[Span]:
    """The profiler's raw events of a device, in order of time."""
    spans = [
        Span(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.correlation_id())
        for e in events
        if e.device_type() == device
    ]
    return sorted(spans, key=lambda span: span.start_ns)


def added_us(spans: Sequence[Span]) -> list[float]:
    """Microseconds by which each span lengthens the time in which something runs. A kernel that starts while the one
    before it ends waits for it, and that is the other's time."""
    added, end = [], 0
    for span in spans:
        added.append(max(0, span.end_ns - max(span.start_ns, end)) * 1e-3)
        end = max(end, span.end_ns)
    return added


def busy_us(spans: Sequence[Span]) -> float:
    """Microseconds in which something ran: what overlaps counts once."""
    return sum(added_us(spans))


def summary(spans: Sequence[Span], num_steps: int, step_us: float | None = None) -> dict[str, Any]:
    """Of one of `num_steps` equal steps, in microseconds. Its kernels' times sum to `busy_us`; `us_each` is what one
    took with what overlaps.

    Args:
        step_us: what it takes untraced; its gaps are what no kernel takes of that.
    """
    by_name: dict[str, list[tuple[float, float]]] = {}
    for span, added in zip(spans, added_us(spans), strict=True):
        by_name.setdefault(span.name, []).append((added, (span.end_ns - span.start_ns) * 1e-3))
    kernels: list[dict[str, Any]] = [
        {
            "kernel": short(name),
            "kind": kind_of(name),
            "us": round(sum(added for added, _ in times) / num_steps, 2),
            "launches": round(len(times) / num_steps, 2),
            "us_each": round(sum(whole for _, whole in times) / len(times), 2),
            "name": name[:300],
        }
        for name, times in by_name.items()
    ]
    kernels.sort(key=lambda kernel: -kernel["us"])
    kinds: dict[str, float] = {}
    for kernel in kernels:
        kinds[kernel["kind"]] = round(kinds.get(kernel["kind"], 0.0) + kernel["us"], 2)
    gaps, end = {True: 0, False: 0}, spans[0].end_ns  # within what one call has launched, and between two
    for a, b in pairwise(spans):
        gaps[a.launch == b.launch] += max(0, b.start_ns - end)
        end = max(end, b.end_ns)
    traced_us = (max(span.end_ns for span in spans) - spans[0].start_ns) * 1e-3 / num_steps
    busy = busy_us(spans) / num_steps
    return {
        "step_us": None if step_us is None else round(step_us, 1),
        "busy_us": round(busy, 1),
        "gap_us": None if step_us is None else round(step_us - busy, 1),
        "launches": round(len(spans) / num_steps, 1),
        "kinds_us": kinds,
        "traced": {
            "step_us": round(traced_us, 1),
            "gaps_in_graphs_us": round(gaps[True] * 1e-3 / num_steps, 1),
            "gaps_between_launches_us": round(gaps[False] * 1e-3 / num_steps, 1),
        },
        "kernels": kernels,
    }


def kind_of(name: str) -> str:
    """What the kernel is for."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.I)), "other")


def short(name: str) -> str:
    """A kernel's name without what all have in common."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::", "", name)[:76]


def table(title: str, found: dict[str, Any]) -> str:
    """A step as text: what it is made of, then its most expensive kernels."""
    kinds = ", ".join(
        f"{kind} {us:.0f}" for kind, us in sorted(found["kinds_us"].items(), key=lambda i: -i[1])
    )
    traced = found["traced"]
    lines = [
        f"{title}: step {_or_dash(found['step_us'])} µs = kernels {found['busy_us']:.1f} + gaps "
        f"{_or_dash(found['gap_us'])}; {found['launches']:.0f} launches; {kinds}",
        f"  traced: step {traced['step_us']:.1f}, gaps in graphs {traced['gaps_in_graphs_us']:.1f}, between launches "
        f"{traced['gaps_between_launches_us']:.1f}",
    ]
    rest = found["kernels"][NUM_SHOWN:]
    for kernel in found["kernels"][:NUM_SHOWN]:
        lines.append(
            f"  {kernel['us']:9.1f} µs {kernel['launches']:7.1f} × {kernel['us_each']:8.2f}  {kernel['kernel']}"
        )
    if rest:
        us, launches = sum(k["us"] for k in rest), sum(k["launches"] for k in rest)
        lines.append(f"  {us:9.1f} µs {launches:7.1f} ×           {len(rest)} more kernels")
    return "\n".join(lines)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
