"""`/generate`: batches, cumulative frames, meta_info, ids, aborts and clients that go away."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise

import pytest

from fake_server import FakeServer
from flashspark.text import TextTokenizer
from tiny_models import write_tokenizer

DRAFT = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "none")
SLOW = {"max_new_tokens": 200, "sampling_seed": -30, "ignore_eos": True}  # 30 ms a step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder):
    with FakeServer(folder, *DRAFT, "--max-running-requests", "8") as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(folder):
    return TextTokenizer.load(folder)


def generate(server, sampling=None, **body):
    response = server.client.post("/generate", json={"sampling_params": sampling or {}, **body})
    assert response.status_code == 200, response.text
    return response


def frames(response) -> list:
    *events, rest = response.content.split(b"\n\n")
    assert rest == b""
    assert events[-1] == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]


def wait_until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def idle(server) -> bool:
    return server.state["num_running_reqs"] == 0


def test_one(server, tokenizer):
    body = generate(server, {"max_new_tokens": 6}, text="abcd", return_prompt_token_ids=True).json()
    assert body["text"] == "abcdab"
    assert body["output_ids"] == tokenizer.encode("abcdab")
    assert body["prompt_token_ids"] == tokenizer.encode("abcd")
    info = body["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 6}
    assert (info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == (4, 6, 0)
    assert (info["reasoning_tokens"], info["num_retractions"], info["weight_version"]) == (0, 0, "default")
    assert info["spec_verify_ct"] == 2
    assert info["spec_accept_length"] == 3
    assert (info["spec_num_correct_drafts"], info["spec_num_proposed_drafts"]) == (4, 6)
    assert info["spec_accept_rate"] == pytest.approx(4 / 6)
    assert info["spec_correct_drafts_histogram"] == info["spec_accept_histogram"] == [0, 1, 0, 1]
    assert (info["spec_accepted_drafts"], info["spec_proposed_drafts"]) == (4, 6)
    assert info["spec_num_verified_drafts"] == 6
    assert info["e2e_latency"] > 0
    assert info["speculation"] == {"mode": "static"}


def test_put_and_speculation_off(server):
    body = {"text": "abcd", "sampling_params": {"max_new_tokens": 3}, "speculation": {"mode": "off"}}
    info = server.client.put("/generate", json=body).json()["meta_info"]
    assert info["speculation"] == {"mode": "off"}
    assert not any(key.startswith("spec_") for key in info)


def test_batches_keep_their_order(server, tokenizer):
    bodies = generate(server, {"max_new_tokens": 2}, text=["ab", "cd", "ef"]).json()
    assert [body["text"] for body in bodies] == ["ab", "cd", "ef"]
    ids = [tokenizer.encode(text) for text in ("ab", "cd")]
    bodies = generate(server, {"max_new_tokens": 2, "n": 2}, input_ids=ids).json()
    assert [body["text"] for body in bodies] == ["ab", "ab", "cd", "cd"]
    assert len({body["meta_info"]["id"] for body in bodies}) == 4
    bodies = generate(server, [{"max_new_tokens": 1}, {"max_new_tokens": 2}], text=["ab", "cd"]).json()
    assert [body["text"] for body in bodies] == ["a", "cd"]
    assert generate(server, {"max_new_tokens": 2}, input_ids=ids[0]).json()["text"] == "ab"
    assert len(generate(server, {"max_new_tokens": 2, "n": 2}, text="ab").json()) == 2
    assert len(generate(server, {"max_new_tokens": 2}, text=["ab"]).json()) == 1


def test_frames_are_cumulative(server):
    bodies = frames(generate(server, {"max_new_tokens": 10, "sampling_seed": -5}, text="abcdef", stream=True))
    lens = [len(body["output_ids"]) for body in bodies]
    # Blocks of 4, 4 and 2; a slow reader gets several in one frame.
    assert set(lens) <= {4, 8, 10}
    assert lens == sorted(set(lens))
    assert lens[-1] == 10
    assert [body["text"] for body in bodies] == ["abcdefabcd"[:n] for n in lens]
    assert [body["meta_info"]["completion_tokens"] for body in bodies] == lens
    reasons = [body["meta_info"]["finish_reason"] for body in bodies]
    assert reasons == [None] * (len(bodies) - 1) + [{"type": "length", "length": 10}]
    assert not any("spec_verify_ct" in body["meta_info"] for body in bodies[:-1])
    assert bodies[-1]["meta_info"]["spec_verify_ct"] == 3
    assert not any("index" in body for body in bodies)


def test_batched_frames_have_an_index(server):
    sampling = {"max_new_tokens": 8, "sampling_seed": -3}
    last: dict[int, str] = {}
    for body in frames(generate(server, sampling, text=["ab", "cd"], stream=True)):
        assert body["text"].startswith(last.get(body["index"], ""))
        last[body["index"]] = body["text"]
    assert last == {0: "abababab", 1: "cdcdcdcd"}
    bodies = frames(generate(server, sampling | {"n": 2}, text="ab", stream=True))
    assert {body["index"] for body in bodies} == {0, 1}


def test_stream_interval(server):
    sampling = {"max_new_tokens": 20, "sampling_seed": -3, "stream_interval": 8}
    bodies = frames(generate(server, sampling, text="abcd", stream=True))
    lens = [len(body["output_ids"]) for body in bodies]
    # Steps of four, and a slow reader gets several frames in one.
    assert all(b - a >= 8 and b % 4 == 0 for a, b in pairwise([0, *lens[:-1]]))
    assert lens[-1] == 20


def test_stop_strings_are_held_back_in_frames(server):
    sampling = {"max_new_tokens": 30, "sampling_seed": -3, "stop": ["ldhel"]}
    bodies = frames(generate(server, sampling, text="hello world", stream=True))
    assert bodies[-1]["text"] == "hello wor"
    assert bodies[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ldhel"}
    assert all("hello wor".startswith(body["text"]) for body in bodies)


def test_no_tokens_asked_for(server):
    body = generate(server, {"max_new_tokens": 0}, text="abc").json()
    assert (body["text"], body["output_ids"]) == ("", [])
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    bodies = frames(generate(server, {"max_new_tokens": 0}, text="abc", stream=True))
    assert len(bodies) == 1
    mixed = generate(server, [{"max_new_tokens": 0}, {"max_new_tokens": 2}], text=["ab", "cd"]).json()
    assert [body["text"] for body in mixed] == ["", "cd"]


def test_null_means_to_the_context_end(server):
    body = generate(server, {"max_new_tokens": None, "ignore_eos": True}, text="abcd").json()
    assert body["meta_info"]["completion_tokens"] == 252
    assert len(generate(server, {}, text="ab").json()["output_ids"]) == 128


def test_ids_of_the_client(server):
    assert generate(server, {"max_new_tokens": 1}, text="a", rid="mine").json()["meta_info"]["id"] == "mine"
    bodies = generate(server, {"max_new_tokens": 1}, text=["a", "b"], rid="mine").json()
    assert [body["meta_info"]["id"] for body in bodies] == ["mine_0", "mine_1"]
    bodies = generate(server, {"max_new_tokens": 1}, text=["a", "b"], rid=["x", "y"]).json()
    assert [body["meta_info"]["id"] for body in bodies] == ["x", "y"]
    for rid in (["x"], ["x", "x"], "", ["x", ""]):
        response = server.client.post("/generate", json={"text": ["a", "b"], "rid": rid})
        assert response.status_code == 400
        assert "rid" in response.text


def in_background(server, body) -> tuple[threading.Thread, list]:
    answers: list = []
    thread = threading.Thread(target=lambda: answers.append(server.client.post("/generate", json=body)))
    thread.start()
    wait_until(lambda: server.state["num_running_reqs"] > 0)
    return thread, answers


def test_abort_by_id_gives_the_partial_text(server):
    thread, answers = in_background(server, {"text": "abc", "sampling_params": SLOW, "rid": "job-1"})
    duplicate = server.client.post("/generate", json={"text": "a", "rid": "job-1"})
    assert duplicate.status_code == 400
    assert "job-1" in duplicate.json()["error"]["message"]
    assert server.client.post("/abort_request", json={"rid": "other"}).status_code == 200
    time.sleep(0.1)
    response = server.client.post("/abort_request", json={"rid": "job"})  # by prefix
    assert (response.status_code, response.content) == (200, b"")
    thread.join(5)
    (answer,) = answers
    assert answer.status_code == 200
    reason = answer.json()["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert "abort" in reason["message"]
    assert ("abc" * 70).startswith(answer.json()["text"])
    assert idle(server)
    assert generate(server, {"max_new_tokens": 1}, text="a", rid="job-1").json()["text"] == "a"


def test_abort_all(server):
    thread, answers = in_background(server, {"text": ["ab", "cd"], "sampling_params": SLOW})
    assert server.client.post("/abort_request", json={"abort_all": True}).status_code == 200
    thread.join(5)
    assert [body["meta_info"]["finish_reason"]["type"] for body in answers[0].json()] == ["abort"] * 2
    for body in ({}, {"rid": ""}, {"rid": 5}, {"all": True}):
        assert server.client.post("/abort_request", json=body).status_code == 400


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots(server, path, stream):
    before = server.state["num_aborted"]
    if path == "/generate":
        body = {"text": ["ab", "cd"], "sampling_params": SLOW, "stream": stream, "rid": "gone"}
    else:
        sampling = {"max_tokens": 200, "seed": -30, "ignore_eos": True}
        body = {"prompt": ["ab", "cd"], **sampling, "stream": stream, "rid": "gone"}
    if stream:
        with server.client.stream("POST", path, json=body) as response:
            chunks = response.iter_bytes()
            next(chunks)
            assert not idle(server)
    else:
        with pytest.raises(Exception, match="timed out"):
            server.client.post(path, json=body, timeout=0.2)
    wait_until(lambda: idle(server), 1.0)
    assert server.state["num_aborted"] == before + 2
    # The id is free again, and nothing of the old request reaches a new one.
    wait_until(lambda: server.client.get("/server_info").json()["num_requests_in_flight"] == 0, 1.0)
    bodies = generate(server, {"max_new_tokens": 2}, text=["xy", "zw"], rid="gone").json()
    assert [answer["text"] for answer in bodies] == ["xy", "zw"]


def test_a_queued_client_that_goes_away(server):
    thread, answers = in_background(server, {"text": ["ab"] * 8, "sampling_params": SLOW})
    with pytest.raises(Exception, match="timed out"):
        server.client.post("/generate", json={"text": "q", "sampling_params": SLOW}, timeout=0.2)
    wait_until(lambda: server.state["num_running_reqs"] == 8, 1.0)
    server.client.post("/abort_request", json={"abort_all": True})
    thread.join(5)
    assert len(answers[0].json()) == 8


def test_one_failing_request_fails_alone(server):
    good, bad = {"max_new_tokens": 2}, {"max_new_tokens": 2, "sampling_seed": -1004}
    for stream in (False, True):
        response = server.client.post(
            "/generate", json={"text": "a", "sampling_params": bad, "stream": stream}
        )
        assert response.status_code == 500
        assert response.json()["object"] == "error"
        assert "alone" in response.json()["message"]
    assert generate(server, good, text="ab").json()["text"] == "ab"


def test_long_texts_do_not_stop_the_loop(server):
    text = "a long text " * 400_000  # 4.8 MB
    answers: list = []
    thread = threading.Thread(
        target=lambda: answers.append(server.client.post("/generate", json={"text": text}))
    )
    thread.start()
    num_answers = 0
    while thread.is_alive():
        assert server.client.get("/health").status_code == 200
        num_answers += 1
        time.sleep(0.01)
    thread.join()
    assert answers[0].status_code == 400
    assert "4800000 tokens" in answers[0].text
    assert num_answers >= 5  # a blocked loop would have answered once, afterwards


def test_server_information(server, folder):
    info = server.client.get("/get_server_info").json()
    assert info["speculative_algorithm"] == "DFLASH"
    assert info["speculative_num_draft_tokens"] == 4
    assert info["status"] == "ready"
    assert info["max_req_input_len"] == 255
    assert "api_key" not in info
    (internal,) = info["internal_states"]
    assert internal["effective_max_running_requests_per_dp"] == 8
    model = server.client.get("/get_model_info").json()
    assert model == server.client.get("/model_info").json()
    assert model["tokenizer_path"] == model["model_path"] == str(folder)
    (load,) = server.client.get("/get_load").json()
    assert load["num_reqs"] == 0


def test_liveness(server):
    for path in ("/health", "/health_generate", "/ping", "/ready", "/", "/flush_cache"):
        assert server.client.get(path).status_code == 200
    assert server.client.head("/").status_code == 200
    for path in ("/health", "/ping", "/ready"):
        assert server.client.head(path).status_code == 200
    before = time.monotonic()
    server.client.get("/health")
    assert time.monotonic() - before < 0.5


def test_request_ids_are_echoed(server):
    given = {"x-request-id": "proxy-7"}
    assert server.client.get("/health", headers=given).headers["x-request-id"] == "proxy-7"
    response = server.client.post("/generate", json={"text": ""}, headers=given)
    assert response.headers["x-request-id"] == "proxy-7"
    assert len(server.client.get("/health").headers["x-request-id"]) == 32
    assert "abc" not in server.log  # no prompt text


def test_openapi_document(server):
    document = server.client.get("/openapi.json").json()
    body = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["additionalProperties"] is False
    assert {"text", "input_ids", "sampling_params"} <= body["properties"].keys()
    assert "$ref" not in json.dumps(document)
