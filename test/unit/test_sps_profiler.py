"""The profiler of step costs: which steps count, what is fitted, and how a server is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fake_profiled_server import WIDTH, FakeProfiledServer
from flashspark.benchmark.dspark_sps_profiler import main
from flashspark.benchmark.live_server import LiveServer, ProfileError, ServerFacts
from flashspark.benchmark.sps_fit import PROBE_RATIO, fit_additive, fit_errors, fit_table
from flashspark.benchmark.sps_plot import can_plot
from flashspark.benchmark.sps_rounds import Cell, ProfileFiles, Round, check_steady, make_round, select_steady
from flashspark.benchmark.sps_sweep import SweepSettings, default_batch_sizes, plan_cells
from flashspark.speculative.cost_table import SpsAdditiveCostTable, SpsCostTable, load_cost_table
from flashspark.speculative.table_fit import sparse_probes

QUICK = ["--min-steady-steps", "10", "--min-steady-seconds", "0", "--poll-seconds", "0.02"]
PIN = "dspark_force_budget_frac"


def record(forward_ct: int, running: int = 2, rows: int = 8, ms: float | None = 10.0) -> dict:
    values = {"forward_ct": forward_ct, "num_running_reqs": running, "num_verify_tokens": rows}
    return values if ms is None else values | {"step_cpu_ms": ms}


def measured(batch_size: int, rows: int, seconds: float, frac: float | None = 0.5, repeat: int = 0) -> Round:
    return Round(repeat, batch_size, batch_size, frac, rows, 1.0 / seconds, 32, 1.0, [seconds], {}, rows)


# Which steps count.


def test_steady_steps_leave_out_ramp_warm_up_and_tail():
    ramp, tail = [record(i, running=1) for i in range(1, 6)], [record(i, running=1) for i in range(36, 40)]
    records = ramp + [record(i, ms=float(i)) for i in range(6, 36)] + tail
    steady = select_steady([records], 2, after=0)
    assert steady.num_aligned == 30
    assert steady.match_fraction == 1.0
    assert [step.forward_ct for step in steady.steps] == list(range(14, 36))
    assert steady.seconds == pytest.approx(24.5e-3)


def test_steps_before_the_watermark_and_without_a_time_do_not_count():
    records = [record(i, ms=None if i % 2 else 10.0) for i in range(1, 41)]
    steady = select_steady([records], 2, after=20)
    assert steady.num_aligned == 20
    assert [step.forward_ct for step in steady.steps] == [30, 32, 34, 36, 38, 40]
    assert select_steady([records], 2, after=40).num_aligned == 0


def test_ranks_count_together():
    first = [record(i, ms=10.0) for i in range(1, 31)]
    second = [record(i, running=2 if i != 15 else 1, ms=20.0) for i in range(3, 33)]
    steady = select_steady([first, second], 2, after=0)
    assert steady.num_aligned == 27
    assert steady.match_fraction == pytest.approx(27 / 28)
    assert steady.seconds == pytest.approx(15e-3)
    line = make_round(steady, Cell(0, 2, None), WIDTH, {})
    assert (line.batch_size, line.batch_size_per_rank) == (4, 2)
    assert line.per_rank_median_step_time == pytest.approx([10e-3, 20e-3])
    with pytest.raises(ProfileError, match="no step in common"):
        select_steady([first, [record(i) for i in range(100, 120)]], 2, after=0)


@pytest.mark.parametrize(
    ("records", "frac", "message"),
    [
        ([], None, "0 steps with the whole batch, 18 are needed"),
        ([record(i) for i in range(17)], None, "17 steps"),
        ([record(i, running=2 if i % 3 == 0 else 1) for i in range(90)], None, "only 3"),
        ([record(i, rows=7) for i in range(40)], None, "7 rows, 8 were asked for"),
        ([record(i, rows=4) for i in range(40)], 0.5, "the pin had no effect"),
        ([record(i, rows=5 + i % 2) for i in range(40)], 0.5, "several tiers"),
    ],
)
def test_cells_that_are_not_what_was_asked_for(records, frac, message):
    steady = select_steady([records], 2, after=-1)
    with pytest.raises(ProfileError, match=message):
        check_steady(steady, Cell(0, 2, frac), WIDTH, min_steps=10)


def test_a_disturbed_cell_is_warned_about():
    steady = select_steady([[record(i, running=2 if i % 5 else 1) for i in range(100)]], 2, after=0)
    (warning,) = check_steady(steady, Cell(0, 2, None), WIDTH, 10)
    assert "81% of the steps" in warning


# What is fitted.


def additive(requests: int, rows: int) -> float:
    return 0.004 + 0.0005 * requests + np.interp(rows, [1, 20, 60, 200], [0.0, 0.001, 0.006, 0.030])


def grid_rounds(
    fracs=(0.25, 0.5, 0.75, 1.0), sizes=(1, 2, 4, 8, 16, 32), noise=0.0, repeats=1
) -> list[Round]:
    draws = np.random.default_rng(0)
    rounds = []
    for repeat in range(repeats):
        for size in sizes:
            for frac in fracs:
                rows = Cell(0, size, frac).num_tokens(6)
                seconds = additive(size, rows) * (1 + noise * draws.standard_normal())
                rounds.append(measured(size, rows, seconds, frac, repeat))
    return rounds


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.02), (0.03, 0.06)])
def test_the_2d_fit_recovers_a_table(noise, tolerance):
    table = fit_table(grid_rounds(noise=noise, repeats=3 if noise else 1))
    assert isinstance(table, SpsAdditiveCostTable)
    for size in (1, 3, 6, 12, 24, 32):  # held out, between the probes too
        for frac in (0.2, 0.4, 0.6, 0.9):
            rows = Cell(0, size, frac).num_tokens(6)
            assert table.step_seconds(size, np.array([rows]))[0] == pytest.approx(
                additive(size, rows), rel=tolerance
            )


def test_the_2d_fit_never_falls():
    rounds = grid_rounds(noise=0.3)
    table = fit_additive(rounds)
    assert table.alpha_seconds[0] == table.theta_seconds[0] == 0.0
    assert np.all(np.diff(table.alpha_seconds) >= 0)
    assert np.all(np.diff(table.theta_seconds) >= 0)


def test_small_batches_have_probes_of_their_own():
    """SGLang's bins of 64 rows put every batch below 32 rows into one."""
    assert sparse_probes(np.array([1, 2, 4, 7, 8, 14, 28, 200]), PROBE_RATIO) == [1, 2, 4, 7, 14, 28, 200]
    table = fit_additive(
        [measured(n, n + b, 0.001 + 1e-4 * (n + b)) for n in (1, 2, 4) for b in (0, n, 2 * n)]
    )
    assert table.step_seconds(2, np.array([6]))[0] == pytest.approx(0.0016, rel=1e-3)


