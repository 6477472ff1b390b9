"""A real server in compact mode: the text of static verification, and everything it says about trimming."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.server import Server, check_statistics, generate_body, running_server, speculative
from flashspark.demo import DEMO_PROMPTS

CAP_KEYS = {"spec_cap_length", "spec_cap_lens_histogram"}
# Rows are dear: whatever is unlikely to be accepted is not worth verifying.
DEAR_ROWS = {
    "bias_seconds": 1e-3,
    "bs_probes": [1, 16],
    "alpha_seconds": [0.0, 1e-4],
    "m_probes": [1, 128],
    "theta_seconds": [0.0, 0.2],
}


def batch(server: Server, prompts: list[list[int]], num_tokens: int, **sampling: Any) -> list[dict[str, Any]]:
    """All prompts in one call; the answers in order, their statistics checked."""
    body = generate_body(prompts[0], max_new_tokens=num_tokens, ignore_eos=True, **sampling)
    response = server.http.post("/generate", json=body | {"input_ids": prompts})
    assert response.status_code == 200, response.text
    answers = response.json()
    for answer in answers:
        check_statistics(answer["meta_info"], num_tokens)
    return answers


def check_metrics(server: Server, state: dict[str, Any], num_answers: int) -> None:
    """/metrics of an idle server, against its own counters and records."""
    text = server.http.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {s.name.removeprefix("sglang:"): s.value for s in samples if "position" not in s.labels}
    totals = {"verify_tokens_total": "verify_tokens", "spec_verify_calls_total": "verify_steps"}
    for name, counter in totals.items():
        assert values[name] == state[counter]
    records = state["dspark_info_record"]["records"]
    rows = sum(record["num_verify_tokens"] for record in records)
    assert values["verify_tier_tokens_sum"] == rows
    assert values["verify_tier_tokens_count"] == len(records)
    verified = sum(record["verify_tokens_local"] for record in records)
    full = sum(r["cap"] for record in records if record["plan"]["draft"] for r in record["reqs"])
    drafted = sum(record["verify_tokens_local"] for record in records if record["plan"]["draft"])
    assert values["verify_tokens_trimmed_total"] == full - drafted > 0
    is_compact = state["ragged_verify_mode"] == "compact"
    assert values["verify_pad_tokens_total"] == (rows - verified if is_compact else 0)
    trimmed = [s.value for s in samples if s.labels.get("outcome") == "trimmed"]
    assert trimmed == [state["trimmed_steps"]]
    assert values["num_requests_total"] == values["e2e_request_latency_seconds_count"] == num_answers
    assert values["generation_tokens_total"] == state["output_tokens"] - 1  # the warm-up's is nobody's
    assert values["num_running_reqs"] == values["num_used_tokens"] == values["gen_throughput"] == 0
    observed = [s.value for s in samples if s.name == "sglang:estimator_observations_total"]
    assert len(observed) == 2 * 5 and observed[0] > 100  # greedy and sampled, five drafts


def check_knobs(server: Server, prompt: list[int], expected: list[int]) -> None:
    """Requests side by side, each with a mode and a limit of its own: one text, and blocks as each asked for them."""
    asked = [{"mode": "off"}, {"mode": "static"}, {"mode": "static", "max_verify_len": 2}]
    asked += [{"mode": "adaptive", "max_verify_len": longest} for longest in (1, 3)]
    body = generate_body(prompt, max_new_tokens=60, ignore_eos=True)

    def one(speculation: dict[str, Any]) -> dict[str, Any]:
        return server.http.post("/generate", json=body | {"speculation": speculation}).json()

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(one, asked))
    assert ids_of(answers) == [expected[:60]] * len(asked)
    for speculation, answer in zip(asked, answers, strict=True):
        meta = answer["meta_info"]
        assert meta["speculation"] == speculation
        if speculation["mode"] == "off":
            assert not any(key.startswith("spec_") for key in meta)
            continue
        longest = speculation.get("max_verify_len", 6)
        rows = meta["spec_cap_lens_histogram"]
        assert sum(rows[longest + 1 :]) == 0
        if speculation["mode"] == "static":  # only near its end is a block shorter
            assert sum(rows[:longest]) < longest


def ids_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_tiny_pair_with_a_table_from_a_file(
    server: Server, tiny_pair: tuple[Path, Path], tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trimmed after the estimator's warm-up: some 200 steps. Watched by every means there is."""
    monkeypatch.setenv("SGLANG_DSPARK_DEBUG_DUMP", "reqs")
    table = tmp_path / "table.json"
    table.write_text(json.dumps(DEAR_ROWS))
    prompts = [[5 + i, 9, 40 + i, 7] for i in range(8)]
    static = batch(server, prompts, 260)
    assert not CAP_KEYS & static[0]["meta_info"].keys()
    flags = [*("--ragged-verify-mode", mode), *("--speculative-dspark-sps-table-path", str(table))]
    flags += ["--speculative-cost-table", "none"]  # no price for doing without this hopeless draft
    flags += ["--max-running-requests", "16", "--speculative-min-drafts-every", "4", "--enable-metrics"]
    with running_server(*speculative(*tiny_pair), *flags, log=tmp_path / "log") as adaptive:
        assert ids_of(batch(adaptive, prompts, 260)) == ids_of(static)
        answers = batch(adaptive, prompts, 80)
        assert ids_of(answers) == [ids[:80] for ids in ids_of(static)]
        for meta in (answer["meta_info"] for answer in answers):
            assert 1 <= meta["spec_cap_length"] < 6
            assert meta["spec_cap_length"] >= meta["spec_accept_length"]
            assert ("spec_block_accept_length" in meta) == (mode == "cap-accept")
            if mode == "cap-accept":
                assert 6 >= meta["spec_block_accept_length"] >= meta["spec_accept_length"]
        info = adaptive.http.get("/server_info").json()
        assert info["ragged_verify_mode"] == mode
        assert info["speculative_cost_table_source"] == f"file {table}"
        assert json.loads(info["speculative_cost_table_json"]) == DEAR_ROWS
        assert info["speculative_num_draft_tokens"] == 6
        assert info["disable_cuda_graph"] is False
        assert info["cuda_graph_config"]["decode"]["max_bs"] == 16
        state = adaptive.wait_idle()
        assert state["ragged_verify_mode"] == mode
        assert state["confidence_is_ready"]
        assert state["trimmed_steps"] > 80
        assert 1 <= state["avg_spec_cap_length"] < 5
        assert "verification may be trimmed from now on" in adaptive.log
        assert "cap len: 6.00" in adaptive.log
        assert " trimmed, " in adaptive.log
        check_metrics(adaptive, state, num_answers=16)
        check_knobs(adaptive, prompts[0], static[0]["output_ids"])
        explain = [sys.executable, "-m", "flashspark.benchmark.explain_step", "--base-url", adaptive.url]
        told = subprocess.run([*explain, "--last", "3"], capture_output=True, text=True, check=True).stdout
        # Eight prompts of one call need not join in one step, so the last steps may hold fewer than eight.
        assert len(re.findall(rf"^step \d+, {mode}: [1-8] requests?, ", told, re.MULTILINE)) == 3
        assert told.count("\nlengths: ") == 3


