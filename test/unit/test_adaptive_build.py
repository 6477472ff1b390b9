"""Adaptive verification from flags: what is refused and how, where the table comes from, what the server says of it."""

from __future__ import annotations

import json
import logging

import pytest

from flashspark.attention.torch_native import TorchNativeBackend
from flashspark.demo import DEMO_MODELS
from flashspark.scheduler import adaptive_build
from flashspark.speculative import startup_table
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.confidence import HeadConfidence
from flashspark.speculative.cost_table import SpsAdditiveCostTable, SpsCostTable
from harness import Harness, Job
from tiny_models import write_dflash, write_dflash2, write_dspark, write_target

MODES = ["cap-accept", "compact"]
TABLE = SpsCostTable((1, 8, 24), (100.0, 90.0, 50.0), 24)
TWO_D = SpsAdditiveCostTable(5e-3, (1, 4), (0.0, 1e-3), (1, 24), (0.0, 4e-3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = write_target(root / "target", eos_token_id=None)
    block = {"dflash_config": {"block_size": 6}}
    return {
        "target": target,
        "dflash": write_dflash(root / "dflash", target, **block),
        "dflash2": write_dflash2(root / "dflash2", target, **block),
        "dspark": write_dspark(root / "dspark", target),
        "headless": write_dspark(root / "headless", target, confidence=False),
    }


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch, caplog):
    """A cache of its own, and a measurement that takes no time to speak of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measure = adaptive_build.measure_tables
    monkeypatch.setattr(adaptive_build, "measure_tables", lambda *args: measure(*args, 0.3))
    monkeypatch.setattr(adaptive_build, "WORST_ERROR_TO_KEEP", 10.0)
    caplog.set_level(logging.INFO)


def build(folders, draft, mode="compact", **args) -> Harness:
    args = {"max_running_requests": 4, "speculative_cost_table": "none"} | args
    return Harness(folders["target"], draft and folders[draft], ragged_verify_mode=mode, **args)


def write(path, text) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("mode", MODES)
def test_no_confidence_no_mode(folders, mode):
    with pytest.raises(ValueError, match=f"{mode}.*there is no draft; add --speculative-algorithm"):
        build(folders, None, mode)
    with pytest.raises(
        ValueError, match=f"{mode}.*without confidence; use a DFlash2 or DSpark draft, or static"
    ):
        build(folders, "dflash", mode)
    assert build(folders, "dflash", "static")._worker.adaptive is None


@pytest.mark.parametrize("mode", MODES)
def test_a_backend_must_declare_that_it_can(folders, mode, monkeypatch):
    unable = TorchNativeBackend.capabilities.__class__(False, False, True)
    monkeypatch.setattr(TorchNativeBackend, "capabilities", unable)
    with pytest.raises(ValueError, match=f"{mode}.*backend torch_native cannot verify.*--attention-backend"):
        build(folders, "dflash2", mode)
    build(folders, "dflash2", "static")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "truncated"),
        (json.dumps({"sample_batch_tokens": [1, 2]}), "sample_steps_per_sec"),
        (TWO_D.to_json().replace("0.005", "-0.005", 1), "bias_seconds must be > 0"),
    ],
)
def test_wrong_tables_are_refused_before_a_model_is_loaded(tmp_path, text, words):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"--speculative-dspark-sps-table-path: .*table.json.*{words}"):
        Harness(tmp_path / "no model", "no draft", ragged_verify_mode="compact",
                speculative_dspark_sps_table_path=str(path))  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "calibration file"),
        ('{"dataset": "x"}', "temperatures"),
        ('{"temperatures": []}', "temperatures is empty"),
        ('{"temperatures": [1, 1, 0, 1, 1]}', "must be > 0 and finite"),
        (
            '{"temperatures": [1, 1, 1, 1]}',
            "4 temperatures, a block has 5 drafts.*--speculative-dspark-block-size",
        ),
    ],
)
def test_wrong_calibrations_are_refused(folders, tmp_path, text, words):
    path = write(tmp_path / "sts.json", text)
    with pytest.raises(ValueError, match=f"--speculative-dspark-confidence-sts-path: .*{words}"):
        build(folders, "dspark", speculative_dspark_confidence_sts_path=path)


def test_a_calibration_reaches_the_head(folders, tmp_path, caplog):
    path = write(
        tmp_path / "sts.json", '{"temperatures": [1, 2, 1, 1, 0.5], "ece_before": [0.1], "other": 1}'
    )
    harness = build(folders, "dspark", speculative_dspark_confidence_sts_path=path)
    source = harness._worker.adaptive.source
    assert isinstance(source, HeadConfidence)
    assert source.summary()["temperatures"] == [1, 2, 1, 1, 0.5]
    assert harness.ready.info["speculative_confidence_source"] == "head"
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("draft", ["dflash2", "headless"])
def test_a_calibration_without_a_head_warns(folders, tmp_path, caplog, draft):
    path = write(tmp_path / "sts.json", '{"temperatures": [1]}')
    harness = build(folders, draft, speculative_dspark_confidence_sts_path=path)
    assert (
        "--speculative-dspark-confidence-sts-path has no effect: the draft has no confidence head"
        in caplog.text
    )
    assert harness.ready.info["speculative_confidence_source"] == "online estimator"


def test_static_ignores_the_rest_with_warnings(folders, caplog):
    harness = build(
        folders,
        "dflash2",
        "static",
        speculative_dspark_sps_table_path="absent.json",
        speculative_dspark_confidence_sts_path="absent.json",
        speculative_min_drafts_every=3,
    )
    for flag in ("dspark-sps-table-path", "dspark-confidence-sts-path", "min-drafts-every"):
        assert f"--speculative-{flag} has no effect in static verification" in caplog.text
    assert harness._worker.adaptive is None
    assert harness.ready.info["speculative_cost_table_source"] is None
    assert harness.scheduler.verification_state() == {
        "ragged_verify_mode": "static",
        "speculation": True,
        "speculative_num_draft_tokens": 6,
        "speculative_max_verify_len": None,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", [TABLE, TWO_D], ids=["1-D", "2-D"])
def test_a_file_wins(folders, tmp_path, mode, table, caplog):
    path = write(tmp_path / "table.json", table.to_json())
    harness = build(folders, "dflash2", mode, speculative_cost_table="measured",
                    speculative_dspark_sps_table_path=path, speculative_min_drafts_every=7,
                    speculative_verify_tier_tokens=4)  # fmt: skip
    adaptive, info = harness._worker.adaptive, harness.ready.info
    assert adaptive.mode is VerifyMode(mode)
    assert adaptive.planner.table == table
    assert adaptive.planner.settings.min_drafts_every == 7
    assert list(adaptive.planner.grid.tiers(4).num_tokens) == [4, 8, 12, 16, 20, 24]
    assert info["speculative_cost_table_source"] == f"file {path}"
    assert info["speculative_cost_table_json"] == table.to_json()
    assert info["speculative_num_draft_tokens"] == 6
    assert info["verify_request_buckets"] == [1, 2, 3, 4]
    assert "measuring steps without a draft, which the file does not price" in caplog.text
    assert "(4, no draft)" in caplog.text
    assert adaptive.planner.plain_costs.num_reqs_probes[-1] == 4
    assert "cost table: file" in caplog.text
    expected = {"1-D": "(4, 24) 20.00", "2-D": "(4, 24) 10.00"}["2-D" if table is TWO_D else "1-D"]
    assert expected in caplog.text


def test_beside_a_file_nothing_is_measured_where_nothing_may_be(folders, tmp_path, caplog):
    path = write(tmp_path / "table.json", TABLE.to_json())
    harness = build(folders, "dflash2", speculative_dspark_sps_table_path=path)  # the tests' default: none
    assert harness._worker.adaptive.planner.plain_costs is None
    assert "step costs" not in caplog.text


def test_a_short_table_warns(folders, tmp_path, caplog):
    path = write(tmp_path / "table.json", TABLE.to_json())
    build(folders, "dflash2", max_running_requests=5, speculative_dspark_sps_table_path=path)
    assert "ends at 24 rows, a full batch has 30" in caplog.text


def test_without_costs_compact_verifies_everything_and_says_so(folders, caplog):
    harness = build(folders, "dflash2")
    assert "cost table: none; without step costs every draft is verified" in caplog.text
    assert harness.ready.info["speculative_cost_table_source"] == "none"
    assert harness.ready.info["speculative_cost_table_json"] is None
    harness._worker.adaptive.source.num_refits = 100
    harness.run([Job([5] * 9, 20), Job([6] * 9, 20)])
    records = [record for record in harness.scheduler.records if record.plan is not None]
    assert all(record.plan.verify.full for record in records)
    assert any("no cost table" in {stage.reason for stage in r.plan.record.stages} for r in records)


def test_cap_accept_without_costs_cuts_hopeless_drafts(folders, caplog):
    build(folders, "dflash2", "cap-accept")
    assert "without step costs a cap is set wherever a draft is hopeless" in caplog.text


def test_measured_once_and_then_read(folders, tmp_path, caplog, monkeypatch):
    # However busy the machine is.
    monkeypatch.setattr(adaptive_build, "WORST_ERROR_TO_KEEP", float("inf"))
    monkeypatch.setattr(
        adaptive_build, "measure_tables", lambda *args: startup_table.measure_tables(*args, 600.0)
    )
    first = build(folders, "dflash2", speculative_cost_table="measured")
    assert first.ready.info["speculative_cost_table_source"] == "measured at start-up"
    assert "step costs: measured in" in caplog.text
    assert "(1, no draft)" in caplog.text
    first.assert_everything_is_free()
    (file,) = (tmp_path / "cache" / "flashspark" / "cost-tables").iterdir()
    caplog.clear()
    second = build(folders, "dflash2", "cap-accept", speculative_cost_table="measured")
    assert second.ready.info["speculative_cost_table_source"] == f"cache {file}"
    assert "step costs: measured at an earlier start" in caplog.text
    planners = [harness._worker.adaptive.planner for harness in (first, second)]
    assert planners[0].table == planners[1].table
    assert planners[0].plain_costs == planners[1].plain_costs
    assert planners[0].plain_costs is not None
    caplog.clear()
    third = build(folders, "dflash2", speculative_cost_table="measured", max_running_requests=3)
    assert "tiers 4 requests" in caplog.text and "now 3 requests" in caplog.text
    assert third.ready.info["speculative_cost_table_source"] == "measured at start-up"
    file.write_text("{")
    caplog.clear()
    fourth = build(folders, "dflash2", speculative_cost_table="measured")
    assert "cannot be read" in caplog.text
    assert fourth.ready.info["speculative_cost_table_source"] == "measured at start-up"
    fingerprint = json.loads(file.read_text())["fingerprint"]
    assert fingerprint["width"] == 6
    assert fingerprint["attention"] == "torch_native, torch_native"  # of verify, and of the draft


def test_a_rough_table_is_not_kept(folders, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(adaptive_build, "WORST_ERROR_TO_KEEP", -1.0)
    harness = build(folders, "dflash2", speculative_cost_table="measured")
    assert "too rough to keep" in caplog.text
    assert harness._worker.adaptive.planner.table is not None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("args", "corrects"),
    [
        ({}, True),
        ({"disable_cost_table_correction": True}, False),
        ({"enable_deterministic_inference": True}, False),
        ({"mode": "cap-accept"}, False),
    ],
)
def test_correction_by_step_times(folders, tmp_path, args, corrects):
    path = write(tmp_path / "table.json", TABLE.to_json())
    harness = build(folders, "dflash2", speculative_dspark_sps_table_path=path, **args)
    planner = harness._worker.adaptive.planner
    assert harness.ready.info["cost_table_correction"] is corrects
    switched_on = not args or "mode" in args  # in cap-accept they wait for a switch to compact
    has_corrections = (planner.correction is not None, planner.plain_correction is not None)
    assert has_corrections == (switched_on, switched_on)
    harness._worker.adaptive.source.num_refits = 100
    harness.run([Job([5] * 9, 30), Job([6] * 9, 30)])
    state = harness.scheduler.verification_state()
    assert (state["cost_table_corrections"] > 0) is corrects
    assert state["ragged_verify_mode"] == args.get("mode", "compact")
    assert 1 <= state["avg_spec_cap_length"] <= 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft", ["dflash2", "dspark", "headless"])
def test_trimmed_from_flags_the_greedy_text_is_the_static_one(folders, tmp_path, draft, mode):
    steep = SpsCostTable(tuple(range(1, 25)), tuple(1000.0 / (2 + n) for n in range(1, 25)), 24)
    path = write(tmp_path / "table.json", steep.to_json())
    jobs = [Job([5 + 3 * i, 9 + i] * (1 + 4 * i), 30, arrive=2 * i) for i in range(6)]
    expected = [result.tokens for result in build(folders, draft, "static").run(jobs)]
    harness = build(
        folders,
        draft,
        mode,
        speculative_dspark_sps_table_path=path,
        speculative_min_drafts_every=3,
        disable_cost_table_correction=True,
    )
    if draft != "dspark":
        harness._worker.adaptive.source.num_refits = 100  # the head needs no warm-up
    results = harness.run(jobs)
    assert [result.tokens for result in results] == expected
    assert harness.scheduler.totals["trimmed_steps"] > 0
    assert all(sum(result.stats.verify_histogram) == result.stats.num_verify_steps for result in results)


def test_the_shipped_calibration_fits_the_shipped_head():
    """From the first step on confident enough to trim: a trained head needs no warm-up."""
    path = DEMO_MODELS["demo-dspark"] / "sts.json"
    harness = Harness(
        "demo",
        "demo-dspark",
        ragged_verify_mode="compact",
        speculative_cost_table="none",
        max_running_requests=4,
        speculative_dspark_confidence_sts_path=str(path),
    )
    temperatures = json.loads(path.read_text())["temperatures"]
    assert harness._worker.adaptive.source.summary()["temperatures"] == pytest.approx(temperatures)
    assert harness.scheduler.verification_state()["confidence_is_ready"]


@pytest.mark.parametrize(
    ("draft", "mode", "args", "environ", "words"),
    [
        ("dspark", "static", {}, {}, "in mode cap-accept alone: add --ragged-verify-mode cap-accept"),
        ("dspark", "compact", {}, {}, "in mode cap-accept alone"),
        ("headless", "cap-accept", {}, {}, "the draft has no confidence head"),
        ("dflash2", "cap-accept", {}, {}, "the draft has no confidence head"),
        (
            "dspark",
            "cap-accept",
            {"speculative_dspark_confidence_sts_path": "sts.json"},
            {},
            "leave --speculative-dspark-confidence-sts-path out",
        ),
        ("dspark", "cap-accept", {}, {"SGLANG_SIMULATE_ACC_LEN": "1"}, "no draft is accepted, whatever"),
        ("dspark", "cap-accept", {}, {"SGLANG_DSPARK_STS_COLLECT_PATH": "no/r"}, "there is no folder no"),
    ],
)
def test_records_are_collected_where_they_mean_something(
    folders, tmp_path, monkeypatch, draft, mode, args, environ, words
):
    for name, value in {"SGLANG_DSPARK_STS_COLLECT_PATH": str(tmp_path / "r"), **environ}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"SGLANG_DSPARK_STS_COLLECT_PATH: .*{words}"):
        build(folders, draft, mode, **args)


def test_records_of_two_runs_do_not_mix(folders, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_DSPARK_STS_COLLECT_PATH", str(tmp_path / "r"))
    harness = build(folders, "dspark", "cap-accept", speculative_cost_table="measured")
    assert harness._worker.adaptive.planner.table is None  # everything is verified, nothing was measured
    assert f"collected into {tmp_path / 'r'}.<number>.pt" in caplog.text
    (tmp_path / "r.3.pt").touch()
    with pytest.raises(ValueError, match=r"r\.3\.pt exists, and records of two runs must not mix"):
        build(folders, "dspark", "cap-accept")
