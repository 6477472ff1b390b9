"""/metrics: what the API process counts, what the scheduler sums, and the text in between."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_scheduler import QUEUE_SECONDS
from fake_server import FakeServer
from flashspark.api.metrics import SCHEDULER_METRICS, scheduler_families
from flashspark.scheduler.step_record import DecodeMeans, StepRecord, plan_outcome
from flashspark.scheduler.step_totals import StepTotals, fold_plan
from flashspark.speculative.adaptive import VerifyMode
from harness import Harness, Job, to_message
from planning import CONFIDENCE, plan_input, planner_of
from tiny_models import write_tokenizer
from unit.test_lossless_adaptive import LINEAR, WIDTH, grid
from unit.test_lossless_tiny import folders, plain, prompts  # noqa: F401 - fixtures

API_LABELS = {"model_name": "m", "engine_type": "unified"}
RANK = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def samples_of(server: FakeServer) -> dict[str, list]:
    response = server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.name.startswith("sglang:")
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("sglang:"), []).append(sample)
    return found


def value(samples, name: str, **labels: str) -> float:
    (sample,) = [s for s in samples[name] if labels.items() <= s.labels.items()]
    return sample.value


def test_without_the_flag_there_is_nothing(model):
    with FakeServer(model) as server:
        for path in ("/metrics", "/metrics/"):
            response = server.client.get(path)
            assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})


def test_requests_are_counted_where_they_are_answered(model):
    with FakeServer(model, "--enable-metrics", "--served-model-name", "m", "--api-key", "k") as server:
        headers = {"authorization": "Bearer k"}
        before = samples_of(server)  # open, as SGLang's
        assert "num_requests_total" not in before
        sampling = {"max_new_tokens": 12, "ignore_eos": True}
        body = {"input_ids": [70, 71, 72], "sampling_params": sampling | {"n": 2}}
        assert server.client.post("/generate", json=body, headers=headers).status_code == 200
        body = {"input_ids": [70] * 5, "sampling_params": sampling | {"max_new_tokens": 8}, "stream": True}
        assert server.client.post("/generate", json=body, headers=headers).status_code == 200
        assert server.client.post("/generate", json={}, headers=headers).status_code == 400
        assert server.client.get("/health_generate", headers=headers).status_code == 200
        samples = samples_of(server)
        assert server.client.get("/metrics/").status_code == 200
    expected = {
        "num_requests_total": (2, 1),
        "prompt_tokens_total": (6, 5),
        "generation_tokens_total": (24, 8),
    }
    for name, (whole, streamed) in expected.items():
        assert value(samples, name, is_streaming="false", **API_LABELS) == whole
        assert value(samples, name, is_streaming="true", **API_LABELS) == streamed
    for name in ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"):
        assert value(samples, name, is_streaming="false") == 2
        assert value(samples, name, is_streaming="true") == 1
    # Every token but the first of each answer: without a draft a step gives one.
    assert value(samples, "inter_token_latency_seconds_count") == 2 * 11 + 7
    assert [s.labels["le"] for s in samples["inter_token_latency_seconds_bucket"]][:3] == [
        "0.002",
        "0.004",
        "0.006",
    ]
    # From the first token to the last, once per answer; lengths with SGLang's names.
    assert value(samples, "request_time_per_output_token_seconds_count", is_streaming="false") == 2
    assert value(samples, "request_time_per_output_token_seconds_count", is_streaming="true") == 1
    assert (
        value(samples, "prompt_tokens_histogram_sum"),
        value(samples, "prompt_tokens_histogram_count"),
    ) == (11, 3)
    assert value(samples, "generation_tokens_histogram_sum") == 32
    assert value(samples, "generation_tokens_histogram_bucket", le="16.0") == 3
    assert value(samples, "queue_time_seconds_count") == 3
    assert value(samples, "queue_time_seconds_sum") == pytest.approx(3 * QUEUE_SECONDS)
    assert value(samples, "startup_time_seconds", **API_LABELS) > 0
    assert value(samples, "num_paused_reqs", **API_LABELS) == 0
    assert value(samples, "num_running_reqs", **API_LABELS, **RANK) == 3
    assert value(samples, "verify_tokens_total") == 70
    assert {s.labels["outcome"]: s.value for s in samples["plans_total"]} == {
        "trimmed": 5,
        'full ("quoted")': 2,
    }
    assert value(samples, "verify_tier_tokens_bucket", le="1.0") == 1
    assert value(samples, "verify_tier_tokens_bucket", le="4.0") == 5
    assert value(samples, "verify_tier_tokens_bucket", le="8192.0") == 5
    assert value(samples, "verify_tier_tokens_bucket", le="+Inf") == 7
    assert value(samples, "verify_tier_tokens_sum") == 20_000


def test_http_is_counted_by_endpoint_method_and_status(model):
    with FakeServer(model, "--enable-metrics", "--api-key", "k") as server:
        assert server.client.get("/v1/models").status_code == 401
        for path in ("/v1/models/none", "/no/such/path", "/metricsx"):
            server.client.get(path, headers={"authorization": "Bearer k"})
        body = {"input_ids": [70], "sampling_params": {"max_new_tokens": 2}, "stream": True}
        server.client.post("/generate", json=body, headers={"authorization": "Bearer k"})
        server.client.request("BREW", "/generate")
        samples = samples_of(server)
    responses = {
        (s.labels["endpoint"], s.labels["method"], s.labels["status_code"]): s.value
        for s in samples["http_responses_total"]
    }
    assert responses[("/v1/models", "GET", "401")] == 1
    assert responses[("other", "GET", "404")] == 3
    assert responses[("/generate", "POST", "200")] == 1
    assert responses[("/generate", "other", "401")] == 1
    assert value(samples, "http_requests_total", endpoint="other", method="GET") == 3
    # The call that asks is under way, and nobody else.
    assert value(samples, "http_requests_active", endpoint="/metrics", method="GET") == 1
    assert sum(s.value for s in samples["http_requests_active"]) == 1


def test_a_scheduler_that_does_not_answer_leaves_the_rest(model, monkeypatch):
    from flashspark.api.engine_client import EngineClient

    assert EngineClient.metrics.__defaults__ == (5.0,)
    with FakeServer(model, "--enable-metrics") as server:
        body = {"input_ids": [70], "sampling_params": {"max_new_tokens": 4, "sampling_seed": -5}}
        info = server.client.post("/generate", json=body).json()["meta_info"]
        assert info["queue_time"] == QUEUE_SECONDS
        assert 0 < info["first_token_latency"] < info["e2e_latency"]
        assert info["request_received_ts"] < info["response_sent_to_client_ts"]
        assert info.get("decode_throughput", 1) > 0  # absent where all tokens came at once
        server.client.post("/generate", json={"input_ids": [70], "sampling_params": {"sampling_seed": -1002}})
        samples = samples_of(server)
    assert value(samples, "num_requests_total") == 1
    assert "num_running_reqs" not in samples


def record_of(plan, **changes) -> StepRecord:
    record = StepRecord(
        1,
        num_reqs=3,
        num_verify_tokens=8,
        num_rows_run=9,
        num_output_tokens=6,
        num_full_tokens=12,
        decode_ms=12.0,
    )
    return dataclasses.replace(record, plan=plan, **changes)


def test_the_page_names_metrics_that_there_are():
    page = (Path(__file__).parents[2] / "docs" / "adaptive-verification.md").read_text()
    table = page.split("| metric | what it tells |", 1)[1].split("\n\n", 1)[0]
    first_cells = [line.strip("|").split("|")[0] for line in table.splitlines()[2:]]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)", cell)}
    assert len(named) > 15
    assert named <= SCHEDULER_METRICS.keys() | {"verify_tier_tokens"}


def test_totals_by_hand():
    batch = plan_input(CONFIDENCE)
    trimmed = planner_of().plan(batch)
    guarded = planner_of(min_gain=0.5).plan(batch)
    early = planner_of().plan(plan_input(CONFIDENCE, relayed=False))
    one_tier = planner_of(grid=None).plan(plan_input(CONFIDENCE, caps=[1, 1, 1]))
    totals = StepTotals()
    totals.add(StepRecord())  # nobody decoded
    totals.add(record_of(trimmed, mode="compact"))
    totals.add(record_of(trimmed, num_rows_run=12))
    full = {"num_verify_tokens": 12, "num_rows_run": 12}
    totals.add(record_of(guarded, **full, mode="compact"))
    totals.add(record_of(early, **full, mode="compact"))
    totals.add(record_of(one_tier, num_verify_tokens=3, num_rows_run=3, num_full_tokens=3, mode="compact"))
    totals.add(record_of(None, num_rows_run=1))
    totals.add(record_of(None, num_rows_run=100_000))
    assert totals.num_trimmed_tokens == 4 + 4
    assert totals.num_full_tokens == 12 * 6 + 3
    assert totals.num_predicted_steps == 4
    assert totals.num_pad_tokens == 1
    assert totals.outcomes == {
        "trimmed": 2,
        "full (gain is too small)": 1,
        "full (no confidence old enough)": 1,
        "full (nothing to trim)": 1,
    }
    assert totals.unresolved == {"no confidence old enough": 1}
    assert totals.num_small_batch_plans == 0
    assert totals.steps_by_size == [1, 0, 1, 0, 4, *[0] * 9, 1]  # 1; 3; 9, 12, 12, 12; 100,000
    assert totals.num_rows_run == 9 + 12 + 12 + 12 + 3 + 1 + 100_000
    assert totals.measured_seconds == pytest.approx(4 * 12e-3)
    one_tier_ms = 1e3 * one_tier.record.predicted_step_seconds
    assert totals.predicted_seconds * 1e3 == pytest.approx(2 * 1000 / 90 + 1000 / 60 + one_tier_ms)


def test_small_batches_are_counted():
    plan = planner_of().plan(plan_input(CONFIDENCE[:1]))
    totals = StepTotals()
    totals.add(record_of(plan, mode="compact"))
    assert totals.num_small_batch_plans == 1
    assert totals.outcomes == {"full (one tier for all budgets)": 1}


def test_means_by_hand():
    plan = planner_of().plan(plan_input(CONFIDENCE))
    steps = [
        record_of(plan, step_ms=30.0, num_uncapped_tokens=8),
        StepRecord(2, num_prefill_tokens=9, step_ms=99.0),
    ]
    steps.append(
        record_of(plan, num_output_tokens=9, num_verify_tokens=10, step_ms=20.0, num_uncapped_tokens=9)
    )
    means = DecodeMeans.of(steps, gamma=3)
    assert (means.accept_length, means.accept_rate) == (2.5, 0.5)
    assert (means.cap_length, means.block_accept_length) == (3.0, 17 / 6)
    assert means.gen_throughput == pytest.approx(15 / 0.05)
    assert means.step_time_error_s == pytest.approx(1 / 90 - 12e-3)
    assert DecodeMeans.of([record_of(None)], 3).cap_length is None
    assert DecodeMeans.of([*steps[:1], record_of(plan)], 3).block_accept_length is None
    assert DecodeMeans.of([], 3) == DecodeMeans()


def test_the_plan_hash_follows_shapes_and_their_order():
    batch = plan_input(CONFIDENCE)
    five, nine = planner_of().plan(batch), planner_of(min_gain=0.5).plan(batch)
    unplanned = planner_of().plan(plan_input(CONFIDENCE, relayed=False))
    other = planner_of().plan(plan_input(np.roll(CONFIDENCE, 1, axis=0)))
    assert fold_plan(0, five) == fold_plan(0, other)  # the same budget for other requests
    hashes = {fold_plan(fold_plan(0, a), b) for a in (five, nine, unplanned) for b in (five, nine, unplanned)}
    assert len(hashes) == 9


def test_time_in_the_queue_is_told_once_there_is_a_row(folders):  # noqa: F811
    scheduler = Harness(folders["target"], max_running_requests=1).scheduler
    outputs: dict[str, list[float | None]] = {"r0": [], "r1": [], "r2": []}
    scheduler._send = lambda output: outputs[output.request_id].append(output.queue_seconds)
    for request_id in outputs:
        scheduler.add(to_message(request_id, Job([5, 9, 40], 4)))
    scheduler.step()
    scheduler.abort(["r2"], "it still waits")
    while scheduler.has_work:
        scheduler.step()
    assert outputs["r2"] == [None]
    for request_id in ("r0", "r1"):
        waited, *others = outputs[request_id]
        assert waited is not None and waited >= 0
        assert others == [waited] * 3


def check_charts(charts: dict, records: list[StepRecord], mode: VerifyMode) -> None:
    """What /server_info has for the dashboard, against the records."""
    assert charts["last_gen_throughput"] == 0  # nothing runs
    assert charts["full_block_tokens"] == sum(r.num_full_tokens for r in records)
    sizes = Counter((r.num_rows_run - 1).bit_length() for r in records)
    assert charts["steps_by_rows"] == [sizes[i] for i in range(15)]
    if mode is VerifyMode.STATIC:
        assert charts["confidence_calibration"] is None
        assert (charts["plan_outcomes"], charts["predicted_steps"]) == ({}, 0)
        return
    prices = [r.plan.record.predicted_step_seconds for r in records]
    times = [r.decode_ms / 1e3 for r, price in zip(records, prices, strict=True) if price is not None]
    assert charts["predicted_steps"] == len(times)
    assert charts["predicted_step_seconds"] == pytest.approx(sum(p for p in prices if p is not None))
    assert charts["measured_step_seconds"] == pytest.approx(sum(times))
    assert charts["plan_outcomes"] == Counter(plan_outcome(r.plan) for r in records)
    calibration = charts["confidence_calibration"]
    assert set(calibration) == {"counts", "expected", "accepted", "errors"}
    assert len(calibration["counts"]) == len(calibration["errors"]) == WIDTH - 1


@pytest.mark.parametrize("mode", list(VerifyMode), ids=lambda mode: mode.value)
def test_of_a_scheduler(folders, mode):  # noqa: F811
    """Everything it says has a description, and equals its records' sums; two that plan alike have one hash."""
    hashes = set()
    for _ in range(2):
        harness = Harness(folders["target"], folders["dflash2"])
        if mode is not VerifyMode.STATIC:
            adaptive = harness.make_adaptive(mode, LINEAR, grid(48), min_gain=0.0, draft_free=None)
            adaptive.source.num_refits = 100
        harness.run([Job(p, 20) for p in prompts(6)])
        hashes.add(harness.scheduler.verification_state().get("plan_hash"))
    assert len(hashes) == 1
    metrics = harness.scheduler.metrics()
    families = scheduler_families(metrics, API_LABELS)
    assert {family.name.removeprefix("sglang:") for family in families} <= {
        *(name.removesuffix("_total") for name in SCHEDULER_METRICS),
        "verify_tier_tokens",
    }
    samples: dict[str, list] = {}
    for sample in metrics.samples:
        samples.setdefault(sample.name, []).append(sample)
    records = [r for r in harness.scheduler.records if r.num_reqs]
    assert len(records) < 10**6 == harness.scheduler.limits.decode_log_interval
    num_reqs, num_output = (sum(getattr(r, n) for r in records) for n in ("num_reqs", "num_output_tokens"))
    assert num_output == 6 * 20
    assert value(samples, "spec_accept_length") == pytest.approx(num_output / num_reqs)
    assert value(samples, "spec_accept_rate") == pytest.approx((num_output / num_reqs - 1) / (WIDTH - 1))
    assert value(samples, "verify_tokens_total") == sum(r.num_verify_tokens for r in records)
    assert metrics.num_rows_run == sum(r.num_rows_run for r in records)
    assert sum(metrics.steps_by_size) == len(records)
    assert value(samples, "spec_num_steps") == 1
    limits, state = harness.scheduler.limits, harness.scheduler.state()
    assert value(samples, "kv_used_tokens") == value(samples, "num_used_tokens") == state["num_used_tokens"]
    free = limits.max_total_num_tokens - state["num_used_tokens"]
    evictable = value(samples, "kv_evictable_tokens")
    assert value(samples, "kv_available_tokens") + evictable == free
    assert evictable == state["num_cached_pages"] * limits.page_size > 0
    assert value(samples, "page_size") * value(samples, "num_pages") == limits.max_total_num_tokens
    assert value(samples, "utilization") == value(samples, "num_so_requests_total") == 0
    tokens = {s.labels["mode"]: s.value for s in samples["realtime_tokens_total"]}
    num_cached = value(samples, "cached_tokens_total")
    num_prompt = sum(map(len, prompts(6)))
    assert tokens == {
        "prefill_compute": num_prompt - num_cached,
        "prefill_cache": num_cached,
        "decode": num_output,
    }
    assert value(samples, "context_len") == limits.context_length
    check_charts(harness.scheduler.charts(), records, mode)
    if mode is VerifyMode.STATIC:
        assert "plans_total" not in samples and "spec_cap_length" not in samples
        return
    assert hashes != {0}
    full = sum(r.num_full_tokens for r in records)
    assert value(samples, "verify_full_block_tokens_total") == full
    predicted = [r for r in records if r.plan.record.predicted_step_seconds is not None]
    assert value(samples, "plan_predicted_steps_total") == len(predicted)
    assert value(samples, "verify_tokens_trimmed_total") == full - value(samples, "verify_tokens_total") > 0
    assert value(samples, "spec_cap_length") == pytest.approx(
        value(samples, "verify_tokens_total") / num_reqs
    )
    assert sum(s.value for s in samples["plans_total"]) == len(records)
    assert ("spec_block_accept_length" in samples) == (mode is VerifyMode.CAP_ACCEPT)
    slopes = {s.labels["class"]: s.value for s in samples["estimator_slope"]}
    assert slopes == {"greedy": 0.0, "sampled": 0.0}  # the prior: too few steps to refit
    assert value(samples, "estimator_intercept", **{"class": "greedy", "position": "4"}) == 1.5
    summary = harness._worker.adaptive.source.summary()
    errors = {s.labels["position"]: s.value for s in samples["confidence_calibration_error"]}
    assert list(errors.values()) == summary["calibration_errors"]
    assert list(errors) == ["0", "1", "2", "3", "4"]
    seen = [s.value for s in samples["estimator_observations_total"]]
    assert seen == [*summary["observations"][0], *summary["observations"][1]]
    difference = value(samples, "confidence_expected_accepted_total") - summary["actual_accepted"]
    assert value(samples, "confidence_expected_minus_actual") * summary["scored_blocks"] == pytest.approx(
        difference
    )
