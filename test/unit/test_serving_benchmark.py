"""The arithmetic of the serving benchmark: windows, medians with their bounds, and what an oracle would gain."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from flashspark.speculative.cost_table import SpsAdditiveCostTable
from flashspark.speculative.tiers import TierGrid, TierRule

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from closed_loop import Seen, summarise
from serving import Point, Results, median_interval, oracle_ratio, parse, points_of, settings_of, verdicts

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_was_recorded():
    recorded = json.loads((ROOT / "benchmark" / "results" / "serving_cpu.json").read_text())
    page = (ROOT / "docs/performance.md").read_text().partition("## Serving on a GPU")[0]
    rows = re.findall(r"^[|] ([01]) [|] (\d+) [|] ([^\n]*) [|]$", page, re.M)
    assert len(rows) == len(recorded["ratios"]) == 12
    for (temperature, concurrency, rest), row in zip(rows, recorded["ratios"], strict=True):
        assert (float(temperature), int(concurrency)) == (row["temperature"], row["concurrency"])
        ratio, interval, output, oracle, *_ = rest.split(" | ")
        assert ratio == f"{row['ratio']:.2f}"
        assert interval == "{:.2f} … {:.2f}".format(*row["interval"])
        assert (output, oracle) == (f"{row['output_ratio']:.2f}", f"{row['oracle']:.2f}")


def test_figures_are_of_the_time_at_full_concurrency():
    """Two clients: the second gets its first token at 2 s, the first is through at 6 s."""
    first = [
        Seen(0.0, [(1.0, 2), (2.0, 3), (3.0, 3)], 3),  # 6 tokens in 2 s
        Seen(3.0, [(4.0, 1), (6.0, 4)], 2),  # 4 tokens in 2 s
    ]
    second = [
        Seen(0.0, [(2.0, 2), (5.0, 3)], 2),  # 3 tokens in 3 s
        Seen(5.0, [(5.5, 1), (9.0, 99)], 2),  # ends after the window
    ]
    segment = summarise([first, second], 2)
    # From 2 s on: 3 tokens in 1 s, 4 in 2, 3 in 3, and of the last request nothing after its first frame.
    assert segment.decode_rate == pytest.approx((3 + 4 + 3) / (1 + 2 + 3) * 2)
    assert segment.output_rate == pytest.approx((3 + 1 + 4 + 3 + 1) / 4)
    assert segment.accept_length == pytest.approx((8 + 5 + 5) / (3 + 2 + 2))
    assert segment.num_tokens == 118
    assert segment.ttft[0] == pytest.approx(1.0)  # of 1, 1, 2 and 0.5
    assert segment.inter_token[0] == pytest.approx((1 / 3 + 1 / 2) / 2)  # of 1/3, 1/3, 1/2 and 1 s per token


@pytest.mark.parametrize(
    ("num", "low", "high"),
    [(5, 1, 5), (6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10), (20, 6, 15)],
)
def test_the_interval_of_a_median_is_that_of_the_tables(num, low, high):
    """Ranks from the binomial distribution, as tables of the sign test give them."""
    assert median_interval(list(range(num, 0, -1))) == (low, high)


def test_the_oracle_verifies_what_is_accepted_and_one_row_more():
    """Two requests, blocks of four: 1 s, 1 s for each request, 1 s for each row; tiers of two rows."""
    table = SpsAdditiveCostTable(1.0, (0, 2), (0.0, 2.0), (0, 8), (0.0, 8.0))
    grid = TierGrid(TierRule(4, 2, finest_tokens=2))
    steps = [[1, 2], [4, 4]]  # 3 rows run on a tier of 4, 8 on one of 8
    assert oracle_ratio(steps, table, grid) == pytest.approx((11 + 11) / (7 + 11))


def options_of(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["serving.py", *arguments])
    return parse()


def test_a_sweep_goes_on_with_the_points_that_its_file_lacks(tmp_path, monkeypatch):
    out = tmp_path / "sweep.json"
    source = {"command": "c", "commit": "abc", "machine": {"cores": 2, "load_average": 0.5}}
    arguments = [
        "--concurrency",
        "1",
        "2",
        "--temperature",
        "0",
        "1",
        "--pairs",
        "3",
        "--out",
        str(out),
        "--resume",
    ]
    results = Results(options_of(monkeypatch, *arguments), source)
    points = points_of(results.settings)
    assert points == [Point(1, 0.0), Point(2, 0.0), Point(1, 1.0), Point(2, 1.0)]
    assert [results.lacks(point) for point in points] == [True] * 4
    row = {"arm": "compact", "ratio": 1.23456, "share": None}
    for point in (points[2], points[0]):  # in any order
        results.add([{**row, **asdict(point)}], [asdict(point)], 10.0, "{}")

    busier = {**source, "machine": {"cores": 2, "load_average": 9.0}}
    resumed = Results(options_of(monkeypatch, *arguments, "--max-points", "1"), busier)
    assert [resumed.lacks(point) for point in points] == [False, True, False, True]
    assert [row["ratio"] for row in resumed.content["ratios"]] == [1.235, 1.235]
    assert [Point(f["concurrency"], f["temperature"]) for f in resumed.content["figures"]] == [
        points[0],
        points[2],
    ]
    assert (resumed.content["seconds"], resumed.content["cost_tables"]) == (20, ["{}"])

    for other in ({"commit": "def"}, {"machine": {"cores": 4}}):
        with pytest.raises(SystemExit, match=f"another {next(iter(other))}"):
            Results(options_of(monkeypatch, *arguments), {**source, **other})
    with pytest.raises(SystemExit, match="another settings"):
        Results(options_of(monkeypatch, *arguments, "--max-new-tokens", "32"), source)


def test_arms_are_live_settings():
    width = "speculative_num_draft_tokens"
    assert settings_of("static:4") == {"ragged_verify_mode": "static", "speculation": True, width: 4}
    assert settings_of("compact") == {"ragged_verify_mode": "compact", "speculation": True, width: None}
    assert settings_of("off") == {"ragged_verify_mode": "static", "speculation": False, width: None}


def test_verdicts_are_of_compact_alone():
    row = {"temperature": 0.0, "share": 0.6}
    rows = [
        {**row, "arm": "off", "concurrency": 32, "ratio": 0.5},
        {**row, "arm": "compact", "concurrency": 32, "ratio": 1.2},
        {**row, "arm": "compact", "concurrency": 1, "ratio": 0.98},
    ]
    lines = verdicts(rows)
    assert lines[0].startswith("worst compact / static 0.980")
    assert any("at 32, T=0: 1.200 (bar 1.15)" in line for line in lines)
    assert any("share of the oracle's gain at 32, T=0: 0.60 (bar 0.5)" in line for line in lines)
    assert verdicts(rows[:1]) == []
