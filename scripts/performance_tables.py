"""Writes the GPU's tables of docs/performance.md from the files under benchmark/results, and the plot beside them.

    python scripts/performance_tables.py [--check] [--record OUT]

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`. `--check` writes nothing and fails where the page
says something else than the files. `--record` first takes over what `scripts/gpu_table.sh OUT` has measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "gpu_serving.svg"
STEPS, PEER_STEPS = "step_breakdown_h200.json", "step_breakdown_simulated_h200.json"
SIMULATED, RANDOM = "gpu_simulated_h200.json", "gpu_simulated_random_h200.json"
NOT_RECORDED = "Not recorded yet."
RECORDED = {
    "table.json": "gpu_serving_h200.json",
    "simulated.json": SIMULATED,
    "random.json": RANDOM,
    "breakdown/step_breakdown.json": STEPS,
    "simulated-breakdown/step_breakdown.json": PEER_STEPS,
    "kernels/kernels.json": "kernels_h200.json",
}


def load(name: str) -> dict[str, Any]:
    """A file of recorded results."""
    content: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return content


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def serving() -> str:
    """Arms over static by workload and concurrency, and what compact did."""
    rows = []
    for row in points("gpu_serving_h200.json"):
        static, compact, off = (row["arms"][arm] for arm in ("static", "compact", "off"))
        low, high = compact["interval"]
        share, best = compact["share"], row.get("best_fixed")
        rows.append(
            [
                f"{row['prompts']}, T = {row['temperature']:g}",
                str(row["concurrency"]),
                *(f"{arm['decode_rate']:,.0f}" for arm in (static, compact, off)),
                f"{compact['ratio']:.3f}",
                f"{low:.3f} … {high:.3f}",
                # A file of before these were kept per repeat has their medians.
                f"{compact.get('step_ratio', compact['step_ms'] / static['step_ms']):.3f}, "
                f"{compact.get('accept_ratio', compact['accept_length'] / static['accept_length']):.3f}",
                f"{best['ratio']:.3f} ({best['arm'].partition(':')[2]})" if best else "–",
                f"{compact['decode_rate'] / off['decode_rate']:.2f}",
                f"{row['oracle']:.2f}",
                f"{share:.2f}" if row["oracle"] > 1.05 else "–",
                f"{static['accept_length']:.2f}, {compact['accept_length']:.2f}",
                f"{compact['verified']:.1f}",
                f"{compact['draft_free']:.0%}",
                row["commit"],
            ]
        )
    head = (
        *("workload", "requests", "static, tokens/s", "compact", "no speculation", "compact / static"),
        *("seen", "step time and accepted, compact / static", "compact / best fixed length (which)"),
        *("compact / no speculation", "oracle", "share of its gain", "accepted, static and compact"),
        *("rows verified of 8", "steps without a draft", "commit"),
    )
    return table(head, rows)


def peer() -> str:
    """Simulated acceptance against the peer's figures."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    from serving_report import PEER

    rows = []
    of_pair = [("the pair's", row) for row in points(SIMULATED)]
    at_random = [("random", row) for row in (points(RANDOM) if (RESULTS / RANDOM).exists() else ())]
    for weights, row in of_pair + at_random:
        plain, drafted = PEER[row["concurrency"]]
        cells = [weights, str(row["concurrency"])]
        for arm, theirs in (("off", plain), ("static", drafted)):
            ours = row["arms"][arm]
            cells += [f"{ours['decode_rate']:,.0f}", f"{theirs:,.0f}", f"{ours['decode_rate'] / theirs:.3f}"]
        rows.append([*cells, row["commit"]])
    head = (
        "target's weights",
        "requests",
        "plain, tokens/s",
        "peer",
        "ratio",
        "full blocks, tokens/s",
        "peer",
        "ratio",
        "commit",
    )
    return table(head, rows)


def inflated() -> str:
    """The widened pair against the shipped one."""
    rows = [
        [
            record["draft"],
            f"{record['temperature']:g}",
            str(record["blocks"]),
            f"{record['small']:.3f}",
            f"{record['wide']:.3f}",
            f"{record['ratio']:.4f}",
            *(f"{value:.0f}" for value in record["largest_extra_logit"].values()),
        ]
        for record in load("inflated_8b_h200.json")["records"]
    ]
    head = ("draft", "T", "paired blocks", "shipped", "wide", "ratio", "largest extra logit, target", "draft")
    return table(head, rows)


def kernels() -> str:
    """Each kernel's time beside its floor."""
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in load("kernels_h200.json")["kernels"]:
        by_name.setdefault(record["kernel"], {})[record["num_reqs"]] = record
    sizes = sorted({size for cells in by_name.values() for size in cells})
    rows = [
        [name, *(f"{cells[size]['us']:.1f} ({cells[size]['floor_us']:.1f})" for size in sizes)]
        for name, cells in sorted(by_name.items())
    ]
    return table(("kernel, µs (floor)", *(f"{size} requests" for size in sizes)), rows)


