"""The picture of a profile: measured cells and what the table makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from flashspark.speculative.cost_table import SpsCostTable

from .live_server import ProfileError
from .sps_fit import Table, fit_errors
from .sps_rounds import Round

COLORS = "viridis"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(table: Table, rounds: Sequence[Round], path: Path, title: str) -> None:
    """Writes a PNG: step time over rows, by batch size where that matters, and the error of every cell."""
    if not can_plot():
        raise ProfileError("drawing needs matplotlib: pip install 'flashspark[bench]', or give --no-plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    errors = fit_errors(table, rounds)
    figure, (times, misses) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    sizes = sorted({error.batch_size for error in errors})
    colors = pyplot.get_cmap(COLORS)(np.linspace(0, 0.9, len(sizes)))
    for size, color in zip(sizes, colors, strict=True):
        cells = [error for error in errors if error.batch_size == size]
        rows = [cell.num_rows for cell in cells]
        times.plot(rows, [1e3 * cell.measured_seconds for cell in cells], "o", color=color, label=f"{size}")
        if not isinstance(table, SpsCostTable):
            span = np.arange(min(rows), max(rows) + 1)
            times.plot(span, 1e3 * table.step_seconds(size, span), color=color, linewidth=1)
        misses.plot(rows, [100 * cell.relative for cell in cells], "o", color=color)
    if isinstance(table, SpsCostTable):
        probes = np.array(table.sample_batch_tokens)
        times.plot(
            probes, 1e3 * table.step_seconds(1, probes), color="0.4", drawstyle="steps-pre", linewidth=1
        )
    times.set(xlabel="rows of a step", ylabel="milliseconds a step", title=title)
    times.legend(title="requests", fontsize="small", ncols=2)
    misses.axhline(0, color="0.7", linewidth=1)
    misses.set(xlabel="rows of a step", ylabel="table against measured, %", title="error of the fit")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
