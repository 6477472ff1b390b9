"""Finds the algorithms of cuBLASLt that `kernels/matmul_seeds.py` names: tries all of them at many numbers of rows.

    python benchmark/matmul_algorithms.py --out FOLDER [--rows 1,8,64,256,1024] [--tolerance 0.01]

Of each product of Qwen3-8B, every algorithm that the library lists for any number of rows is timed once; the best of
them then run in turns. What is printed last is the fewest algorithms that come within the tolerance of the quickest
everywhere, in the words of `matmul_seeds`. A minute on an H200. Writes `matmul_algorithms.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from kernel_cases import QWEN3_8B, gemm_shapes  # noqa: E402
from servers import provenance  # noqa: E402

from flashspark.kernels.cublaslt import WORKSPACE_BYTES, Algorithm, Product  # noqa: E402
from flashspark.kernels.matmul import LIBRARIES, Way  # noqa: E402
from flashspark.kernels.matmul_choice import Bench  # noqa: E402

ROWS = (1, 8, 16, 32, *range(64, 192, 32), *range(192, 513, 16), *range(576, 1025, 64), 1280, 1536, 2048)
LISTED_UP_TO, LISTED_EVERY = 2048, 8  # numbers of rows whose algorithms are asked for
WORKSPACES = (0, 4 << 20, WORKSPACE_BYTES)  # bytes; what the library lists depends on it
NUM_WEIGHTS, NUM_FINALISTS, NUM_ROUNDS = 3, 14, 6


def pool(weight: torch.Tensor, scratch: torch.Tensor) -> list[Way]:
    """All that the library lists, each once."""
    found: dict[Way, None] = {}
    for num_rows in range(LISTED_EVERY, LISTED_UP_TO + 1, LISTED_EVERY):
        x = weight.new_empty(num_rows, weight.shape[0])
        with Product(x, weight, scratch[:num_rows]) as product:
            for size in WORKSPACES:
                found.update(dict.fromkeys(product.algorithms(size)))
    return list(found)


def fewest(cells: Iterable[Mapping[str, float]], usual: Sequence[float], tolerance: float) -> list[str]:
    """A small set of names, one within `tolerance` of the best of every cell that beats its `usual` by as much.

    Greedy, the most useful name first; equal ones in the order of their names.
    """
    left = []
    for times, without in zip(cells, usual, strict=True):
        limit = min(times.values()) * (1 + tolerance)
        if limit < without:
            left.append({name for name, time in times.items() if time <= limit})
    chosen: list[str] = []
    while left:
        counts = Counter(name for names in left for name in names)
        chosen.append(min(counts, key=lambda name: (-counts[name], name)))
        left = [names for names in left if chosen[-1] not in names]
    return chosen


def word(way: Algorithm) -> str:
    """Tile, splits, custom option and cluster, as `matmul_seeds` writes them."""
    return ".".join(str(way.configuration[place]) for place in (1, 2, 5, 8))


def measure(bench: Bench, num_rows: int, ways: Sequence[Way]) -> dict[str, float]:
    """Milliseconds by word or library, of the best of `ways` and PyTorch's."""
    times = bench.measure(num_rows, ways, 1)
    order = sorted(range(len(ways)), key=times.__getitem__)[:NUM_FINALISTS]
    finalists = [*LIBRARIES, *(ways[i] for i in order)]
    found = bench.measure(num_rows, finalists, NUM_ROUNDS)
    return {
        word(way) if isinstance(way, Algorithm) else way: time
        for way, time in zip(finalists, found, strict=True)
    }


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--rows", type=lambda text: [int(part) for part in text.split(",")], default=list(ROWS)
    )
    parser.add_argument("--tolerance", type=float, default=0.01)
    options = parser.parse_args()
    shapes = list(dict.fromkeys(gemm_shapes(QWEN3_8B, 1, True)))  # (in, out), the head last
    groups = []
    for i, (inner, out) in enumerate(shapes):
        is_head = i == len(shapes) - 1
        weights = [
            torch.randn(out, inner, dtype=torch.bfloat16, device="cuda") * inner**-0.5
            for _ in range(1 if is_head else NUM_WEIGHTS)
        ]
        weights = [weight.t() if is_head else weight.t().contiguous() for weight in weights]
        dtype = torch.float32 if is_head else torch.bfloat16
        groups.append((weights, torch.empty(LISTED_UP_TO, out, dtype=dtype, device="cuda")))
    of_layers = list(
        dict.fromkeys(way for weights, scratch in groups[:-1] for way in pool(weights[0], scratch))
    )
    pools = [of_layers] * (len(groups) - 1) + [pool(groups[-1][0][0], groups[-1][1])]
    points: list[dict[str, Any]] = []
    for (weights, scratch), ways in zip(groups, pools, strict=True):
        bench = Bench(weights, scratch)
        for num_rows in options.rows:
            times = measure(bench, num_rows, ways)
            best = min(times, key=lambda name: times[name])
            usual = min(times[library] for library in LIBRARIES)
            points.append({"shape": tuple(weights[0].shape), "rows": num_rows, "ms": times})
            print(
                f"{num_rows:5d} × {tuple(weights[0].shape)!s:16s} PyTorch {usual * 1e3:8.1f} µs, best "
                f"{times[best] * 1e3:8.1f} ({times[best] / usual:.3f}) {best}",
                flush=True,
            )
    options.out.mkdir(parents=True, exist_ok=True)
    result = {**provenance(), "num_algorithms": [len(ways) for ways in pools], "points": points}
    (options.out / "matmul_algorithms.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, of_head in (("to half precision", False), ("to float32", True)):
        cells = [point for point in points if (point["shape"] == tuple(shapes[-1])) == of_head]
        times = [{k: v for k, v in cell["ms"].items() if k not in LIBRARIES} for cell in cells]
        usual_times = [min(cell["ms"][library] for library in LIBRARIES) for cell in cells]
        print(f"\n{name}: {' '.join(sorted(fewest(times, usual_times, options.tolerance)))}")


if __name__ == "__main__":
    main()
