"""The GPU's serving table: the closed loop around a scheduler, its figures, its file, and the frozen prompts."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashspark.demo import DEMO_MODELS
from flashspark.ipc import FinishReason, RequestOutput
from flashspark.models.config import DraftConfig
from flashspark.scheduler.step_record import StepRecord
from flashspark.speculative.cost_table import SpsCostTable
from tiny_models import write_dflash2, write_target

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import closed_loop
import engines
import gpu_serving
from closed_loop import Load, Segment, run_load
from engines import MIN_STEPS, InProcessEngine, Run
from gpu_serving import Point, Results, figures_of, parse, points_of
from peer_draft import plain_config
from prompt_files import cut_to


@dataclass
class ScriptedScheduler:
    """Gives client i `rates[i]` tokens a step, from the step after it is added on; runs two rows for each."""

    rates: list[int]
    outputs: list = field(default_factory=list)
    records: list = field(default_factory=list)
    num_steps: int = 0
    running: dict = field(default_factory=dict)  # id to (message, tokens so far)
    added: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    ends_with: str = "length"

    @property
    def has_work(self):
        return bool(self.running)

    def add(self, message):
        self.added.append((message.request_id, tuple(message.input_ids)))
        self.running[message.request_id] = (message, 0)

    def abort(self, request_ids, reason):
        for request_id in request_ids:
            self.aborted.append(request_id)
            del self.running[request_id]

    def state(self):
        counters = dict.fromkeys(engines.COUNTERS, 0)
        return {**counters, "num_steps": self.num_steps, "draft_free_steps": self.num_steps // 2}

    def step(self):
        self.num_steps += 1
        for request_id, (message, sofar) in list(self.running.items()):
            limit = message.sampling.max_new_tokens
            count = min(self.rates[int(request_id.split("/")[0])], limit - sofar)
            self.running[request_id] = (message, sofar + count)
            ends = sofar + count == limit
            if ends:
                del self.running[request_id]
            finish = FinishReason(self.ends_with) if ends else None
            self.outputs.append(RequestOutput(request_id, list(range(count)), finish))
        num_reqs = len(self.rates)
        self.records.append(
            StepRecord(
                forward_ct=self.num_steps,
                num_reqs=num_reqs,
                num_verify_tokens=2 * num_reqs,
                num_rows_run=3 * num_reqs,
            )
        )


def play(scheduler: ScriptedScheduler, **load) -> Run:
    values = {"requests_per_client": 2, "max_new_tokens": 40, "temperature": 0.0} | load
    prompts = [[client] for client in range(5)]
    engine = object.__new__(InProcessEngine)
    engine.scheduler, engine._outputs, engine.info = scheduler, scheduler.outputs, {"max_running_requests": 2}
    return engine.run(Load(prompts, len(scheduler.rates), **values))


def test_a_run_ends_when_the_first_client_is_through():
    """40 tokens: the first client needs 10 steps for each of its requests, the second one 20 for its first."""
    scheduler = ScriptedScheduler([4, 2])
    run = play(scheduler)
    assert scheduler.num_steps == 20
    # Prompts in steps of the concurrency; the clients go on until the end, and what runs then is aborted.
    assert scheduler.added == [
        *(("0/0", (0,)), ("1/0", (1,)), ("0/1", (2,))),
        *(("1/1", (3,)), ("0/2", (4,))),
    ]
    assert sorted(scheduler.aborted) == ["0/2", "1/1"]
    assert not scheduler.has_work and not scheduler.outputs
    assert run.segment.num_tokens == 2 * 40 + 40
    assert run.segment.accept_length == pytest.approx(120 / 40)
    # Counted from the second step on: everybody has a token from the first. Ends are no full batches' steps.
    assert (run.counts["verify_steps"], run.counts["verify_tokens"], run.counts["rows_run"]) == (38, 76, 114)
    assert (run.counts["num_steps"], run.counts["draft_free_steps"]) == (19, 10)
    assert [sorted(batch) for batch in run.committed] == [[2, 4]] * 17


def test_a_run_has_steps_enough_for_figures():
    scheduler = ScriptedScheduler([4, 2])
    play(scheduler, requests_per_client=1, max_new_tokens=8)
    assert scheduler.num_steps == MIN_STEPS + 1


def test_a_run_counts_from_when_it_has_settled(monkeypatch):
    """Who is slow at first does not weigh, nor do the steps of then."""
    clock = iter(range(10**6))
    monkeypatch.setattr(engines.time, "perf_counter", lambda: float(next(clock)))
    scheduler = ScriptedScheduler([1, 1])
    step = scheduler.step

    def faster_later():
        scheduler.rates = [1, 1] if scheduler.num_steps < 6 else [4, 4]
        step()

    monkeypatch.setattr(scheduler, "step", faster_later)
    run = play(scheduler, max_new_tokens=1000, seconds=20.0, settling_steps=5)
    assert scheduler.num_steps == 6 + 20
    assert run.segment.decode_rate == pytest.approx(8.0)
    assert (run.counts["num_steps"], run.counts["verify_steps"]) == (20, 40)
    assert run.committed == [[4, 4]] * 20


def test_settling_does_not_make_a_run_longer_than_its_first_client():
    scheduler = ScriptedScheduler([4, 2])
    run = play(scheduler, requests_per_client=1, max_new_tokens=80, settling_steps=8)
    assert scheduler.num_steps == 20 and run.counts["num_steps"] == 11
    play(scheduler := ScriptedScheduler([4, 2]), requests_per_client=1, max_new_tokens=8, settling_steps=30)
    assert scheduler.num_steps == 32


def test_a_run_is_cut_off_after_its_seconds(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(engines.time, "perf_counter", lambda: float(next(clock)))
    scheduler = ScriptedScheduler([1, 1])
    run = play(scheduler, max_new_tokens=1000, seconds=30.0)
    assert (
        scheduler.num_steps == 31
    )  # a second each, counted from the first, after which everybody has a token
    assert run.segment.decode_rate == pytest.approx(2.0)
    assert scheduler.aborted == ["0/0", "1/0"]


def test_what_does_not_run_as_asked_ends_the_benchmark():
    with pytest.raises(RuntimeError, match=r"request 0/0 ended after 40 tokens.*abort"):
        play(ScriptedScheduler([4, 2], ends_with="abort"))
    with pytest.raises(RuntimeError, match="3 clients, --max-running-requests 2"):
        play(ScriptedScheduler([1, 1, 1]))


def test_arms_in_turn_on_a_real_scheduler(tmp_path):
    target = write_target(tmp_path / "target")
    draft = write_dflash2(tmp_path / "draft", target)
    flags = ["--model-path", str(target), "--speculative-draft-model-path", str(draft), "--device", "cpu"]
    flags += ["--speculative-algorithm", "DFLASH", "--ragged-verify-mode", "static", "--random-seed", "1"]
    engine = InProcessEngine([*flags, "--max-running-requests", "2", "--torch-threads", "1"])
    width = engine.info["speculative_num_draft_tokens"]
    load = Load([[5, 6, 7, 8], [9, 10, 11]], 2, 1, 40, 0.0)
    rows = {}
    for arm in ("static", "off", "static:2", "static"):
        engine.set_state(gpu_serving.settings_of(arm))
        engine.forget()
        run = engine.run(load)
        rows[arm] = run.counts["rows_run"] / run.counts["verify_steps"]
        assert run.counts["verify_tokens"] == run.counts["rows_run"]
        assert all(len(batch) == 2 for batch in run.committed)
        state = engine.state()
        assert state["num_running_reqs"] == state["num_queue_reqs"] == 0
        assert state["num_free_rows"] == 2
    assert rows["off"] == 1.0
    assert 1.5 < rows["static:2"] <= 2.0  # less where little is left to emit
    assert 2.0 < rows["static"] <= width
    with pytest.raises(RuntimeError, match="refused: ragged_verify_mode"):
        engine.set_state(gpu_serving.settings_of("compact"))


class KeptOutputs(list):
    """What a scheduler hands out, and each request's tokens for good."""

    def __init__(self):
        super().__init__()
        self.tokens = {}

    def append(self, output):
        super().append(output)
        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)


