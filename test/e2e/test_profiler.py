"""The profiler against a real server: every control call, every field it reads."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.server import Server, poll, running_server, speculative
from flashspark.benchmark.sps_fit import fit_errors, fit_table
from flashspark.benchmark.sps_rounds import ProfileFiles
from flashspark.speculative.cost_table import SpsCostTable, load_cost_table
from tiny_models import write_dspark

PROFILER = [sys.executable, "-m", "flashspark.benchmark.dspark_sps_profiler"]


@pytest.fixture(scope="module", params=["DFLASH", "DSPARK"])
def profiled(
    request: pytest.FixtureRequest, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A tiny pair of either kind, started for profiling."""
    folder = tmp_path_factory.mktemp("profiled")
    log, (target, draft) = folder / "log", tiny_pair
    if request.param == "DSPARK":
        draft = write_dspark(folder / "draft", target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DSPARK_ENABLE_SPS_RECORD", "1")
        patch.setenv("SGLANG_SIMULATE_ACC_LEN", "1.0")
        flags = [*speculative(target, draft), "--speculative-algorithm", request.param]
        with running_server(*flags, "--max-running-requests", "4", log=log) as running:
            yield running


def profile(*flags: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROFILER, *flags], capture_output=True, text=True, timeout=timeout_s, check=False)


def test_what_a_profiler_reads(profiled: Server) -> None:
    info = profiled.http.get("/server_info").json()
    assert info["disable_cuda_graph"] is False
    state = info["internal_states"][0]
    assert state["cuda_graph_config"]["decode"]["bs"] == [1, 2, 3, 4]
    assert state["cuda_graph_config"]["decode"]["max_bs"] == 4
    assert state["effective_max_running_requests_per_dp"] == 4
    assert state["memory_usage"]["token_capacity"] == info["max_total_num_tokens"]
    feed = state["dspark_info_record"]
    assert (feed["mode"], feed["simulate_acc_len"]) == ("static", 1.0)
    assert feed["verify_num_draft_tokens"] == feed["gamma"] + 1 == info["speculative_num_draft_tokens"]
    assert feed["components"] == ["core", "step_cpu_time"]
    assert "whatever the target says" in profiled.log


def test_a_table_of_a_live_server(profiled: Server, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    short = ["--min-steady-steps", "8", "--min-steady-seconds", "0", "--poll-seconds", "0.1"]
    done = profile("all", "--base-url", profiled.url, "--out", str(out), "--batch-size", "1", "4", *short)
    assert done.returncode == 0, done.stderr + profiled.log
    table = load_cost_table(out)
    assert isinstance(table, SpsCostTable)
    width = profiled.state()["dspark_info_record"]["verify_num_draft_tokens"]
    assert table.sample_batch_tokens == (width, 4 * width)
    assert not table.is_uninitialized
    profiled.wait_idle()


def test_pins_are_refused_where_nothing_is_planned(profiled: Server, tmp_path: Path) -> None:
    def change(values: dict) -> httpx.Response:
        return profiled.http.post("/set_internal_state", json={"server_args": values})

    assert change({"dspark_force_budget_frac": 0.5}).json() == [False]
    assert "dspark_force_budget_frac: verification is static" in profiled.log
    assert change({"dspark_clear_info_records": 1}).json() == [True]
    assert profiled.state()["dspark_info_record"]["records"] == []
    done = profile("run", "--base-url", profiled.url, "--out", str(tmp_path / "t.json"), "--fracs", "0.5")
    assert done.returncode == 1
    assert "--ragged-verify-mode compact" in done.stderr


def test_other_simulations_do_not_start(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_SIMULATE_ACC_LEN", "0.5")
        server = Server(*speculative(*tiny_pair), log=tmp_path / "log")
    assert server.wait_exit(60) == 2
    assert "SGLANG_SIMULATE_ACC_LEN=0.5: a step commits at least 1 token" in server.log


# Two dimensions, in mode compact, without a table: the pair that is shipped, so that steps take a real time.


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped pair, started for profiling from scratch."""
    log = tmp_path_factory.mktemp("compact") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DSPARK_ENABLE_SPS_RECORD", "1")
        patch.setenv("SGLANG_SIMULATE_ACC_LEN", "1.0")
        flags = ["--ragged-verify-mode", "compact", "--speculative-cost-table", "none"]
        flags += ["--max-running-requests", "16"]
        with running_server(*speculative("demo", "demo-dflash2"), *flags, log=log) as running:
            yield running


def pinned(server: Server) -> float | None:
    return server.state()["pinned_budget_fraction"]


@pytest.mark.full
def test_a_2d_table_from_scratch_predicts_cells_it_has_not_seen(compact: Server, tmp_path: Path) -> None:
    files = ProfileFiles(tmp_path / "table.json")
    sweep = ["--batch-size", "1", "2", "3", "4", "6", "8", "12", "16", "--fracs", "0.25", "0.5", "0.75", "1"]
    short = [
        "--min-steady-steps",
        "12",
        "--min-steady-seconds",
        "0",
        "--poll-seconds",
        "0.1",
        "--repeats",
        "3",
    ]
    done = profile("run", "--base-url", compact.url, "--out", str(files.table), *sweep, *short, timeout_s=280)
    assert done.returncode == 0, done.stderr + compact.log
    assert pinned(compact) is None
    rounds = (
        files.load_rounds()
    )  # seen and unseen cells were measured in turn, so the machine's mood is shared
    table = fit_table([one for one in rounds if one.batch_size in {1, 2, 4, 8, 16}])
    errors = [
        abs(error.relative)
        for error in fit_errors(table, [one for one in rounds if one.batch_size in {3, 6, 12}])
    ]
    print("held-out cells, relative errors:", sorted(errors))
    assert len(errors) == 11  # 12 cells, but 3 requests run as many rows at 3/4 of their drafts as in full
    assert statistics.median(errors) < 0.15, errors
    compact.wait_idle()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_server_unpinned(compact: Server, tmp_path: Path, number: int) -> None:
    command = [*PROFILER, "run", "--base-url", compact.url, "--out", str(tmp_path / "t.json")]
    process = subprocess.Popen([*command, "--batch-size", "4", "--fracs", "0.5"], stderr=subprocess.PIPE)
    try:
        poll("a cell under way", lambda: compact.state()["num_running_reqs"] == 4)
        assert pinned(compact) in {0.5, 1.0}  # the warm-up's, or already the cell's
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert pinned(compact) is None
    compact.wait_idle()