def steps() -> str:
    """What the traced steps are made of."""
    path = RESULTS / STEPS
    if not path.exists():
        return NOT_RECORDED
    kinds = ("products", "attention", "copies", "other")
    rows = []
    for name, found in load(STEPS).get("traces", {}).items():
        mode, num_reqs, *temperature = name.split(":")
        at = ", T = ".join((num_reqs, *temperature))
        cells = [mode, at, *(f"{found['kinds_us'].get(kind, 0.0):,.0f}" for kind in kinds)]
        step, gap = (found[key] for key in ("step_us", "gap_us"))
        rows.append(
            [*cells, *("–" if v is None else f"{v:,.0f}" for v in (gap, step)), f"{found['launches']:.0f}"]
        )
    head = ("mode", "requests", *(f"{kind}, µs" for kind in kinds), "gaps", "step", "launches")
    return table(head, rows)


def bars() -> str:
    """What a step's parts took beside what they may."""
    if not (RESULTS / STEPS).exists():
        return NOT_RECORDED
    rows = [[bar["what"], f"{bar['value']:.3f}", f"{bar['bar']:g}"] for bar in load(STEPS)["bars"]]
    return table(("what", "measured", "bar"), rows)


def products() -> str:
    """Whole steps beside their products alone, and products beside cuBLAS's."""
    rows = []
    for name, draft in ((STEPS, "DFlash2"), (PEER_STEPS, "the peer's")):
        content = load(name) if (RESULTS / name).exists() else {}
        steps = {(c["mode"], c["num_reqs"]): c["step_ms"] for c in content.get("cells", ())}
        chains = [*content.get("chains", ()), *(content.get("products", ()) if name == STEPS else ())]
        for chain in chains:
            mode = chain.get("mode")
            step = steps.get((mode, chain.get("num_reqs")))
            times = [chain[f"{way}_ms"] for way in ("chosen", "same_layout", "cublas")]
            what = "target alone" if mode is None else f"{mode}, {chain['num_reqs']} requests"
            rows.append(
                [
                    what if mode != "static" else f"{what}, draft: {draft}",
                    str(chain["rows"]),
                    "–" if step is None else f"{step:.3f}",
                    *(f"{time:.3f}" for time in times),
                    f"{times[0] / times[2]:.3f}",
                    *("–" if step is None else f"{step / time:.3f}" for time in times),
                ]
            )
    if not rows:
        return NOT_RECORDED
    head = (
        *("what", "rows", "step, ms", "its products, ms", "by PyTorch's choice", "cuBLAS, [out, in]"),
        *("products / cuBLAS", "step / products", "/ PyTorch's choice", "/ cuBLAS"),
    )
    return table(head, rows)


def portable(text: str) -> str:
    """A measured file without the paths of the machine that it was measured on."""
    text = re.sub(r"/[\w./-]+/(target|dflash2|dspark|peer-draft)\b", r"PAIR/\1", text)
    return re.sub(r"(--(?:out|breakdown)[ =])/?(?:[\w.-]+/)+", r"\1OUT/", text)


def place(row: Mapping[str, Any]) -> tuple[str, float, int]:
    """A point's workload and load."""
    return row["prompts"], row["temperature"], row["concurrency"]


def points(name: str) -> list[dict[str, Any]]:
    """The points of a file in order, each with the commit it was measured at."""
    content = load(name)
    rows = ({**row, "commit": row.get("commit", content["commit"])[:7]} for row in content["points"])
    return sorted(rows, key=place)


def with_earlier(content: dict[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """A table, and what an earlier one has of points that were not measured again, under the commit they were."""
    measured = {place(row) for row in content["points"]}
    kept = [row for row in earlier["points"] if place(row) not in measured]
    content["points"] += [{**row, "commit": row.get("commit", earlier["commit"])} for row in kept]
    return content


def record(out: Path) -> list[str]:
    """Copies what lies in `out`; returns the names of what was written. Points that a table there lacks stay."""
    written = []
    for source, name in RECORDED.items():
        if (out / source).exists():
            text, target = portable((out / source).read_text()), RESULTS / name
            if target.exists() and "points" in (content := json.loads(text)):
                text = json.dumps(with_earlier(content, load(name)), indent=1) + "\n"
            target.write_text(text)
            written.append(name)
    if (out / "table.svg").exists():
        PLOT.write_text((out / "table.svg").read_text())
        written.append(PLOT.name)
    return written


TABLES: dict[str, Callable[[], str]] = {
    "serving": serving,
    "peer": peer,
    "inflated": inflated,
    "kernels": kernels,
    "steps": steps,
    "products": products,
    "bars": bars,
}


def filled(page: str) -> str:
    """`page` with every table as the files have it."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, page, flags=re.S)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail where the page is not what would be written"
    )
    parser.add_argument("--record", type=Path, metavar="OUT", help="take over what gpu_table.sh has measured")
    options = parser.parse_args()
    if options.record is not None:
        print("recorded:", *record(options.record) or ["nothing"])
    page = PAGE.read_text()
    wanted = filled(page)
    if options.check:
        return int(page != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