def test_rows_that_ran_are_priced_not_rows_that_were_asked_for():
    rounds = [replace(one, num_tokens_run=one.batch_tokens + 5) for one in grid_rounds()]
    assert fit_additive(rounds).m_probes[0] == min(one.batch_tokens for one in rounds) + 5
    old = [replace(one, num_tokens_run=None) for one in grid_rounds()]
    assert fit_additive(old) == fit_additive(grid_rounds())


def test_the_1d_fit_takes_the_median_and_never_speeds_up():
    times = {4: [0.010, 0.011, 0.5], 8: [0.020, 0.020, 0.021], 12: [0.019, 0.019, 0.019], 16: [0.03] * 3}
    rounds = [
        measured(rows // 4, rows, seconds, None, i) for rows in times for i, seconds in enumerate(times[rows])
    ]
    table = fit_table(rounds)
    assert isinstance(table, SpsCostTable)
    assert table.sample_batch_tokens == (4, 8, 12, 16)
    expected = [0.011, 0.0195, 0.0195, 0.03]
    assert [1 / rate for rate in table.sample_steps_per_sec] == pytest.approx(expected)
    assert fit_table(rounds, max_batch_tokens=99).max_batch_tokens == 99
    assert [error.relative for error in fit_errors(table, rounds)] == pytest.approx(
        [0, -0.025, 0.0263, 0], abs=1e-3
    )


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([measured(1, 4, 0.1, None), measured(1, 4, 0.2, None)], "two or more --batch-size"),
        ([measured(1, 4, 0.1, None), measured(2, 8, 0.2, 0.5)], "mixed"),
        ([measured(1, 2, 0.1), measured(1, 3, 0.1), measured(2, 4, 0.1)], "4 are needed"),
        ([measured(n, 4 * n, 0.1 * n) for n in (1, 2, 3, 4)], "cap-accept"),
    ],
)
def test_cells_that_determine_no_table(rounds, message):
    with pytest.raises(ProfileError, match=message):
        fit_table(rounds)


# What is measured.


def facts(**more) -> ServerFacts:
    server = FakeProfiledServer()
    return replace(ServerFacts.check(server.server_info(), two_dimensional=False), **more)


