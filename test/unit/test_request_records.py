"""Records of requests: each value against the text that came out, their sums against what requests count themselves."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest

from flashspark.scheduler.record_feed import FeedHeader, RecordFeed
from flashspark.scheduler.step_record import StepRecord
from flashspark.speculative.accept import AcceptRule
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.cost_table import PlainStepCosts
from flashspark.speculative.looks import LookRule
from flashspark.speculative.plan_stages import DraftFreeRule
from harness import Harness, Job
from unit.test_lossless_adaptive import LINEAR, WIDTH, grid
from unit.test_lossless_tiny import folders, plain, prompts  # noqa: F401 - fixtures

GAMMA = WIDTH - 1
MODES = list(VerifyMode)


def engine_of(folders, mode: VerifyMode, **settings) -> Harness:  # noqa: F811
    harness = Harness(folders["target"], folders["dflash2"], max_total_tokens=448)
    if mode is not VerifyMode.STATIC:
        looks = {"look_rule": LookRule(idle_every=1, kept_every=1, poor_every=1)}  # at every step
        settings = looks | {"min_gain": 0.0, "draft_free": None} | settings
        adaptive = harness.make_adaptive(mode, LINEAR, grid(48), **settings)
        adaptive.source.num_refits = 100  # warm: trims from the third step on
    harness.scheduler.keep_records(("core", "reqs"))
    return harness


def steps_of(harness: Harness) -> list[dict]:
    return json.loads(harness.scheduler.info_record())["records"]


def by_request(steps: list[dict]) -> dict[str, list[dict]]:
    found = defaultdict(list)
    for step in steps:
        for record in step["reqs"]:
            found[record["rid"]].append(record)
    return found


def check_values(job: Job, tokens: list[int], records: list[dict], mode: VerifyMode) -> int:
    """Each step of a greedy request against its own text, which says what every draft was worth. Returns the trims."""
    at = trimmed = 0
    for record in records:
        assert record["prefix_len"] == len(job.prompt) + at - 1
        assert record["cap"] == min(1 if job.speculation == "off" else WIDTH, job.max_new_tokens - at)
        future = tokens[at : at + record["acc_len"]]
        if at + record["acc_len"] <= len(tokens):
            assert record["bonus_token"] == future[-1]
            assert (record["draft_tokens"] or [])[: record["correct_drafts"]] == future[:-1]
        correct, most = record["correct_drafts"], record["verify_len"] - 1
        assert record["acc_len"] == correct + 1
        assert 0 <= correct <= most <= record["cap"] - 1
        if record["cap"] == 1:
            assert record["draft_tokens"] is record["confidence"] is None
        elif len(tokens) == job.max_new_tokens:  # the whole future is known
            matches = (
                np.array(record["draft_tokens"][: record["cap"] - 1]) == tokens[at : at + record["cap"] - 1]
            )
            uncapped = int(np.cumprod(matches).sum())
            assert correct == min(uncapped, most)
            if mode is VerifyMode.CAP_ACCEPT or most == record["cap"] - 1 or correct < most:
                assert record["cap_trim"] == uncapped - correct
            else:
                assert record["cap_trim"] is None
            trimmed += uncapped > most
        at += record["num_output_tokens"]
    assert at == len(tokens)
    return trimmed


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_values_and_sums(folders, mode):  # noqa: F811
    """With retractions and an abort, a stop token, a request without speculation, and one that is drafted once."""
    harness = engine_of(folders, mode)
    jobs = [Job(p, 40 + i, arrive=i) for i, p in enumerate(prompts(12))]
    jobs[3].abort = 15
    jobs[5].speculation = "off"
    jobs[6].max_new_tokens = 2
    results = harness.run(jobs)
    stop = results[0].tokens[20]
    jobs[0].sampling = {"stop_token_ids": (stop,)}
    harness.scheduler.set_internal_state({"dspark_clear_info_records": True})
    totals = dict(harness.scheduler.totals)
    results = harness.run(jobs)
    steps, records = steps_of(harness), by_request(steps_of(harness))
    assert harness.scheduler.residency.num_retractions > 0
    assert results[3].finish.type == "abort" and results[3].stats.num_verify_steps > 0
    assert results[0].finish.type == "stop"
    trimmed = 0
    for i, (job, result) in enumerate(zip(jobs, results, strict=True)):
        mine, stats = records[f"job{i}"], result.stats
        trimmed += check_values(job, result.tokens, mine, mode)
        assert len(mine) == stats.num_verify_steps
        assert sum(r["verify_len"] - 1 for r in mine) == stats.num_verified
        assert sum(r["num_output_tokens"] for r in mine) == len(result.tokens)
        assert sum(min(r["correct_drafts"], r["num_output_tokens"]) for r in mine) == stats.num_accepted
        assert sum(len(r["draft_tokens"] or ()) for r in mine) == stats.num_drafted
        if mode is VerifyMode.CAP_ACCEPT:
            ended = mine[-1]
            uncapped = sum(r["acc_len"] + r["cap_trim"] for r in mine[:-1])
            uncapped += (
                ended["num_output_tokens"]
                if result.finish.type != "abort"
                else ended["acc_len"] + ended["cap_trim"]
            )
            assert stats.num_uncapped_tokens == uncapped
            assert stats.num_uncapped_tokens >= len(result.tokens)
        else:
            assert stats.num_uncapped_tokens is None
    assert (trimmed > 0) == (mode is not VerifyMode.STATIC)
    done = {name: count - totals[name] for name, count in harness.scheduler.totals.items()}
    assert done["verify_tokens"] == sum(step["verify_tokens_local"] for step in steps)
    assert done["verify_steps"] == sum(len(step["reqs"]) for step in steps)
    assert done["output_tokens"] == sum(r["num_output_tokens"] for step in steps for r in step["reqs"])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_plans_and_confidence(folders, mode):  # noqa: F811
    harness = engine_of(folders, mode)
    harness.run([Job(p, 20) for p in prompts(6)])
    for step in steps_of(harness):
        assert step["mode"] == mode.value
        assert sum(r["verify_len"] for r in step["reqs"]) == step["verify_tokens_local"]
        drafted = [r for r in step["reqs"] if r["draft_tokens"]]
        if mode is VerifyMode.STATIC:
            assert "plan" not in step
            assert all(r["confidence"] is r["survival"] is r["floor"] is None for r in step["reqs"])
            assert all(r["verify_len"] == r["cap"] for r in step["reqs"])
            continue
        for record in drafted:
            assert record["survival"] == pytest.approx(np.cumprod(record["confidence"]), abs=2e-6)
            assert record["floor"] <= record["verify_len"] <= record["cap"]
        plan = step["plan"]
        assert [stage["name"] for stage in plan["stages"]][:4] == [
            "full blocks",
            "fairness floor",
            "pin",
            "confidence",
        ]
        assert plan["num_floor_tokens"] == sum(r["floor"] for r in step["reqs"])
        assert plan["max_budget"] == sum(r["cap"] for r in step["reqs"]) - plan["num_floor_tokens"]
        if "budget" in step:
            spent = sum(r["verify_len"] - r["floor"] for r in step["reqs"])
            assert spent == step["budget"] == plan["num_tokens"] - plan["num_floor_tokens"]
            if drafted:
                assert step["predicted_theta"] == pytest.approx(
                    plan["expected_tokens"] / step["predicted_step_ms"] * 1e3
                )
            else:  # everybody has one token left, and nothing is priced
                assert {stage["reason"] for stage in plan["stages"]} == {"nobody can use a draft"}
        if mode is VerifyMode.COMPACT:
            assert step["num_verify_tokens"] == step["verify_tokens_graph_key"] >= plan["num_tokens"]


def test_steps_without_a_draft_draft_nothing(folders):  # noqa: F811
    rule = DraftFreeRule(patience=2, probe_every=5, probe_every_most=5)
    harness = engine_of(folders, VerifyMode.CAP_ACCEPT, draft_free=rule)
    harness._worker.adaptive.planner.plain_costs = PlainStepCosts((1, 48), (1e-6, 2e-6))
    harness.run([Job(p, 30) for p in prompts(4)])
    plain_steps = [step for step in steps_of(harness) if not step["plan"]["draft"]]
    assert len(plain_steps) > 5
    for step in plain_steps:
        if any(record["cap"] > 1 for record in step["reqs"]):
            assert step["plan"]["plain_theta"] == pytest.approx(step["predicted_theta"])
        for record in step["reqs"]:
            assert (record["verify_len"], record["acc_len"], record["cap_trim"]) == (1, 1, 0)
            assert record["draft_tokens"] is record["confidence"] is None


def test_uncapped_length_is_the_accept_length_where_nothing_is_cut(folders):  # noqa: F811
    harness = engine_of(folders, VerifyMode.CAP_ACCEPT)
    harness._worker.adaptive.planner.pin(1.0)
    for result in harness.run([Job(p, 30) for p in prompts(6)]):
        assert result.stats.num_uncapped_tokens == len(result.tokens)


def test_simulated_steps_do_not_say_what_was_cut(folders):  # noqa: F811
    harness = engine_of(folders, VerifyMode.CAP_ACCEPT)
    harness._worker.rule = AcceptRule(0.0)
    (result,) = harness.run([Job(prompts(1)[0], 10)])
    assert result.stats.num_uncapped_tokens is None


def test_without_the_component_nothing_is_kept(folders):  # noqa: F811
    harness = engine_of(folders, VerifyMode.COMPACT)
    harness.scheduler.keep_records(("core", "step_cpu_time"))
    harness.run([Job(prompts(1)[0], 10)])
    assert not any("reqs" in step or "plan" in step or "decode_ms" in step for step in steps_of(harness))
    assert all(record.reqs == () for record in harness.scheduler.records)


def test_memory_is_bounded_in_bytes_too():
    feed = RecordFeed(FeedHeader("static", 3, 4, ("core",), None), capacity_bytes=2000)
    for i in range(100):
        feed.add(StepRecord(i, 2, num_verify_tokens=7, num_rows_run=8), float(i), goes_on=True)
    dump = feed.dump()
    counts = [record["forward_ct"] for record in json.loads(dump)["records"]]
    assert counts == list(range(100 - len(counts), 100))
    assert 1500 < len(dump) < 2200
    feed.clear()
    feed.add(StepRecord(7, 2, num_verify_tokens=7, num_rows_run=8), 0.0, goes_on=True)
    assert len(json.loads(feed.dump())["records"]) == 1
