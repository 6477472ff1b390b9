"""scripts/gpu_table.sh asks for every table, and performance_tables.py takes over what came out."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import performance_tables

ROOT = Path(__file__).parents[2]
STUB = """#!/bin/sh
case "$*" in *matplotlib*) exit 1;; -c*) exit 0;; esac
echo "$*" >> "$CALLS"
"""


def calls_of(tmp_path, **environment) -> list[list[str]]:
    """What the script runs on a machine where the pair is there, call by call."""
    pair, stub, calls = tmp_path / "pair", tmp_path / "python", tmp_path / "calls"
    (pair / "dspark").mkdir(parents=True, exist_ok=True)
    (pair / "dspark" / "config.json").write_text("{}")
    stub.write_text(STUB)
    stub.chmod(0o755)
    calls.unlink(missing_ok=True)
    names = ("PIECES", "LENGTHS", "PARTS", "SERVER_ARGS", "TABLE_ARGS", "PEER_ARGS", "COMMIT", "PYTHONPATH")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_table.sh"), str(tmp_path / "out")],
        env={**clean, "PAIR": str(pair), "PYTHON": str(stub), "CALLS": str(calls), **environment},
        check=True,
        capture_output=True,
    )
    return [line.replace(str(tmp_path), "T").split() for line in calls.read_text().splitlines()]


def value_of(call: list[str], flag: str) -> str:
    return call[call.index(flag) + 1]


def test_one_engine_plays_the_whole_table_and_another_the_peers(tmp_path):
    table, draft, simulated, _, random = calls_of(tmp_path, COMMIT="abc")
    assert table[:2] == ["benchmark/gpu_serving.py", "--in-process"]
    assert value_of(table, "--concurrency") == "1,2,4,8,16,32,64,128,256"
    assert value_of(table, "--draft") == "T/pair/dflash2" and value_of(table, "--commit") == "abc"
    lengths = table.index("--lengths")
    assert table[lengths : lengths + 3] == ["--lengths", "W2:0", "W1:0"]
    assert value_of(table, "--breakdown") == "T/out/breakdown" and "--resume" in table
    assert draft == ["benchmark/peer_draft.py", "T/pair/dflash2", "T/pair/peer-draft"]
    assert value_of(simulated, "--concurrency") == "1,4,8,16,32,64,128"
    assert value_of(simulated, "--draft") == "T/pair/peer-draft"
    assert value_of(simulated, "--simulate-accept") == "4" and "--lengths" not in simulated
    assert value_of(simulated, "--breakdown") == "T/out/simulated-breakdown"
    assert "--load-format" not in simulated and value_of(random, "--load-format") == "dummy"
    assert value_of(random, "--simulate-accept") == "4" and value_of(random, "--out") == "T/out/random.json"
    for call in (simulated, random):
        assert value_of(call, "--speculative-draft-load-format") == "dummy"


def test_pieces_and_parts(tmp_path):
    calls = calls_of(
        tmp_path, PIECES="1,2 64", LENGTHS="none", TABLE_ARGS="--repeats 5", PARTS="table breakdown"
    )
    assert [value_of(call, "--concurrency") for call in calls] == ["1,2", "64"]
    assert ["--breakdown" in call for call in calls] == [False, True]
    assert all(value_of(call, "--repeats") == "5" and "--lengths" not in call for call in calls)
    (alone,) = calls_of(tmp_path, PARTS="breakdown", SERVER_ARGS="--page-size 32")
    assert alone[0] == "benchmark/step_breakdown.py" and value_of(alone, "--page-size") == "32"
    _, simulated = calls_of(tmp_path, PARTS="simulated")
    assert simulated[0] == "benchmark/gpu_serving.py" and "--breakdown" not in simulated


def test_what_is_recorded_names_no_folder_of_its_machine(tmp_path, monkeypatch):
    out, results = tmp_path / "out", tmp_path / "results"
    (out / "breakdown").mkdir(parents=True)
    results.mkdir()
    command = "python x.py --model-path /tmp/a-b/target --draft /tmp/a-b/peer-draft --out /tmp/o.1/table.json"
    (out / "table.json").write_text(json.dumps({"command": command}))
    trace = {
        "kinds_us": {"products": 4150.4, "other": 300.2},
        "step_us": None,
        "gap_us": None,
        "launches": 545.2,
    }
    steps = {
        "traces": {"plain:1": trace, "static:32:1": {**trace, "step_us": 9500.0, "gap_us": 321.4}},
        "bars": [{"what": "idle share", "value": 0.01234, "bar": 0.03}],
    }
    (out / "breakdown" / "step_breakdown.json").write_text(json.dumps(steps))
    (out / "table.svg").write_text("<svg/>")
    monkeypatch.setattr(performance_tables, "RESULTS", results)
    monkeypatch.setattr(performance_tables, "PLOT", tmp_path / "plot.svg")
    tables = (performance_tables.steps, performance_tables.bars, performance_tables.products)
    assert {make() for make in tables} == {"Not recorded yet."}
    assert performance_tables.record(out) == [
        *("gpu_serving_h200.json", "step_breakdown_h200.json"),
        "plot.svg",
    ]
    assert (tmp_path / "plot.svg").read_text() == "<svg/>"
    assert performance_tables.load("gpu_serving_h200.json")["command"] == (
        "python x.py --model-path PAIR/target --draft PAIR/peer-draft --out OUT/table.json"
    )
    assert performance_tables.steps().splitlines()[2:] == [
        "| plain | 1 | 4,150 | 0 | 0 | 300 | – | – | 545 |",
        "| static | 32, T = 1 | 4,150 | 0 | 0 | 300 | 321 | 9,500 | 545 |",
    ]
    assert performance_tables.bars().splitlines()[-1] == "| idle share | 0.012 | 0.03 |"


def test_steps_beside_their_products(tmp_path, monkeypatch):
    monkeypatch.setattr(performance_tables, "RESULTS", tmp_path)
    times = {"chosen_ms": 4.0, "same_layout_ms": 4.4, "cublas_ms": 5.0}
    steps = {
        "cells": [
            {"mode": mode, "num_reqs": 1, "step_ms": ms} for mode, ms in (("plain", 4.8), ("static", 6.0))
        ],
        "chains": [
            {"mode": mode, "num_reqs": 1, "rows": n, **times} for mode, n in (("plain", 1), ("static", 8))
        ],
        "products": [{"rows": 160, **times}],
    }
    for name in (performance_tables.STEPS, performance_tables.PEER_STEPS):
        (tmp_path / name).write_text(json.dumps(steps))
    rows = performance_tables.products().splitlines()[2:]
    assert len(rows) == 5
    assert (
        rows[0] == "| plain, 1 requests | 1 | 4.800 | 4.000 | 4.400 | 5.000 | 0.800 | 1.200 | 1.091 | 0.960 |"
    )
    assert rows[1].startswith("| static, 1 requests, draft: DFlash2 | 8 | 6.000 |")
    assert rows[2] == "| target alone | 160 | – | 4.000 | 4.400 | 5.000 | 0.800 | – | – | – |"
    assert rows[4].startswith("| static, 1 requests, draft: the peer's | 8 |")


def test_points_that_were_not_measured_again_stay_with_their_commit(tmp_path, monkeypatch):
    def point(num_reqs, rate, **more):
        arms = {arm: {"decode_rate": rate} for arm in ("off", "static")}
        return {"prompts": "W1", "temperature": 0.0, "concurrency": num_reqs, "arms": arms, **more}

    monkeypatch.setattr(performance_tables, "RESULTS", tmp_path)
    old = {"commit": "a" * 40, "points": [point(1, 100.0), point(4, 400.0), point(8, 800.0, commit="0" * 40)]}
    (tmp_path / "gpu_simulated_h200.json").write_text(json.dumps(old))
    out = tmp_path / "out"
    out.mkdir()
    (out / "simulated.json").write_text(json.dumps({"commit": "b" * 40, "points": [point(1, 200.0)]}))
    performance_tables.record(out)
    found = performance_tables.points("gpu_simulated_h200.json")
    assert [(row["concurrency"], row["arms"]["off"]["decode_rate"], row["commit"]) for row in found] == [
        (1, 200.0, "b" * 7),
        (4, 400.0, "a" * 7),
        (8, 800.0, "0" * 7),
    ]
    lines = performance_tables.peer().splitlines()
    assert lines[2].startswith("| the pair's | 1 |") and lines[2].endswith("| bbbbbbb |")
    (out / "random.json").write_text(json.dumps({"commit": "c" * 40, "points": [point(8, 900.0)]}))
    performance_tables.record(out)
    *before, last = performance_tables.peer().splitlines()
    assert before == lines and last.startswith("| random | 8 | 900 |") and last.endswith("| ccccccc |")