def test_arms_draw_alike_where_nothing_is_trimmed(tmp_path):
    """Temperature 1, step costs unknown: compact verifies every block in full too."""
    target = write_target(tmp_path / "target")
    draft = write_dflash2(tmp_path / "draft", target)
    flags = ["--model-path", str(target), "--speculative-draft-model-path", str(draft), "--device", "cpu"]
    flags += ["--speculative-algorithm", "DFLASH", "--ragged-verify-mode", "compact"]
    flags += ["--speculative-cost-table", "none", "--max-running-requests", "2", "--torch-threads", "1"]
    engine = InProcessEngine(flags)

    def play(arm, seed):
        engine._outputs = KeptOutputs()
        engine.set_state(gpu_serving.settings_of(arm))
        engine.forget()
        run = engine.run(Load([[5, 6, 7, 8], [9, 10, 11]], 2, 2, 30, 1.0, seed=seed))
        return engine._outputs.tokens, run

    tokens, run = play("static", 1)
    assert len(tokens["0/0"]) == 30 and {"0/0", "1/0", "0/1"} <= set(tokens)
    assert run.counts["verify_tokens"] > 3 * run.counts["verify_steps"]
    for arm in ("compact", "static"):
        again, other = play(arm, 1)
        assert again == tokens and other.committed == run.committed
    assert play("static", 2)[0] != tokens and play("static", None)[0] != tokens


