"""Plots what benchmark/gpu_serving.py measured: each arm over static, and decode tokens/s, by concurrency.

python benchmark/plot_serving.py table.json [more.json …] --out table.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = {"static": "0.3", "compact": "tab:blue", "cap-accept": "tab:orange", "off": "tab:green"}


def by_workload(files: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The points of `files`, in order of concurrency; the last file has the say where two have a point."""
    points: dict[tuple[str, int], dict[str, Any]] = {}
    for file in files:
        for row in json.loads(file.read_text())["points"]:
            points[f"{row['prompts']}, temperature {row['temperature']:g}", row["concurrency"]] = row
    workloads: dict[str, list[dict[str, Any]]] = {}
    for (workload, _), row in sorted(points.items()):
        workloads.setdefault(workload, []).append(row)
    return workloads


def draw(workloads: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Writes the picture: a column per workload, ratios with their spread above, rates below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4.2 * len(workloads), 6.4)
    figure, axes = pyplot.subplots(
        2, len(workloads), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, (workload, rows) in enumerate(workloads.items()):
        ratios, rates = axes[:, column]
        for arm in rows[0]["arms"]:
            found = [(row["concurrency"], row["arms"][arm]) for row in rows if arm in row["arms"]]
            x, figures = zip(*found, strict=True)
            color = COLORS.get(arm)
            rates.plot(x, [f["decode_rate"] for f in figures], "o-", markersize=3, color=color, label=arm)
            ratios.plot(x, [f["ratio"] for f in figures], "o-", markersize=3, color=color, label=arm)
            ends = [min(f["ratios"]) for f in figures], [max(f["ratios"]) for f in figures]
            ratios.fill_between(x, *ends, color=color, alpha=0.2)
        if all(row["oracle"] is not None for row in rows):
            x, oracle = zip(*((row["concurrency"], row["oracle"]) for row in rows), strict=True)
            ratios.plot(x, oracle, "--", color="0.6", label="oracle")
        ratios.set(title=workload)
        rates.set(xlabel="requests at once", xscale="log", yscale="log")
        rates.set_xticks(x, [f"{c}" for c in x])
        rates.minorticks_off()
    first = next(iter(next(iter(workloads.values()))[0]["arms"]))
    axes[0, 0].set(ylabel=f"decode tokens/s, over {first}")
    axes[1, 0].set(ylabel="decode tokens/s")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main() -> None:
    """Reads, draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args()
    draw(by_workload(args.files), args.out)


if __name__ == "__main__":
    main()