def test_the_default_sweep():
    assert default_batch_sizes(3) == [1, 2, 3]
    assert default_batch_sizes(48) == [1, 2, 4, 8, 16, 24, 32, 40, 48]
    sizes = default_batch_sizes(384)
    assert sizes[9:] == [56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384][: len(sizes) - 9]


def test_requests_outlast_a_round():
    assert SweepSettings().max_new_tokens == 572  # as SGLang's
    assert SweepSettings(min_steady_seconds=0).max_new_tokens == 8 + 32 + 64


def test_cells_are_planned_within_the_server():
    settings = SweepSettings(min_steady_seconds=0)
    cells, skipped = plan_cells(facts(running_cap=4), settings, [1, 4, 8], [0.25, 0.5, 1.0], 2)
    assert [(c.repeat, c.batch_size, c.frac) for c in cells[:5]] == [
        *[(0, 1, 0.25), (0, 1, 0.5), (0, 1, 1.0)],
        *[(0, 4, 0.25), (0, 4, 0.5)],
    ]
    assert len(cells) == 12
    assert skipped == ["batch 8 skipped: the server runs 4 requests at once"]
    cells, skipped = plan_cells(facts(token_capacity=300), settings, [1, 2, 4], None, 1)
    assert [c.batch_size for c in cells] == [1, 2]
    assert "the pool has 300" in skipped[0]
    assert "up to 8 requests, the sweep ends at 2" in skipped[1]
    assert len(plan_cells(facts(), settings, [1], [0.1, 0.2, 1.0], 1)[0]) == 2  # both give a budget of 0


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({}, [16], "--max-running-requests"),
        ({"context_length": 50}, [1], "context length"),
        ({"token_capacity": 50}, [1], "no batch size fits"),
    ],
)
def test_sweeps_that_cannot_be(change, sizes, message):
    with pytest.raises(ProfileError, match=message):
        plan_cells(facts(**change), SweepSettings(min_steady_seconds=0), sizes, None, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"info": {"speculative_algorithm": None}}, "--speculative-algorithm"),
        ({"info": {"disable_cuda_graph": True}}, "--disable-cuda-graph"),
        ({"info": {"vocab_size": None}}, "--local-tokenizer-path"),
        ({"feed": {"components": ["core"]}}, "step_cpu_time.*SGLANG_DSPARK_ENABLE_SPS_RECORD=1"),
        ({"feed": {"simulate_acc_len": None}}, "SGLANG_SIMULATE_ACC_LEN=1.0"),
        ({"feed": {"verify_num_draft_tokens": 1}}, "--speculative-num-draft-tokens"),
        ({"feed": {"mode": "compact"}}, "--fracs"),
        ({"state": {"cuda_graph_config": {}}}, "fixed step shapes"),
    ],
)
def test_servers_that_cannot_be_profiled(change, message):
    server = FakeProfiledServer()
    for name, values in change.items():
        getattr(server, name).update(values)
    with pytest.raises(ProfileError, match=message):
        ServerFacts.check(server.server_info(), two_dimensional=False)


def test_fractions_want_a_ragged_mode_and_records_are_wanted():
    with pytest.raises(ProfileError, match="--ragged-verify-mode compact"):
        ServerFacts.check(FakeProfiledServer().server_info(), two_dimensional=True)
    info = FakeProfiledServer().server_info()
    del info["internal_states"][0]["dspark_info_record"]
    with pytest.raises(ProfileError, match="keeps no records"):
        ServerFacts.check(info, two_dimensional=False)


# Whole runs against a server that claims known times.


def run(server: FakeProfiledServer, out: Path, *flags: str, command: str = "run") -> int:
    return main([command, "--base-url", server.url, "--out", str(out), *QUICK, *flags])