class ScriptedEngine:
    """Notes what it plays; decodes at a rate of each arm's own, the run's number added."""

    RATES = {"static": 100.0, "compact": 200.0, "off": 50.0, "cap-accept": 90.0} | {
        f"static:{n}": 100.0 + 10 * n * (6 - n) for n in range(2, 9)
    }

    def __init__(self):
        self.info = {"speculative_num_draft_tokens": 8}
        self.arm, self.played, self.num_flushed = "", [], 0

    def set_state(self, settings):
        self.arm = next(arm for arm in self.RATES if gpu_serving.settings_of(arm) == settings)

    def forget(self):
        self.num_flushed += 1

    def run(self, load):
        self.played.append((self.arm, load))
        return a_run(self.RATES[self.arm] + len(self.played))


def measured(*flags, point):
    engine = ScriptedEngine()
    table = gpu_serving.Table(parse(["--out", "x.json", *flags]), engine, {"W1": [[i] for i in range(512)]})
    table._warm_up = lambda point, arms: None
    return engine, table.measure(point)


def test_arms_run_as_often_as_their_noise_asks_for():
    for concurrency, wanted in (
        (1, {"static": 12, "compact": 12, "off": 3}),
        (2, {"static": 12, "compact": 12, "off": 3}),
        (4, {"static": 12, "compact": 12, "off": 3}),
        (8, {"static": 8, "compact": 8, "off": 3, "cap-accept": 1}),
        (128, {"static": 3, "compact": 3, "off": 3, "cap-accept": 1}),
    ):
        engine, row = measured(point=Point("W1", 1.0, concurrency))
        assert {arm: len(figures["ratios"]) for arm, figures in row["arms"].items()} == wanted
        assert [arm for arm, _ in engine.played[:3]] == ["static", "compact", "off"]
        assert engine.num_flushed == len(engine.played) == sum(wanted.values())
        loads = {(load.seed, load.prompts[0][0]) for _, load in engine.played}
        assert len(loads) == max(wanted.values())  # arms of a repeat have the same prompts and draws
        turns = {load.requests_per_client for _, load in engine.played}
        assert turns == {4 if concurrency == 1 else 1}
        assert row.get("best_fixed") is None
    seconds = {
        (c, arm): gpu_serving.seconds_of(parse(["--out", "x"]), arm, c)
        for c in (1, 8, 128)
        for arm in ("static", "off")
    }
    assert seconds == pytest.approx(
        {
            (1, "static"): 2.4,
            (1, "off"): 1.2,
            (8, "static"): 1.6,
            (8, "off"): 0.8,
            (128, "static"): 1.2,
            (128, "off"): 1.2,
        }
    )


