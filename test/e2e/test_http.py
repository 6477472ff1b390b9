"""The wire itself: frames byte for byte, cumulative `/generate` answers, statistics that add up, health, abort."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import CONTEXT, LONG, Server, check_statistics, frames, generate_body, poll
from flashspark.args import ServerArgs

GAMMA = 5  # of the tiny draft


@pytest.fixture(autouse=True)
def nothing_left_behind(server: Server) -> Iterator[None]:
    yield
    server.wait_idle()


def stream(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """All frames of a stream, headers asserted."""
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    return frames(response.content)


def test_frames_are_bytes_as_promised(server: Server) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "temperature": 0, "stream": True}
    body |= {"logit_bias": {"71": 10000}, "stream_options": {"include_usage": True}}
    response = server.http.post("/v1/completions", json=body)
    *content, usage, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    first = json.loads(content[0].removeprefix(b"data: "))
    call_id, created = first["id"], first["created"]
    letter = server.http.post("/detokenize", json={"tokens": [71]}).json()["text"]

    def frame(text: str, finish: str | None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        envelope = {"id": call_id, "object": "text_completion", "created": created, "model": "tiny"}
        return (
            b"data: "
            + json.dumps({**envelope, "choices": [choice], "usage": None}, separators=(",", ":")).encode()
        )

    texts = [json.loads(part.removeprefix(b"data: "))["choices"][0]["text"] for part in content]
    assert "".join(texts) == letter * 3
    ends = [None] * (len(content) - 1) + ["length"]
    assert content == [frame(text, end) for text, end in zip(texts, ends, strict=True)]
    last = json.loads(usage.removeprefix(b"data: "))
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (1, 3)


def test_generate_frames_are_cumulative(server: Server) -> None:
    whole = server.generate("Once", max_new_tokens=40, ignore_eos=True)
    got = stream(server, "/generate", generate_body("Once", max_new_tokens=40, ignore_eos=True, stream=True))
    for before, after in pairwise(got):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert len(after["output_ids"]) > len(before["output_ids"])
    assert [frame["meta_info"]["finish_reason"] for frame in got[:-1]] == [None] * (len(got) - 1)
    assert all(frame["meta_info"]["completion_tokens"] == len(frame["output_ids"]) for frame in got)
    assert all("spec_verify_ct" not in frame["meta_info"] for frame in got[:-1])
    assert got[-1]["text"] == whole["text"]
    assert got[-1]["output_ids"] == whole["output_ids"]
    assert got[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert "index" not in got[-1]


def test_batch_times_n_is_prompt_major(server: Server) -> None:
    texts = ["alpha", "beta", "gamma ray"]
    sampling = {"n": 2, "max_new_tokens": 12, "temperature": 1, "sampling_seed": 3, "ignore_eos": True}
    body = {"text": texts, "sampling_params": sampling, "rid": "batch"}
    whole = server.http.post("/generate", json=body).json()
    ids = [answer["meta_info"]["id"] for answer in whole]
    assert ids == [f"batch_{i}_{j}" for i in range(3) for j in range(2)]
    assert [a["meta_info"]["prompt_tokens"] for a in whole] == [len(text) for text in texts for _ in "ab"]
    assert len({tuple(answer["output_ids"]) for answer in whole}) == 6
    last: dict[int, Any] = {}
    for frame in stream(server, "/generate", body | {"stream": True}):
        assert (
            last.get(frame["index"], {"meta_info": {"finish_reason": None}})["meta_info"]["finish_reason"]
            is None
        ), "a finished answer spoke again"
        last[frame["index"]] = frame
    assert sorted(last) == list(range(6))
    assert [last[i]["output_ids"] for i in range(6)] == [answer["output_ids"] for answer in whole]
    assert [last[i]["meta_info"]["id"] for i in range(6)] == ids


def test_one_choice_of_n_equals_its_single_twin(server: Server) -> None:
    """Choice 0 of n = 3 is what n = 1 gives: the choice index enters the draws, not the batch."""
    options = {"max_new_tokens": 16, "temperature": 1, "sampling_seed": 11, "ignore_eos": True}
    three = server.generate("seeded", n=3, **options)
    assert three[0]["output_ids"] == server.generate("seeded", **options)["output_ids"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_statistics_add_up(server: Server, temperature: float) -> None:
    for i in range(6):
        answer = server.generate(f"prompt {i}", max_new_tokens=60, temperature=temperature, sampling_seed=i)
        meta = answer["meta_info"]
        check_statistics(meta, len(answer["output_ids"]))
        assert len(meta["spec_correct_drafts_histogram"]) == GAMMA + 1
        assert meta["speculation"] == {"mode": "static"}
        assert meta["num_retractions"] == 0
        assert meta["e2e_latency"] > 0


def test_speculation_off_takes_a_step_per_token_and_says_the_same(server: Server) -> None:
    on = server.generate("same text", max_new_tokens=50)
    before = server.wait_idle()
    off = server.generate("same text", max_new_tokens=50, speculation={"mode": "off"})
    after = server.wait_idle()
    assert off["output_ids"] == on["output_ids"]
    assert off["text"] == on["text"]
    assert after["verify_steps"] - before["verify_steps"] == len(off["output_ids"])
    assert off["meta_info"]["speculation"] == {"mode": "off"}
    check_statistics(off["meta_info"], len(off["output_ids"]))


def test_totals_in_server_info(server: Server) -> None:
    before = server.wait_idle()
    answers = [server.generate(f"total {i}", max_new_tokens=20) for i in range(4)]
    after = server.wait_idle()
    grown = {
        name: after[name] - before[name] for name in ("finished", "aborted", "output_tokens", "verify_steps")
    }
    assert grown == {
        "finished": 4,
        "aborted": 0,
        "output_tokens": sum(len(answer["output_ids"]) for answer in answers),
        "verify_steps": sum(answer["meta_info"]["spec_verify_ct"] for answer in answers),
    }


def test_zero_tokens_is_an_empty_answer(server: Server) -> None:
    answer = server.generate("nothing", max_new_tokens=0)
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_health_and_information(server: Server, tiny_pair: Any) -> None:
    for path in ("/health", "/health_generate"):
        response = server.http.get(path)
        assert (response.status_code, response.content) == (200, b"")
    info = server.http.get("/get_model_info").json()
    assert info["model_path"] == str(tiny_pair[0])
    assert (info["is_generation"], info["model_type"], info["architectures"]) == (
        *(True, "qwen3"),
        ["Qwen3ForCausalLM"],
    )
    assert info == server.http.get("/model_info").json()
    body = server.http.get("/server_info").json()
    assert (body["status"], body["context_length"], body["tp_size"]) == ("ready", CONTEXT, 1)
    assert body["speculative_algorithm"] == "DFLASH"
    assert (body["timeout_keep_alive"], body["health_check_timeout"]) == (5, 20)
    assert body["speculative_num_draft_tokens"] == GAMMA + 1
    assert body["max_total_num_tokens"] == 16 * CONTEXT
    flags = set(ServerArgs(model_path="x").to_dict()) - {"api_key", "admin_api_key"}
    assert flags <= body.keys()
    assert "api_key" not in body
    poll("no load", lambda: server.http.get("/get_load").json()[0]["num_reqs"] == 0)
    assert server.http.get("/get_load").json()[0]["num_waiting_reqs"] == 0
    missing = server.http.get("/no/such/path")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("how", ["rid", "prefix", "all"])
def test_abort_while_streaming(server: Server, how: str) -> None:
    before = server.wait_idle()["aborted"]
    body = generate_body("endless", max_new_tokens=LONG, ignore_eos=True, stream=True, rid="job-17")
    order = {"rid": {"rid": "job-17"}, "prefix": {"rid": "job-"}, "all": {"abort_all": True}}[how]
    raw = b""
    with server.http.stream("POST", "/generate", json=body) as response:
        for chunk in response.iter_raw():
            if not raw:
                assert server_abort(server, {"rid": "other"}) == 200
                assert server_abort(server, order | {"abort_message": "enough"}) == 200
            raw += chunk
    got = frames(raw)
    last = got[-1]
    reason = last["meta_info"]["finish_reason"]
    assert (reason["type"], reason["message"]) == ("abort", "enough")
    assert 0 < len(last["output_ids"]) < LONG
    assert last["output_ids"][: len(got[0]["output_ids"])] == got[0]["output_ids"]
    assert server.wait_idle()["aborted"] == before + 1


def server_abort(server: Server, body: dict[str, Any]) -> int:
    """On a connection of its own, since the first is busy streaming."""
    return httpx.post(f"{server.url}/abort_request", json=body, trust_env=False).status_code


def test_abort_of_a_whole_answer_keeps_the_partial_text(server: Server) -> None:
    body = generate_body("endless", max_new_tokens=LONG, ignore_eos=True, rid="whole")
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.http.post("/generate", json=body)))
    thread.start()
    server_state = server.wait_running(1)
    assert server_state["num_free_rows"] == server_state["max_running_requests"] - 1
    assert server_abort(server, {"rid": "whole"}) == 200
    thread.join(30)
    (answer,) = answers
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer.json()["output_ids"]) < LONG


def test_a_request_id_in_flight_is_taken(server: Server) -> None:
    body = generate_body("endless", max_new_tokens=LONG, ignore_eos=True, stream=True, rid="mine")
    with server.http.stream("POST", "/generate", json=body) as response:
        chunks = response.iter_raw()  # dropping the iterator would hang up
        next(chunks)
        again = httpx.post(
            f"{server.url}/generate", json=generate_body("x", rid="mine"), trust_env=False, timeout=60
        )
        assert again.status_code == 400
        assert "'mine' is in use" in again.json()["error"]["message"]
        server_abort(server, {"rid": "mine"})
    server.wait_idle()
    assert server.generate("x", rid="mine", max_new_tokens=3)["meta_info"]["id"] == "mine"


def test_stop_trimming_on_generate(server: Server) -> None:
    whole = server.generate("stop here", max_new_tokens=60, ignore_eos=True)["text"]
    stop = next(whole[i : i + 2] for i in range(10, 50) if whole.index(whole[i : i + 2]) == i)
    cut = server.generate("stop here", max_new_tokens=60, ignore_eos=True, stop=stop)
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = server.generate("stop here", max_new_tokens=60, ignore_eos=True, stop=[stop], no_stop_trim=True)
    assert kept["text"] == whole[: whole.index(stop) + 2]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_grammar_of_which_the_request_suppresses_what_is_left(server: Server, temperature: float) -> None:
    """At once or later, whole or streamed, it is a 400; where the grammar is matched it is an end like others."""
    first = server.http.post("/tokenize", json={"prompt": "🎉", "add_special_tokens": False}).json()[
        "tokens"
    ][0]
    options = {
        "stop_token_ids": [first],
        "min_new_tokens": 12,
        "max_new_tokens": 20,
        "temperature": temperature,
    }
    for regex in ("🎉", "xxxxxxx🎉"):
        body = generate_body("a", regex=regex, **options)
        refused = server.http.post("/generate", json=body)
        error = refused.json()["error"]
        assert refused.status_code == 400
        assert "sampling_params.regex: " in error["message"] and "min_new_tokens" in error["message"]
        if regex == "🎉":
            assert server.http.post("/generate", json=body | {"stream": True}).json()["error"] == error
        else:
            *before, last = stream(server, "/generate", body | {"stream": True})
            assert (last["error"]["code"], last["error"]["message"]) == (400, error["message"])
            assert before and "xxxxxxx".startswith(before[-1]["text"])
    fields = {"model": "tiny", "prompt": "a", "regex": "🎉", "stop_token_ids": [first], "min_tokens": 1}
    answer = server.http.post("/v1/completions", json=fields)
    assert (answer.status_code, answer.json()["param"]) == (400, "regex")
    assert "min_tokens" in answer.json()["message"]
    # Without the minimum it may end there, and where the grammar is matched the minimum gives way.
    ended = server.generate("a", regex="🎉", **options | {"min_new_tokens": 0})["meta_info"]["finish_reason"]
    assert ended == {"type": "stop", "matched": first}
    answer = server.generate("a", regex="xxxxxxx(🎉)?", **options)
    assert (answer["text"], answer["meta_info"]["finish_reason"]["type"]) == ("xxxxxxx", "stop")


def test_frames_of_fewer_tokens_on_request(server: Server) -> None:
    body = generate_body("every ten", max_new_tokens=45, ignore_eos=True, stream=True, stream_interval=10)
    counts = [len(frame["output_ids"]) for frame in stream(server, "/generate", body)]
    assert all(after - before >= 10 for before, after in pairwise([0, *counts[:-1]]))
    assert counts[-1] == 45


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_go_on(server: Server, mode: str) -> None:
    """Nothing moves meanwhile, and the answer is what it would have been."""
    options = {"max_new_tokens": 300, "ignore_eos": True}
    expected = server.generate("to be continued", **options)["output_ids"]
    before = server.wait_idle()["num_retractions"]
    body = generate_body("to be continued", **options, stream=True)
    with (
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as operator,
        server.http.stream("POST", "/generate", json=body) as response,
    ):
        chunks = response.iter_raw()
        raw = next(chunks)
        answer = operator.post("/pause_generation", json={"mode": mode})
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        (paused,) = operator.get("/server_info").json()["internal_states"]
        assert operator.get("/ready").status_code == operator.get("/health_generate").status_code == 503
        assert operator.get("/health").status_code == 200
        (later,) = operator.get("/server_info").json()["internal_states"]
        assert later["num_steps"] == paused["num_steps"]
        assert operator.post("/continue_generation").json()["status"] == "ok"
        assert operator.get("/ready").status_code == 200
        raw += b"".join(chunks)
    assert frames(raw)[-1]["output_ids"] == expected
    retracted = server.wait_idle()["num_retractions"] - before
    assert retracted == (paused["num_queue_reqs"] if mode == "retract" else 0)


def test_pause_ends_what_runs_by_default(server: Server) -> None:
    body = generate_body("endless", max_new_tokens=LONG, ignore_eos=True, stream=True)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as operator:
        with server.http.stream("POST", "/generate", json=body) as response:
            chunks = response.iter_raw()
            raw = next(chunks)
            assert operator.post("/pause_generation").status_code == 200
            raw += b"".join(chunks)
        reason = frames(raw)[-1]["meta_info"]["finish_reason"]
        assert (reason["type"], reason["message"]) == ("abort", "aborted by /pause_generation")
        assert operator.post("/continue_generation", json={}).status_code == 200


def test_a_trace_of_the_steps(server: Server, tmp_path: Path) -> None:
    assert server.http.post("/stop_profile").status_code == 400
    options = {"output_dir": str(tmp_path / "traces"), "num_steps": "3", "activities": ["CPU", "GPU"]}
    body = options | {
        "profile_by_stage": False,
        "profile_stages": None,
        "profile_prefix": "p",
        "start_step": None,
    }
    assert server.http.post("/start_profile", json=body).text == "Start profiling.\n"
    again = server.http.post("/start_profile")
    assert (again.status_code, "/stop_profile" in again.text) == (400, True)
    server.generate("traced", max_new_tokens=20, ignore_eos=True)
    (trace,) = poll("a trace", lambda: list((tmp_path / "traces").glob("p-*-TP-0.trace.json.gz")))
    poll("the trace is written", lambda: f"written to {trace}" in server.log)
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any(name.startswith("aten::") for name in names if name)
    assert server.http.post("/start_profile", json={"activities": ["TPU"]}).status_code == 400
    unwritable = server.http.post("/start_profile", json={"output_dir": "/proc/nowhere"})
    assert (unwritable.status_code, "output_dir" in unwritable.text) == (400, True)
    assert server.http.post("/start_profile", json={"output_dir": str(tmp_path / "more")}).status_code == 200
    server.generate("traced", max_new_tokens=4, ignore_eos=True)
    assert server.http.get("/stop_profile").text == "Stop profiling.\n"
    assert len(list((tmp_path / "more").iterdir())) == 1


def test_loads(server: Server) -> None:
    server.generate("load", max_new_tokens=4, ignore_eos=True)
    body = server.http.get("/v1/loads").json()
    assert (body["accelerator"], body["num_accelerators"]) == ("cpu", 0)
    (load,) = body["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    assert (load["max_total_num_tokens"], load["max_running_requests"]) == (16 * CONTEXT, 16)
    assert load["memory"]["token_capacity"] == 16 * CONTEXT
    assert load["speculative"]["accept_length"] >= 1


def test_what_start_up_left_is_out_of_the_garbage_collectors_sight(server: Server) -> None:
    """In both processes: a full pass over it takes a tenth of a second, in the middle of serving."""
    lines = re.findall(r"garbage collector: (\d+) objects of the start-up are frozen", server.log)
    assert len(lines) == 2 and min(map(int, lines)) > 30_000
