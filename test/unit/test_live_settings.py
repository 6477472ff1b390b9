"""Live switches: one server plays every arm of a benchmark, and each arm is what a server of its own would be."""

from __future__ import annotations

import itertools
import json

import pytest

from flashspark.speculative.accept import AcceptRule
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.cost_table import SpsCostTable
from harness import Harness, Job, Result, to_message
from tiny_models import write_dflash2, write_dspark, write_target

WIDTH = 6
LINEAR = SpsCostTable(tuple(range(1, 400)), tuple(1000.0 / (4 + n) for n in range(1, 400)), 400)


@pytest.fixture(scope="module", params=["dflash2", "dspark", "dspark anchor"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    if request.param == "dflash2":
        return target, write_dflash2(folder / "draft", target)
    return target, write_dspark(folder / "draft", target, sample_from_anchor=request.param == "dspark anchor")


def jobs(num: int = 4) -> list[Job]:
    sampling = [{}, {"temperature": 1.0}]
    return [Job([5 + i, 6, 7, 8 + i], 24, sampling=sampling[i % 2]) for i in range(num)]


def outcome(engine: Harness) -> list[tuple]:
    """Tokens, steps and statistics of the same requests, whatever came before them: their draws are seeded alike."""
    engine.scheduler._num_arrivals = 0
    return [(result.tokens, result.steps, result.stats) for result in engine.run(jobs())]


def adaptive(pair, mode=VerifyMode.COMPACT) -> Harness:
    engine = Harness(*pair)
    engine.make_adaptive(mode, LINEAR, draft_free=None).planner.pin(0.4)
    return engine


def switch(engine: Harness, **values) -> str | None:
    return engine.scheduler.set_internal_state(values)


def test_every_arm_in_turn_is_what_a_server_of_its_own_would_be(pair):
    static = outcome(Harness(*pair))
    arms = {
        "static": static,
        "compact": outcome(adaptive(pair)),
        "cap-accept": outcome(adaptive(pair, VerifyMode.CAP_ACCEPT)),
    }
    assert arms["compact"] != static
    engine = adaptive(pair)
    for one, other in itertools.permutations(arms, 2):
        for mode in (one, other):
            assert switch(engine, ragged_verify_mode=mode) is None
            assert engine.scheduler.verification_state()["ragged_verify_mode"] == mode
            assert outcome(engine) == arms[mode]


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_narrower_block_is_that_of_a_server_started_with_it(pair, width):
    dspark = (
        "dspark" in json.loads((pair[1] / "config.json").read_text()).get("architectures", [""])[0].lower()
    )
    flag = {"speculative_dspark_block_size": width - 1} if dspark else {"speculative_num_draft_tokens": width}
    engine = Harness(*pair)
    whole = outcome(engine)
    assert switch(engine, speculative_num_draft_tokens=width) is None
    assert outcome(engine) == outcome(Harness(*pair, **flag))
    assert switch(engine, speculative_num_draft_tokens=None) is None
    assert outcome(engine) == whole


def test_without_speculation_it_decodes_plainly(pair):
    engine = Harness(*pair)
    drafted = outcome(engine)
    assert switch(engine, speculation=False) is None
    plain = outcome(engine)
    assert all(steps == [1] * 24 and stats.num_drafted == 0 for _, steps, stats in plain)
    assert [tokens for tokens, _, _ in plain][::2] == [tokens for tokens, _, _ in drafted][::2]  # greedy ones
    assert switch(engine, speculation=True) is None
    assert outcome(engine) == drafted


def test_a_cap_bounds_every_verify_length(pair):
    engine = adaptive(pair)
    assert switch(engine, dspark_force_budget_frac=1.0, speculative_max_verify_len=3) is None
    capped = outcome(engine)
    lens = {length for _, _, stats in capped for length, count in enumerate(stats.verify_histogram) if count}
    assert max(lens) == 3
    assert switch(engine, speculative_max_verify_len=None) is None
    lens = {
        length
        for _, _, stats in outcome(engine)
        for length, count in enumerate(stats.verify_histogram)
        if count
    }
    assert max(lens) == WIDTH


def test_records_are_of_one_mode_and_width(pair):
    engine = adaptive(pair)
    engine.scheduler.keep_records(("core",))
    outcome(engine)
    for values, mode, width in (
        ({"ragged_verify_mode": "static"}, "static", WIDTH),
        ({"speculative_num_draft_tokens": 3}, "static", 3),
        ({"speculative_num_draft_tokens": WIDTH, "ragged_verify_mode": "cap-accept"}, "cap-accept", WIDTH),
    ):
        assert switch(engine, **values) is None
        feed = json.loads(engine.scheduler.info_record())
        assert (feed["mode"], feed["verify_num_draft_tokens"], feed["records"]) == (mode, width, [])
        outcome(engine)
        assert {record["mode"] for record in json.loads(engine.scheduler.info_record())["records"]} == {mode}


REFUSED = [
    ({"ragged_verify_mode": "fast"}, "one of static, cap-accept, compact"),
    ({"ragged_verify_mode": None}, "one of static"),
    ({"speculative_max_verify_len": 0}, "1 … 6"),
    ({"speculative_max_verify_len": 2.5}, "1 … 6"),
    ({"speculative_num_draft_tokens": 1, "ragged_verify_mode": "static"}, "2 … 6"),
    ({"speculative_num_draft_tokens": 7, "ragged_verify_mode": "static"}, "2 … 6"),
    ({"speculative_num_draft_tokens": 4}, "static verification"),
    ({"speculation": 1}, "true or false"),
    ({"ragged_verify_mode": "static", "dspark_force_budget_frac": 0.5}, "set ragged_verify_mode too"),
    ({"ragged_verify_mode": "static", "nonsense": 1}, "no such setting"),
    ({"dspark_force_budget_frac": "half"}, "fraction in (0, 1]"),
    ({"dspark_force_budget_frac": 1e-320}, "1e-06 at least"),
    ({"ragged_verify_mode": "x\nFORGED"}, "got 'x\\nFORGED'"),
]


def test_a_block_holds_what_is_simulated(pair):
    engine = Harness(*pair)
    engine._worker.rule = AcceptRule(2.5)
    refusal = "SGLANG_SIMULATE_ACC_LEN=3.5: a step commits at most its block of 3"
    assert refusal in switch(engine, speculative_num_draft_tokens=3)
    assert switch(engine, speculative_num_draft_tokens=4) is None


@pytest.mark.parametrize(("values", "reason"), REFUSED)
def test_nonsense_is_refused_and_changes_nothing(pair, values, reason):
    engine = adaptive(pair)
    assert reason in switch(engine, **values)
    worker = engine.scheduler._worker
    assert (worker.adaptive.mode, worker.width, worker.speculates) == (VerifyMode.COMPACT, WIDTH, True)
    assert worker.adaptive.planner.pinned_fraction == 0.4


def test_what_is_set_is_told_and_can_be_cleared_in_any_mode(pair):
    engine = adaptive(pair)
    state = engine.scheduler.verification_state
    assert switch(engine, speculative_max_verify_len=3, speculation=False) is None
    assert (state()["speculative_max_verify_len"], state()["speculation"]) == (3, False)
    assert switch(engine, ragged_verify_mode="static", speculative_num_draft_tokens=4) is None
    assert (state()["speculative_num_draft_tokens"], state()["ragged_verify_mode"]) == (4, "static")
    assert switch(engine, dspark_force_budget_frac=None, speculative_max_verify_len=None) is None
    assert switch(engine, ragged_verify_mode="compact", speculative_num_draft_tokens=None) is None
    assert (state()["pinned_budget_fraction"], state()["speculative_max_verify_len"]) == (None, WIDTH)


def test_means_over_recent_steps_are_of_one_width(pair):
    engine = Harness(*pair)
    outcome(engine)
    assert switch(engine, speculative_num_draft_tokens=2) is None
    outcome(engine)
    (rate,) = [
        sample.value for sample in engine.scheduler.metrics().samples if sample.name == "spec_accept_rate"
    ]
    assert 0 <= rate <= 1


def test_counters_stay_while_verification_is_static(pair):
    engine = adaptive(pair)
    outcome(engine)
    counters = {s.name for s in engine.scheduler.metrics().samples if s.name.endswith("_total")}
    assert switch(engine, ragged_verify_mode="static") is None
    assert {s.name for s in engine.scheduler.metrics().samples if s.name.endswith("_total")} == counters


def test_without_speculation_compact_runs_a_row_for_each_request(pair):
    engine = adaptive(pair)
    engine.scheduler._worker.adaptive.planner.pin(None)
    assert switch(engine, speculation=False) is None
    outcome(engine)
    decoded = [record for record in engine.scheduler.records if record.num_reqs]
    assert all(record.num_rows_run == record.num_reqs for record in decoded)


def test_a_collector_keeps_its_mode(tmp_path, monkeypatch):
    target = write_target(tmp_path / "target")
    draft = write_dspark(tmp_path / "draft", target)
    monkeypatch.setenv("SGLANG_DSPARK_STS_COLLECT_PATH", str(tmp_path / "r"))
    engine = Harness(target, draft, ragged_verify_mode="cap-accept")
    for values in (
        {"ragged_verify_mode": "static"},
        {"dspark_force_budget_frac": 0.2},
        {"speculative_max_verify_len": 3},
    ):
        assert "are being collected" in switch(engine, **values)


def test_a_width_must_be_undone_before_the_ragged_modes(pair):
    engine = adaptive(pair)
    assert switch(engine, ragged_verify_mode="static", speculative_num_draft_tokens=4) is None
    assert "static verification" in switch(engine, ragged_verify_mode="compact")
    assert switch(engine, ragged_verify_mode="compact", speculative_num_draft_tokens=WIDTH) is None


def test_a_static_server_stays_static(pair):
    assert "--ragged-verify-mode compact" in switch(Harness(*pair), ragged_verify_mode="compact")
    assert switch(Harness(*pair), ragged_verify_mode="static") is None


def test_without_step_costs_the_mode_stays_ragged_as_it_was(pair):
    engine = Harness(*pair)
    engine.make_adaptive(VerifyMode.COMPACT)
    assert "without step costs" in switch(engine, ragged_verify_mode="cap-accept")
    assert switch(engine, ragged_verify_mode="static") is None
    assert switch(engine, ragged_verify_mode="compact") is None


@pytest.mark.parametrize(
    "values",
    [
        {"ragged_verify_mode": "static"},
        {"speculation": False},
        {"speculative_max_verify_len": 2},
        {"ragged_verify_mode": "static", "speculative_num_draft_tokens": 3},
    ],
    ids=str,
)
def test_switches_wait_for_an_idle_server(pair, values):
    engine = adaptive(pair)
    engine.results = {"a": Result()}
    engine.scheduler.add(to_message("a", jobs(1)[0]))
    assert "requests are running" in switch(engine, **values)