def test_compact_over_the_best_fixed_length_is_not_of_the_run_that_chose_it():
    engine, row = measured("--lengths", "W1:0", "--arms", "static", "compact", point=Point("W1", 0.0, 32))
    played = [arm for arm, _ in engine.played]
    assert played[:9] == ["static", "compact", *(f"static:{n}" for n in range(2, 9))]
    assert played[9:] == ["compact", "static:3", "static", "static", "compact", "static:3"]
    best = row["best_fixed"]
    assert best["arm"] == "static:3" and best["swept"]["static:3"] == 190.0 + 4
    assert best["ratios"] == pytest.approx([210 / 201, 214 / 205])
    sweep, full = engine.played[2][1], engine.played[10][1]
    assert (sweep.seconds, full.seconds) == pytest.approx((0.8, 1.6))
    assert sweep.prompts[0] == [0] and full.prompts[0] == [32]
    assert "best_fixed" not in measured("--lengths", "W1:0", point=Point("W1", 1.0, 32))[1]

    _, row = measured("--lengths", "--repeats", "1", point=Point("W1", 0.0, 128))
    assert row["best_fixed"]["ratio"] == pytest.approx(
        202 / 196
    )  # after static, compact, off, cap-accept, static:2


class FrameServer(http.server.BaseHTTPRequestHandler):
    """Answers every /generate with frames of two tokens each."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for number in range(body["sampling_params"]["max_new_tokens"] // 2):
            frame = {"output_ids": body["input_ids"][:1] * 2, "meta_info": {"spec_verify_ct": number + 1}}
            self.wfile.write(b"data: " + json.dumps(frame).encode() + b"\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def frame_port():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FrameServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_clients_in_groups_are_the_load_of_one(frame_port):
    load = Load([[1], [2], [3]], 3, 2, 8, 0.0)
    with ThreadPoolExecutor(2) as pool:
        for segment in (run_load(frame_port, load), run_load(frame_port, load, pool, 2)):
            assert segment.num_tokens == 3 * 2 * 8
            assert segment.accept_length == 2.0


def test_clients_hang_up_when_time_is_over_but_not_without_a_token(frame_port):
    cut = closed_loop._run_clients(frame_port, Load([[1], [2]], 2, 5, 8, 0.0, seconds=0.0), range(2))
    assert [[(seen.num_tokens, seen.num_verify_steps) for seen in client] for client in cut] == [[(2, 1)]] * 2
    ended = closed_loop._run_clients(frame_port, Load([[1], [2]], 2, 3, 8, 0.0), range(2))
    assert [[(seen.num_tokens, seen.num_verify_steps) for seen in client] for client in ended] == [
        [(8, 4)] * 3,
        [(8, 4)] * 3,
    ]


def a_run(
    decode_rate: float, accept_length: float = 4.0, frame_seconds: float = 0.02, **counts: float
) -> Run:
    segment = Segment(decode_rate, 90.0, (0.1, 0.2), (0.01, 0.05), accept_length, 1000, frame_seconds)
    return Run(segment, dict.fromkeys(engines.COUNTERS, 0.0) | {"rows_run": 0.0} | counts)


def test_figures_are_medians_over_the_first_arm_of_the_same_repeat():
    base = [a_run(100.0), a_run(200.0), a_run(100.0), a_run(7.0)]
    mine = [
        a_run(
            150.0, frame_seconds=0.01, verify_steps=10.0, verify_tokens=30.0, rows_run=40.0, num_steps=10.0
        ),
        a_run(220.0, verify_steps=30.0, verify_tokens=130.0, rows_run=160.0, num_steps=10.0),
        a_run(120.0, draft_free_steps=5.0),
    ]
    figures = figures_of(mine, base, oracle=1.5)
    assert figures["ratios"] == pytest.approx([1.5, 1.1, 1.2])
    assert (figures["ratio"], figures["decode_rate"]) == pytest.approx((1.2, 150.0))
    assert figures["share"] == pytest.approx(0.2 / 0.5)
    assert (figures["verified"], figures["padded"]) == (4.0, 5.0)
    assert figures["draft_free"] == 0.25
    assert figures["step_ms"] == pytest.approx(20.0)
    # 1.5 = 0.75 accepted in half of the time, 1.1 and 1.2 in the same time.
    assert (figures["step_ratio"], figures["accept_ratio"]) == pytest.approx((1.0, 1.1))
    assert (figures["ttft_p99_ms"], figures["inter_token_p50_ms"]) == pytest.approx((200.0, 10.0))
    for hopeless in (None, 1.0):
        assert figures_of(mine, base, hopeless)["share"] is None


def test_pieces_fill_one_file(tmp_path):
    out = tmp_path / "table.json"
    flags = ["--out", str(out), "--resume", "--commit", "abc", "--workloads", "W1:0", "W2:0"]
    first = parse([*flags, "--concurrency", "2,1"])
    assert points_of(first)[:2] == [Point("W1", 0.0, 2), Point("W2", 0.0, 2)]
    results = Results(first)
    results.content["engines"].append({})
    row = {"prompts": "W1", "temperature": 0.0, "concurrency": 2, "oracle": 1.234567, "arms": {}}
    results.add(row, 3.14)

    again = Results(parse([*flags, "--concurrency", "2,4", "--budget-seconds", "9"]))
    points = points_of(parse([*flags, "--concurrency", "2,4"]))
    assert [point for point in points if not again.lacks(point)] == [Point("W1", 0.0, 2)]
    again.add({**row, "concurrency": 1}, 1.0)
    kept = json.loads(out.read_text())["points"]
    assert [(row["concurrency"], row["oracle"], row["seconds"]) for row in kept] == [
        (1, 1.2346, 1.0),
        (2, 1.2346, 3.1),
    ]
    for other in (["--repeats", "9"], ["--commit", "def"]):
        with pytest.raises(SystemExit, match="measured with another"):
            Results(parse([*flags, *other]))


def test_the_command_line_is_checked_before_a_model_is_loaded():
    out = ["--out", "x.json"]
    simulated = parse([*out, "--simulate-accept", "4"])
    assert (simulated.arms, simulated.workloads) == (["static", "off"], ["W1:0"])
    assert (simulated.prompt_tokens, simulated.output_tokens) == (128, 256)
    assert parse(out).lengths == []
    assert parse([*out, "--lengths"]).lengths == ["W1:0", "W1:1", "W2:0"]
    assert parse([*out, "--lengths", "W2:0.0"]).lengths == ["W2:0.0"]
    for wrong in (["--lengths", "W3:0"], ["--lengths", "--arms", "static"], ["--arms", "off", "static"]):
        with pytest.raises(SystemExit):
            parse([*out, *wrong])
    for wrong in (["--arms", "best"], ["--workloads", "W3:0"], ["--workloads", "W1"], ["--concurrency", "0"]):
        with pytest.raises(SystemExit):
            parse([*out, *wrong])
    with pytest.raises(SystemExit, match="more than 1024"):
        gpu_serving.read_prompts(parse([*out, "--workloads", "shipped:0", "--output-tokens", "1000"]))


def test_a_breakdown_is_made_once(tmp_path):
    flags = ["--out", str(tmp_path / "t.json"), "--breakdown", str(tmp_path)]
    with pytest.raises(SystemExit):
        parse(flags)
    options = parse([*flags, "--in-process", "--resume"])
    written = tmp_path / "step_breakdown.json"
    assert gpu_serving.lacks_breakdown(options)
    written.write_text('{"cells": []}')  # broken off
    assert gpu_serving.lacks_breakdown(options)
    written.write_text('{"cells": [], "bars": []}')
    assert not gpu_serving.lacks_breakdown(options)
    assert gpu_serving.lacks_breakdown(parse([*flags, "--in-process"]))
    assert not gpu_serving.lacks_breakdown(parse(flags[:2]))


def test_the_peers_prompts_have_all_the_same_length():
    assert cut_to([[1, 2], [3], [4, 5, 6]], 4) == [[1, 2, 3, 4], [3, 4, 5, 6], [4, 5, 6, 1]]


def test_the_summary_compares_with_the_best_fixed_length_and_the_peer(capsys):
    arms = {"static": {"ratio": 1.0, "decode_rate": 617.9}}
    arms["compact"] = {"ratio": 1.2, "decode_rate": 770.0}
    arms["off"] = {"ratio": 0.5, "decode_rate": 399.0}
    best = {"arm": "static:3", "ratio": 1.1}
    rows = [{"prompts": "W1", "temperature": 0.0, "concurrency": 1, "arms": arms, "best_fixed": best}]
    gpu_serving.show_summary(rows)
    gpu_serving.show_peer(rows)
    shown = capsys.readouterr().out
    assert "compact / static:3 1.100" in shown
    assert "c=1    static 617.9 / 617.9 = 1.000, off 399.0 / 199.5 = 2.000" in shown


def test_the_peers_draft_is_a_dflash_of_the_first_kind(tmp_path):
    values = json.loads((DEMO_MODELS["demo-dflash2"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(plain_config(values)))
    config, origin = DraftConfig.load(tmp_path), DraftConfig.load(DEMO_MODELS["demo-dflash2"])
    assert config.family == "dflash" and config.gamma == origin.gamma
    assert config.hidden_size == origin.hidden_size and config.target_layer_ids == origin.target_layer_ids


def test_the_page_says_what_was_recorded_on_the_gpu():
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    import performance_tables

    page = performance_tables.PAGE.read_text()
    assert performance_tables.filled(page) == page
    assert {name for name in performance_tables.TABLES if f"<!-- table: {name} -->" in page} == set(
        performance_tables.TABLES
    )


@pytest.mark.parametrize(("concurrency", "steps"), [(64, 0), (128, 8), (256, 8)])
def test_many_clients_settle_before_they_count(concurrency, steps, tmp_path):
    options = parse(["--out", str(tmp_path / "t.json")])
    point = gpu_serving.Point("W1", 0.0, concurrency)
    assert gpu_serving.Table(options, None, {"W1": [[1]]}).load(point, 0).settling_steps == steps


@pytest.mark.parametrize(("device", "rows"), [("cpu", 168), ("cuda", 176)])
def test_the_oracle_runs_on_the_engines_tiers(tmp_path, device, rows):
    costs = SpsCostTable(tuple(range(1, 400)), tuple(1000.0 / (4 + n) for n in range(1, 400)), 400)
    info = {
        "device": device,
        "speculative_cost_table_json": costs.to_json(),
        "speculative_num_draft_tokens": 8,
        "speculative_verify_tier_tokens": 8,
        "max_running_requests": 48,
    }
    table = gpu_serving.Table(parse(["--out", str(tmp_path / "t.json")]), SimpleNamespace(info=info), {})
    oracle = table._oracle(Point("W1", 0.0, 32), [[5] * 24 + [6] * 8])
    assert oracle == pytest.approx((4 + 256) / (4 + rows))