def test_table_is_measured_at_the_first_start(
    tiny_pair: tuple[Path, Path], tmp_path: Path, own_cache: Path
) -> None:
    flags = [*speculative(*tiny_pair), "--ragged-verify-mode", "compact", "--max-running-requests", "4"]
    with running_server(*flags, log=tmp_path / "log") as measuring:
        first = measuring.http.get("/server_info").json()
        assert first["speculative_cost_table_source"] == "measured at start-up"
        answers = batch(measuring, [[5, 9, 40, 7]] * 4, 60)
        assert ids_of(answers) == ids_of(answers[:1]) * 4
        measuring.wait_idle()
        assert "cost table: measured at start-up; ms at (requests, rows): (1, 2) " in measuring.log
    files = list(own_cache.rglob("*.json"))
    # A busy machine measures too roughly to keep it; then the log says so.
    assert len(files) == 1 or "too rough to keep" in measuring.log


@pytest.mark.full
@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_demo_pair_measured_and_trimmed(demo: Server, tmp_path: Path, own_cache: Path, mode: str) -> None:
    """Held-out prompts, 16 at a time; sampled requests between greedy ones, whose text stays what it was."""
    prompts = [item["token_ids"] for item in json.loads(DEMO_PROMPTS.read_text())][:48]
    waves = [prompts[i : i + 16] for i in range(0, len(prompts), 16)]
    static = list(itertools.chain(*(ids_of(batch(demo, wave, 120)) for wave in waves)))
    flags = ["--ragged-verify-mode", mode, "--max-running-requests", "16"]
    with running_server(*speculative("demo", "demo-dflash2"), *flags, log=tmp_path / "log") as adaptive:
        sampled = []
        for _ in range(2):
            got = list(itertools.chain(*(ids_of(batch(adaptive, wave, 120)) for wave in waves)))
            # Texts part where two logits are next to equal, and then stay apart: one or two of 48 at most.
            assert sum(a != b for a, b in zip(got, static, strict=True)) <= 2
            sampled += batch(adaptive, waves[0], 120, temperature=1.0)
        state = adaptive.wait_idle()
        assert state["confidence_is_ready"]
        assert state["trimmed_steps"] + state["draft_free_steps"] > 0
        assert min(answer["meta_info"]["spec_cap_length"] for answer in sampled[16:]) < 8
        assert (
            adaptive.http.get("/server_info").json()["speculative_cost_table_source"]
            == "measured at start-up"
        )
