"""The feed of decode steps, the live settings, and steps that accept no draft."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from flashspark.ipc import SchedulerReady
from flashspark.scheduler.process import prepare_profiling
from flashspark.scheduler.record_feed import FeedHeader, RecordFeed
from flashspark.scheduler.step_record import StepRecord
from flashspark.speculative.accept import AcceptRule
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.tiers import TierGrid, TierRule
from harness import Harness, Job, Result, to_message
from tiny_models import write_dflash2, write_target

BOTH = ("core", "step_cpu_time")
HEADER = FeedHeader("static", 3, 4, BOTH, 1.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    return target, write_dflash2(folder / "draft", target)


def harness(pair) -> Harness:
    return Harness(*pair, max_running_requests=4, max_total_tokens=1024)


def jobs(num: int = 3, max_new_tokens: int = 12, **more) -> list[Job]:
    return [Job([5 + i, 6, 7, 8 + i], max_new_tokens, **more) for i in range(num)]


def records_of(engine: Harness) -> list[dict]:
    return json.loads(engine.scheduler.info_record())["records"]


def step(
    forward_ct: int, num_reqs: int = 2, num_prefill_tokens: int = 0, num_full_tokens: int = 8
) -> StepRecord:
    return StepRecord(
        forward_ct=forward_ct,
        num_reqs=num_reqs,
        num_prefill_tokens=num_prefill_tokens,
        num_verify_tokens=7,
        num_rows_run=8,
        num_full_tokens=num_full_tokens,
    )


def test_shape():
    feed = RecordFeed(HEADER)
    feed.add(step(1), 10.0, goes_on=True)
    feed.add(step(2), 10.5, goes_on=True)
    first = {"forward_ct": 1, "bs": 2, "mode": "static", "num_running_reqs": 2, "num_verify_tokens": 8}
    first["verify_tokens_local"] = 7
    assert json.loads(feed.dump()) == {
        "mode": "static",
        "gamma": 3,
        "verify_num_draft_tokens": 4,
        "components": ["core", "step_cpu_time"],
        "simulate_acc_len": 1.0,
        "records": [first, first | {"forward_ct": 2, "step_cpu_ms": 500.0}],
    }
    feed.clear()
    assert json.loads(feed.dump())["records"] == []


def test_intervals_hold_one_step_and_nothing_else():
    feed = RecordFeed(HEADER)
    feed.add(step(1), 1.0, goes_on=True)  # nothing before it
    feed.add(step(2), 1.1, goes_on=True)
    feed.add(step(3, num_prefill_tokens=5), 1.3, goes_on=True)  # prefilled too
    feed.add(step(4), 1.4, goes_on=True)
    feed.add(step(5, num_reqs=0, num_prefill_tokens=5), 1.5, goes_on=True)  # is no decode step
    feed.add(step(6), 1.6, goes_on=True)  # follows one that was none
    feed.add(step(7), 1.7, goes_on=False)
    feed.add(step(8), 1.8, goes_on=True)  # the loop was idle before it
    feed.add(step(9), 2.9, goes_on=True)  # above a second
    feed.add(step(10), 3.0, goes_on=True)
    records = json.loads(feed.dump())["records"]
    assert [r["forward_ct"] for r in records] == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    timed = {r["forward_ct"]: round(r["step_cpu_ms"]) for r in records if "step_cpu_ms" in r}
    assert timed == {2: 100, 4: 100, 7: 100, 10: 100}


@pytest.mark.parametrize(("simulate_acc_len", "timed"), [(1.0, [2, 4]), (None, [2, 3, 4])])
def test_simulated_steps_are_timed_while_all_blocks_are_full(simulate_acc_len, timed):
    feed = RecordFeed(FeedHeader("static", 3, 4, BOTH, simulate_acc_len))
    for forward_ct, num_full_tokens in enumerate((8, 8, 7, 8), start=1):
        feed.add(step(forward_ct, num_full_tokens=num_full_tokens), forward_ct / 10, goes_on=True)
    records = json.loads(feed.dump())["records"]
    assert [r["forward_ct"] for r in records if "step_cpu_ms" in r] == timed


def test_without_its_component_no_time_is_taken():
    feed = RecordFeed(FeedHeader("static", 3, 4, ("core",), None))
    for i in range(3):
        feed.add(step(i), float(i) / 10, goes_on=True)
    assert not [r for r in json.loads(feed.dump())["records"] if "step_cpu_ms" in r]


def test_the_ring_forgets_the_oldest():
    feed = RecordFeed(HEADER, capacity=10)
    for i in range(25):
        feed.add(step(i), float(i), goes_on=True)
    assert [r["forward_ct"] for r in json.loads(feed.dump())["records"]] == list(range(15, 25))


def test_a_poll_of_thousands_is_cheap():
    feed = RecordFeed(HEADER)
    for i in range(5000):
        feed.add(step(i), i / 100, goes_on=True)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        feed.dump()
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05


def test_static_steps_of_a_scheduler(pair):
    engine = harness(pair)
    assert engine.scheduler.info_record() is None
    engine.scheduler.keep_records(BOTH)
    engine._worker.rule = AcceptRule(0.0)
    engine.run(jobs())
    width = engine._worker.width
    records = records_of(engine)
    assert len(records) == 12
    assert all(r["num_running_reqs"] == r["bs"] == 3 and "budget" not in r for r in records)
    rows = [r["num_verify_tokens"] for r in records]
    assert rows == [3 * min(width, 12 - i) for i in range(12)]  # no step passes a request's last token
    counts = [r["forward_ct"] for r in records]
    assert counts == sorted(set(counts))
    assert "step_cpu_ms" in records[-1]
    assert "step_cpu_ms" not in records[0]


def test_pinned_steps_run_the_pinned_rows(pair):
    engine = harness(pair)
    width = engine._worker.width
    engine.make_adaptive(VerifyMode.COMPACT, grid=TierGrid(TierRule(width, 4)))
    engine.scheduler.keep_records(BOTH, 1.0)
    engine._worker.rule = AcceptRule(0.0)
    assert engine.scheduler.set_internal_state({"dspark_force_budget_frac": 0.5}) is None
    results = engine.run(jobs())
    assert [result.steps for result in results] == [[1] * 12] * 3
    (mode,) = {r["mode"] for r in records_of(engine)}
    assert mode == "compact"
    full = [r for r in records_of(engine) if r["num_running_reqs"] == 3 and r["num_verify_tokens"] > 3]
    budget = int(0.5 * 3 * (width - 1))
    steps = full[: 12 - width]  # later ones are capped by what may still be emitted
    assert {(r["num_verify_tokens"], r["budget"], r["lag_steps"]) for r in steps} == {(3 + budget, budget, 2)}
    assert engine.scheduler.set_internal_state({"dspark_force_budget_frac": None}) is None
    assert engine._worker.adaptive.planner.pinned_fraction is None
    engine._worker.adaptive.source.settle()
    observations = engine._worker.adaptive.source.summary()["observations"]
    assert not np.any(observations)  # nothing is learnt from drafts that nobody judged


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_is_accepted_and_the_target_still_decides(pair, temperature):
    sampling = {"temperature": temperature, "seed": 3}
    plain = Harness(pair[0], max_running_requests=4, max_total_tokens=1024).run(jobs(sampling=sampling))
    engine = harness(pair)
    engine._worker.rule = AcceptRule(0.0)
    results = engine.run(jobs(sampling=sampling))
    assert [result.steps for result in results] == [[1] * 12] * 3
    assert all(result.stats.num_accepted == 0 < result.stats.num_drafted for result in results)
    if temperature == 0.0:
        assert [result.tokens for result in results] == [result.tokens for result in plain]


def test_settings_are_all_or_nothing(pair):
    engine = harness(pair)
    planner = engine.make_adaptive(VerifyMode.COMPACT).planner
    engine.scheduler.keep_records(BOTH)
    engine.run(jobs(1))
    change = engine.scheduler.set_internal_state
    assert "no such" in change({"dspark_force_budget_frac": 0.5, "dspark_clear_info_records": 1, "other": 1})
    assert planner.pinned_fraction is None
    assert records_of(engine)
    assert change({"dspark_force_budget_frac": 0.5, "dspark_clear_info_records": True}) is None
    assert planner.pinned_fraction == 0.5
    assert records_of(engine) == []
    assert change({}) is None


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.5, True, float("nan"), float("inf")])
def test_fractions_out_of_range_are_refused(pair, value):
    engine = harness(pair)
    planner = engine.make_adaptive(VerifyMode.COMPACT).planner
    assert "fraction in (0, 1]" in engine.scheduler.set_internal_state({"dspark_force_budget_frac": value})
    assert planner.pinned_fraction is None


def test_pins_wait_for_an_idle_server_and_clearing_does_not(pair):
    engine = harness(pair)
    planner = engine.make_adaptive(VerifyMode.COMPACT).planner
    change = engine.scheduler.set_internal_state
    assert change({"dspark_force_budget_frac": 1}) is None
    engine.results = {"a": Result()}
    engine.scheduler.add(to_message("a", jobs(1)[0]))
    assert "requests are running" in change({"dspark_force_budget_frac": 0.5})
    assert planner.pinned_fraction == 1.0
    assert change({"dspark_force_budget_frac": None}) is None
    assert planner.pinned_fraction is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dspark_force_budget_frac": 0.5}, "--ragged-verify-mode compact"),
        ({"dspark_force_budget_frac": None}, "--ragged-verify-mode compact"),
        ({"dspark_clear_info_records": True}, "SGLANG_DSPARK_ENABLE_SPS_RECORD"),
        ({"speculative_accept_threshold_single": 0.9}, "lossless"),
        ({"speculative_accept_threshold_acc": None}, "lossless"),
        ({"speculative_accept_threshold_acc": True}, "lossless"),
        ({"pp_max_micro_batch_size": 1}, "no such"),
    ],
)
def test_settings_a_static_server_refuses(pair, values, reason):
    assert reason in harness(pair).scheduler.set_internal_state(values)


def test_the_lossless_threshold_is_what_it_is(pair):
    change = harness(pair).scheduler.set_internal_state
    assert change({"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1}) is None


def test_the_environment_prepares_a_profile(pair, monkeypatch, caplog):
    engine = harness(pair)
    plain = prepare_profiling(engine.scheduler, engine.ready)
    assert plain.info["verify_request_buckets"] == [1, 2, 3, 4]
    assert plain.info["dspark_record_components"] == []
    assert engine.scheduler.info_record() is None
    monkeypatch.setenv("SGLANG_DSPARK_ENABLE_SPS_RECORD", "1")
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "1.0")
    engine = harness(pair)
    ready = prepare_profiling(engine.scheduler, engine.ready)
    assert isinstance(ready, SchedulerReady)
    assert ready.info["dspark_record_components"] == ["core", "step_cpu_time"]
    assert ready.info["simulate_acc_len"] == 1.0
    assert "whatever the target says" in caplog.text
    assert [result.steps for result in engine.run(jobs(1))] == [[1] * 12]
    assert json.loads(engine.scheduler.info_record())["simulate_acc_len"] == 1.0
