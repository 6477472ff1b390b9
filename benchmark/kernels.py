"""Time of every kernel against its floor, at the shapes of decode steps of Qwen3-8B; and of the step's GEMMs alone.

    python benchmark/kernels.py --out FOLDER [--requests 1,8,32,128] [--only NAME] [--no-gemm]
    python benchmark/kernels.py --smoke          # tiny shapes on a CPU, under Triton's interpreter: does it run

A kernel's time is that of a CUDA graph that calls it once for each of several sets of random inputs, together larger
than the L2 cache, divided by their number: the median over replays. Its floor is max(bytes / bandwidth, FLOPs / rate)
with the ceilings that a large copy and a large bf16 product reach on an H200. Torch's body, where it runs there, is
timed beside it without a graph, launches included. The GEMM chain is what a step of `--gemm-tokens` rows multiplies,
all layers and the head, through cuBLAS in one graph; the draft's has no head. Prints a table, writes `kernels.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from graph_timing import DEVICE, time_calls, time_graph  # noqa: E402

if DEVICE == "cpu":  # before the kernels are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernel_cases import (  # noqa: E402
    BYTES_PER_S,
    FLOPS_PER_S,
    QWEN3_8B,
    SMOKE,
    Call,
    Case,
    Cases,
    Geometry,
    floor_us,
    gemm_shapes,
)
from servers import provenance  # noqa: E402

GEMM_TOKENS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048)
ROTATED_BYTES = 200e6  # over three times the L2 cache of an H200
MAX_SETS = 32


def measure(case: Case) -> dict[str, Any]:
    """The row of a case's table."""
    num_sets = 1 if DEVICE == "cpu" else max(2, min(MAX_SETS, int(ROTATED_BYTES / case.num_bytes) + 1))
    calls: list[Call] = [case.make(seed) for seed in range(num_sets)]
    named = [partial(call, implementation="triton") if case.has_torch else call for call in calls]
    microseconds, floor = time_graph(named), floor_us(case.num_bytes, case.flops)
    row: dict[str, Any] = {
        "kernel": case.name,
        "num_reqs": case.num_reqs,
        "us": round(microseconds, 2),
        "floor_us": float(f"{floor:.4g}"),
        "over_floor": float(f"{microseconds / floor:.4g}"),
        "num_bytes": case.num_bytes,
        "flops": case.flops,
        "num_input_sets": num_sets,
        "torch_us": None,
    }
    if case.has_torch:
        reference = partial(calls[0], implementation="torch")
        reference()
        row["torch_us"] = round(time_calls(reference), 1)
    return row


class GemmChain:
    """Products one after the other, each with weights of its own."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        self._shapes = shapes
        self._weights = [self._random(out, inner) for inner, out in shapes]

    @staticmethod
    def _random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE) * shape[-1] ** -0.5

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(2 * weight.numel() for weight in self._weights)

    def measure(self, num_tokens: int) -> dict[str, Any]:
        """Milliseconds of one chain over `num_tokens` rows, and of its floor."""
        inputs = {inner: self._random(num_tokens, inner) for inner, _ in self._shapes}
        outputs = {out: self._random(num_tokens, out) for _, out in self._shapes}

        def chain() -> None:
            for (inner, out), weight in zip(self._shapes, self._weights, strict=True):
                torch.mm(inputs[inner], weight.t(), out=outputs[out])

        milliseconds = time_graph([chain]) * 1e-3
        floor = floor_us(self.num_bytes, float(num_tokens) * self.num_bytes) * 1e-3
        return {
            "num_tokens": num_tokens,
            "ms": round(milliseconds, 3),
            "floor_ms": round(floor, 3),
            "over_floor": round(milliseconds / floor, 3),
        }


def measure_chains(g: Geometry, tokens: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Verify's chain with the head, the draft's without."""
    chains: dict[str, list[dict[str, Any]]] = {}
    layers = {"verify": (g.num_layers, True), "draft": (g.num_draft_layers, False)}
    for name, (num_layers, with_head) in layers.items():
        chain = GemmChain(gemm_shapes(g, num_layers, with_head))
        chains[name] = [chain.measure(num_tokens) for num_tokens in tokens]
        del chain
        release()
    return chains


def release() -> None:
    """Gives memory of what is no longer used back."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def measure_all(cases: Iterator[Case], only: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and what went wrong: one kernel that fails does not keep the others from being measured."""
    rows, failures = [], []
    for case in cases:
        if only is not None and only not in case.name:
            continue
        try:
            rows.append(measure(case))
            print(line(rows[-1]), flush=True)
        except Exception:
            failures.append(f"{case.name} at {case.num_reqs} requests:\n{traceback.format_exc()}")
            print(failures[-1], flush=True)
        release()
    return rows, failures


HEADER = (
    f"{'kernel':26} {'requests':>8} {'µs':>10} {'floor µs':>10} {'over floor':>10} {'torch, eager µs':>16}"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    torch_us = "-" if row["torch_us"] is None else f"{row['torch_us']:.1f}"
    return (
        f"{row['kernel']:26} {row['num_reqs']:8} {row['us']:10.2f} {row['floor_us']:10.2f} "
        f"{row['over_floor']:10.2f} {torch_us:>16}"
    )


def numbers(text: str) -> list[int]:
    """`1,8,32` as integers."""
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Exit code 1 where a kernel failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--only", help="kernels whose name contains this; no GEMM chain then")
    parser.add_argument("--gemm-tokens", type=numbers, default=list(GEMM_TOKENS))
    parser.add_argument("--no-gemm", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--out", type=Path, help="folder of kernels.json")
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.smoke:
        parser.error("there is no GPU here; --smoke tries everything out on a CPU")
    geometry = SMOKE if options.smoke else QWEN3_8B
    requests = [1, 3] if options.smoke else options.requests
    tokens = [1, 8] if options.smoke else options.gemm_tokens
    started = time.monotonic()
    print(HEADER, flush=True)
    cases = Cases(geometry, DEVICE)
    kernels, failures = measure_all((case for n in requests for case in cases.all(n)), options.only)
    chains = {} if options.no_gemm or options.only else measure_chains(geometry, tokens)
    result = {
        **provenance(),
        "geometry": vars(geometry),
        "bytes_per_s": BYTES_PER_S,
        "flops_per_s": FLOPS_PER_S,
        "kernels": kernels,
        "gemm_chains": chains,
        "failures": failures,
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    print(HEADER)
    for row in sorted(kernels, key=lambda row: (row["kernel"], row["num_reqs"])):
        print(line(row))
    for name, points in chains.items():
        print(f"GEMM chain, {name}: tokens, ms, over floor")
        print("  ".join(f"{p['num_tokens']}: {p['ms']:.2f} ({p['over_floor']:.2f})" for p in points))
    print(f"{len(kernels)} measurements, {len(failures)} failures, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
