"""What `gpu_serving.py` prints of its rows, and the peer's figures that it compares with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Decode tokens/s of SGLang 0.5.17 on an H200 at Qwen3-8B's geometry, random weights, 128 prompt and 256 output tokens:
# without a draft, and DFLASH with full blocks of 8 and a simulated acceptance length of 4.
PEER = {
    1: (199.5, 617.9),
    4: (776.7, 2413.0),
    8: (1513.0, 4521.0),
    16: (2993.0, 8549.0),
    32: (5601.0, 13117.0),
    64: (9910.0, 15681.0),
    128: (15238.0, 16369.0),
}


def name_of(point: Mapping[str, Any]) -> str:
    """A point of a table in a few characters."""
    return f"{point['prompts']} T={point['temperature']:g} c={point['concurrency']}"


def show(row: Mapping[str, Any]) -> None:
    """One point's table."""
    oracle = "" if row["oracle"] is None else f", oracle {row['oracle']:.3f}"
    print(f"\n{name_of(row)}{oracle}")
    print(
        f"{'arm':11s} {'decode/s':>9s} {'ratio':>6s} {'from':>6s} {'to':>6s} {'/ step':>6s} {'× acc.':>6s} "
        f"{'output/s':>9s} {'TTFT ms':>7s} {'p99':>6s} {'token ms':>8s} {'p99':>6s} {'accept':>6s} {'verified':>8s} "
        f"{'run':>5s} {'free':>5s} {'step ms':>7s} {'share':>6s}"
    )
    for arm, f in row["arms"].items():
        print(
            f"{arm:11s} {f['decode_rate']:9.1f} {f['ratio']:6.3f} {min(f['ratios']):6.3f} {max(f['ratios']):6.3f} "
            f"{f['step_ratio']:6.3f} {f['accept_ratio']:6.3f} {f['output_rate']:9.1f} {f['ttft_p50_ms']:7.1f} "
            f"{f['ttft_p99_ms']:6.1f} {f['inter_token_p50_ms']:8.2f} {f['inter_token_p99_ms']:6.2f} "
            f"{f['accept_length']:6.2f} {f['verified']:8.2f} {_or_dash(f['padded'], '5.2f')} {f['draft_free']:5.0%} "
            f"{f['step_ms']:7.2f} {_or_dash(f['share'], '6.2f')}"
        )
    if "best_fixed" in row:
        swept = "  ".join(f"{arm} {rate:.0f}" for arm, rate in row["best_fixed"]["swept"].items())
        print(f"fixed lengths, short runs: {swept}; {_over_fixed(row)}")
    sys.stdout.flush()


def show_summary(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per point: every arm over the first, and compact over the best fixed length where those were run."""
    print("\nratios of decode tokens/s over the first arm")
    for row in rows:
        arms = row["arms"]
        shown = "  ".join(f"{arm} {f['ratio']:.3f}" for arm, f in list(arms.items())[1:])
        if "best_fixed" in row:
            shown += f"  | {_over_fixed(row)}"
        print(f"{name_of(row):14s} {shown}")


def show_peer(rows: Sequence[Mapping[str, Any]]) -> None:
    """Simulated acceptance against the peer's figures."""
    print("\nsimulated acceptance: decode tokens/s here / SGLang 0.5.17 = ratio")
    for row in rows:
        peer = PEER.get(row["concurrency"])
        if peer is None:
            continue
        ours = {arm: figures["decode_rate"] for arm, figures in row["arms"].items()}
        pairs = [
            f"{arm} {ours[arm]:.1f} / {theirs:.1f} = {ours[arm] / theirs:.3f}"
            for arm, theirs in (("static", peer[1]), ("off", peer[0]))
            if arm in ours
        ]
        print(f"c={row['concurrency']:<4d} {', '.join(pairs)}")


def _over_fixed(row: Mapping[str, Any]) -> str:
    best = row["best_fixed"]
    return f"compact / {best['arm']} {best['ratio']:.3f}"


def _or_dash(value: float | None, form: str) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)