def test_run_and_fit_1d(tmp_path, capsys):
    out = tmp_path / "deep" / "table.json"
    with FakeProfiledServer() as server:
        assert run(server, out, "--batch-size", "1", "2", "4", "--repeats", "2") == 0
        assert not [
            values for path, values in server.log if path == "/set_internal_state" and PIN in str(values)
        ]
    assert main(["fit", "--out", str(out), "--no-plot"]) == 0
    table = load_cost_table(out)
    assert isinstance(table, SpsCostTable)
    assert table.sample_batch_tokens == (4, 8, 16)
    expected = [0.005 + 0.001 * n + 0.0002 * 4 * n for n in (1, 2, 4)]
    assert [1 / rate for rate in table.sample_steps_per_sec] == pytest.approx(expected)
    files = ProfileFiles(out)
    assert len(files.load_rounds()) == 6
    assert set(json.loads(files.rounds.read_text().splitlines()[0])) >= {
        *("repeat", "batch_size", "batch_size_per_rank", "frac", "batch_tokens", "steps_per_sec"),
        *("num_steady_steps", "match_fraction", "per_rank_median_step_time", "load_info"),
    }
    assert len(files.records.read_text().splitlines()) >= 60
    manifest = json.loads(files.manifest.read_text())
    assert (manifest["kind"], manifest["batch_size_per_rank"], manifest["num_rounds"]) == (
        "1-D",
        [1, 2, 4],
        6,
    )
    assert "0.0% off on average" in capsys.readouterr().out


def test_all_2d_and_the_order_of_calls(tmp_path):
    out = tmp_path / "table.json"
    with FakeProfiledServer("compact") as server:
        assert run(server, out, "--batch-size", "2", "4", "--fracs", "0.5", "1", command="all") == 0
        assert server.pin is None
        assert server.log[-1] == ("/set_internal_state", {"server_args": {PIN: None}})
    calls = [path for path, _ in server.log[:-1]]
    cell = ["/set_internal_state", "/flush_cache", "/set_internal_state", "/generate", "/abort_request"]
    assert calls == cell * 5  # a warm-up and four cells
    table = load_cost_table(out)
    assert isinstance(table, SpsAdditiveCostTable)
    for requests, rows in ((2, 5), (2, 8), (4, 10), (4, 16)):
        assert table.step_seconds(requests, np.array([rows]))[0] == pytest.approx(
            server.seconds(requests, rows), rel=1e-3
        )
    assert ProfileFiles(out).plot.exists() == can_plot()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda server: setattr(server, "generate_status", 503), "no room"),
        (lambda server: setattr(server, "refuses_pins", True), "refuses to pin"),
    ],
)
def test_a_failure_clears_the_pin(tmp_path, capsys, prepare, message):
    with FakeProfiledServer("compact") as server:
        prepare(server)
        server.pin = 0.25
        assert run(server, tmp_path / "t.json", "--batch-size", "2", "--fracs", "0.5") == 1
        assert server.pin is None
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_clears_the_pin_and_takes_the_load_away(tmp_path, number):
    out = tmp_path / "t.json"
    with FakeProfiledServer("compact") as server:
        command = [sys.executable, "-m", "flashspark.benchmark.dspark_sps_profiler", "run", "--base-url"]
        command += [server.url, "--out", str(out), "--batch-size", "2", "4", "--fracs", "0.5", "1"]
        command += ["--min-steady-seconds", "30", "--poll-seconds", "0.1"]
        path = os.pathsep.join([str(Path(__file__).parents[2] / "python"), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})
        try:
            deadline = time.monotonic() + 30
            while len(server.records) < 5:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert server.pin in {0.5, 1.0}
            process.send_signal(number)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
        assert process.returncode == 130, errors
        assert server.pin is None
        assert server.num_aborts == 1
        assert b"interrupted" in errors
        assert out.with_name("t.rounds.jsonl").exists()


def test_nobody_there(tmp_path, capsys):
    assert main(["run", "--base-url", "http://127.0.0.1:9", "--out", str(tmp_path / "t.json")]) == 1
    assert "is the server up" in capsys.readouterr().err
    with pytest.raises(ProfileError):
        LiveServer("no url").info()


@pytest.mark.parametrize("command", ["fit", "plot"])
def test_nothing_to_fit_or_draw(tmp_path, capsys, command):
    assert main([command, "--out", str(tmp_path / "t.json")]) == 1
    assert "`run`" in (errors := capsys.readouterr().err) or "`fit`" in errors


def test_rounds_that_cannot_be_read(tmp_path, capsys):
    files = ProfileFiles(tmp_path / "t.json")
    files.rounds.write_text('{"repeat": 0}\n')
    assert main(["fit", "--out", str(files.table)]) == 1
    assert "line 1" in capsys.readouterr().err
    files.rounds.write_text("")
    assert main(["fit", "--out", str(files.table)]) == 1
    assert "no cell" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--fracs", "0"], ["--fracs", "1.5"], ["--batch-size", "0"]])
def test_flags_out_of_range(tmp_path, flags, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--out", str(tmp_path / "t.json"), *flags])
    assert flags[0] in capsys.readouterr().err
