"""Computes the worked example of docs/adaptive-verification.md with the planner's own functions, and draws it.

    python scripts/plot_worked_example.py                               print the page's two tables
    python scripts/plot_worked_example.py docs/adaptive-verification.svg    and draw the picture (needs matplotlib)

`test/unit/test_check_readme.py` holds the page against what this prints.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashspark.kernels.allocate import allocate
from flashspark.speculative.cost_table import SpsCostTable, price_budgets
from flashspark.speculative.objective import best_budget, candidates, survivals

NAMES = ("A", "B", "C", "D")
# P(draft k accepted | those before it accepted): one request that goes well, one that does not, two between.
CONFIDENCE = (
    (0.95, 0.95, 0.90, 0.90),
    (0.90, 0.80, 0.70, 0.60),
    (0.70, 0.60, 0.50, 0.50),
    (0.40, 0.30, 0.30, 0.20),
)
# A step is padded up to 4, 8, 12, 16 or 20 rows and takes so long.
TABLE = SpsCostTable((4, 8, 12, 16, 20), tuple(1e3 / ms for ms in (6.0, 7.0, 8.5, 10.0, 12.0)), 20)
EPS = 1e-6


@dataclass(frozen=True)
class Example:
    """What the functions say. R = 4 requests, gamma = 4 drafts each."""

    survival: NDArray[np.float32]  # [R, gamma]
    tau: NDArray[np.float64]  # [budget + 1], expected tokens
    seconds: NDArray[np.float64]  # [budget + 1]
    best: int
    verify_lens: list[int]

    @property
    def theta(self) -> NDArray[np.float64]:
        """Expected tokens per second, by budget."""
        return self.tau / self.seconds


def compute() -> Example:
    """The example from end to end: survival, budget, shares."""
    confidence = np.array(CONFIDENCE, dtype=np.float32)
    num_reqs, gamma = confidence.shape
    floors, caps = np.ones(num_reqs, dtype=np.int64), np.full(num_reqs, gamma + 1, dtype=np.int64)
    survival = survivals(confidence.copy(), np.ones(num_reqs, dtype=np.bool_))
    tau = candidates(survival, floors, caps, EPS).expected_tokens()
    seconds = price_budgets(TABLE, num_reqs, int(floors.sum()), num_reqs * gamma).seconds
    best = best_budget(tau, seconds)
    shares = allocate(torch.tensor(confidence), best, torch.tensor(floors), torch.tensor(caps), EPS)
    return Example(survival, tau, seconds, best, shares.tolist())


def survival_table(example: Example) -> str:
    """Who survives how far, and what each verifies; admitted drafts are bold."""
    lines = [
        "| request | draft 1 | draft 2 | draft 3 | draft 4 | rows verified |",
        "|---|---|---|---|---|---|",
    ]
    for name, row, length in zip(NAMES, example.survival, example.verify_lens, strict=True):
        cells = [f"**{value:.2f}**" if k < length - 1 else f"{value:.2f}" for k, value in enumerate(row)]
        lines.append(f"| {name} | {' | '.join(cells)} | {length} of {len(row) + 1} |")
    return "\n".join(lines)


def budget_table(example: Example) -> str:
    """What a few budgets give: none, the last of each tier, and with them the best."""
    lines = ["| budget | rows | expected tokens | step | tokens per second |", "|---|---|---|---|---|"]
    for rows in TABLE.sample_batch_tokens:
        budget = rows - len(NAMES)
        mark = "**" if budget == example.best else ""
        cells = [
            f"{budget}",
            f"{rows}",
            f"{example.tau[budget]:.2f}",
            f"{1e3 * example.seconds[budget]:.1f} ms",
            f"{example.theta[budget]:.0f}",
        ]
        lines.append("| " + " | ".join(f"{mark}{cell}{mark}" for cell in cells) + " |")
    return "\n".join(lines)


def draw(example: Example, path: Path) -> None:
    """Left the blocks and what is admitted of them, right tokens per second over the budget."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "flashspark", "font.size": 9})
    from matplotlib import pyplot

    figure, (blocks, curve) = pyplot.subplots(1, 2, figsize=(9, 3.1), width_ratios=(1, 1.25))
    _draw_blocks(example, blocks)
    _draw_curve(example, curve)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_blocks(example: Example, axes: Any) -> None:
    for r, (row, length) in enumerate(zip(example.survival, example.verify_lens, strict=True)):
        for k, text in enumerate(["anchor", *(f"{value:.2f}" for value in row)]):
            colour = "#9db7d5" if k == 0 else "#bfe0b4" if k < length else "#f2f2f2"
            axes.add_patch(_box(k, r, colour))
            axes.text(
                k + 0.5, r + 0.5, text, ha="center", va="center", color="black" if k < length else "#888888"
            )
    axes.set(
        xlim=(-0.05, 5.05),
        ylim=(4.05, -0.05),
        yticks=[r + 0.5 for r in range(4)],
        yticklabels=NAMES,
        xticks=[],
    )
    axes.set_title(f"Survival of each draft; green is verified ({example.best} of 16)")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _box(column: int, row: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (column + 0.03, row + 0.06), 0.94, 0.88, facecolor=colour, edgecolor="#777777", linewidth=0.6
    )


def _draw_curve(example: Example, axes: Any) -> None:
    budgets = np.arange(len(example.tau))
    axes.plot(budgets, example.theta, color="#3b6ea5", marker="o", markersize=3.5)
    axes.plot(example.best, example.theta[example.best], color="#2f8f2f", marker="o", markersize=8)
    axes.annotate(
        f"best: {example.best} drafts, {example.theta[example.best]:.0f}/s",
        (example.best, example.theta[example.best]),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
    )
    axes.annotate(
        f"all: {example.theta[-1]:.0f}/s",
        (budgets[-1], example.theta[-1]),
        xytext=(0, -14),
        textcoords="offset points",
        ha="right",
    )
    low, high = float(example.theta.min()), float(example.theta.max())
    margin = 0.15 * (high - low)
    axes.set(
        xlabel="budget: drafts verified by all requests together", ylim=(low - margin, high + 1.5 * margin)
    )
    axes.set_title("Expected tokens per second")
    axes.grid(alpha=0.3)


def main() -> None:
    example = compute()
    print(f"{survival_table(example)}\n\n{budget_table(example)}")
    for path in sys.argv[1:]:
        draw(example, Path(path))


if __name__ == "__main__":
    main()
