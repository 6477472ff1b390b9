"""Bad input: a clear error in the route's own shape, naming field and limit, and the engine unharmed."""

from __future__ import annotations

import json
import socket
import time

import pytest

from fake_server import FakeServer
from tiny_models import VOCAB_SIZE, write_tokenizer

OPENAI = ("/v1/completions", "/v1/chat/completions")
CONTEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder):
    with FakeServer(folder) as server:  # no draft
        yield server


@pytest.fixture(autouse=True)
def _unharmed(server):
    yield
    response = server.client.post("/generate", json={"text": "ab", "sampling_params": {"max_new_tokens": 2}})
    assert response.json()["text"] == "ab"
    assert server.client.get("/health").status_code == 200


def body_for(path: str, **fields) -> dict:
    if path == "/v1/completions":
        return {"prompt": "ab", "max_tokens": 2, **fields}
    if path == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2, **fields}
    return {"text": "ab", "sampling_params": {"max_new_tokens": 2, **fields}}


def refused(response, path: str, status: int = 400) -> str:
    """The message, from the shape that belongs to the route."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    if path == "/generate":
        assert body.keys() == {"error"}
        return body["error"] if isinstance(body["error"], str) else body["error"]["message"]
    assert body.keys() == {"object", "message", "type", "param", "code", "error"}
    assert body["object"] == "error"
    assert body["code"] == status
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    assert body["error"]["message"] == body["message"]
    assert body["error"]["param"] == body["param"]
    return body["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*OPENAI, "/generate"])
@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("temperature", -1, "0"),
        ("top_p", 0, "0"),
        ("top_p", 1.5, "1"),
        ("repetition_penalty", 0, "greater than 0"),
        ("n", 0, "1"),
        ("n", 1000, "128"),
        ("stop", ["a", ""], "empty string"),
        ("logit_bias", {str(VOCAB_SIZE): 1}, str(VOCAB_SIZE - 1)),
        ("logit_bias", {"-1": 1}, "-1"),
        ("logit_bias", {"5": 1, "05": 2}, "05"),
        ("logit_bias", {"٣": 1}, "vocabulary"),
        ("stop_token_ids", [VOCAB_SIZE], str(VOCAB_SIZE)),
        ("stop_token_ids", [-1], "-1"),
        ("json_schema", '{"type": "BAD"}', "this is no json_schema"),
        ("json_schema", {"type": "BAD"}, "this is no json_schema"),
        ("json_schema", '{"type": ', "not valid JSON"),
        ("json_schema", "[1]", "must be a JSON schema"),
        ("json_schema", "1" * 200_000, "131072"),
        ("regex", "BAD", "this is no regex"),
        ("regex", 5, "string"),
        ("ebnf", "root ::= BAD", "this is no ebnf"),
        ("structural_tag", {"format": "BAD"}, "this is no structural_tag"),
        ("structural_tag", "[]", "JSON object"),
        ("structural_tag", {"structures": [{"begin": "a"}], "triggers": []}, "begin, schema and end"),
        ("structural_tag", {"structures": []}, "triggers"),
    ],
)
def test_sampling_values(server, path, name, value, word, stream):
    body = body_for(path, **{name: value})
    body["stream"] = stream
    message = refused(server.client.post(path, json=body), path)
    assert name in message
    assert word in message


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("value", [0, -1, 10**12, 10**30])
def test_openai_max_tokens(server, path, value):
    message = refused(server.client.post(path, json=body_for(path, max_tokens=value)), path)
    assert "max_tokens" in message
    if value == 10**12:
        assert str(CONTEXT) in message
        assert str(value) in message


@pytest.mark.parametrize("value", [-1, 10**12, 1.5, "7", True])
def test_native_max_new_tokens(server, value):
    response = server.client.post("/generate", json=body_for("/generate", max_new_tokens=value))
    assert "sampling_params.max_new_tokens" in refused(response, "/generate")


@pytest.mark.parametrize("path", [*OPENAI, "/generate"])
def test_min_tokens_above_max(server, path):
    name = "min_new_tokens" if path == "/generate" else "min_tokens"
    assert name in refused(server.client.post(path, json=body_for(path, **{name: 3})), path)


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [""]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [[1], []]}, "prompt[1]"),
        ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": [1.0]}, "prompt"),
        ("/v1/completions", {"prompt": [True]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], 2]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
        ("/v1/completions", {"prompt": [-1]}, "-1"),
        ("/v1/completions", {"prompt": [10**30]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/completions", {"prompt": "a", "speculation": {"mode": "static"}}, "--speculative-algorithm"),
        ("/v1/completions", {"prompt": "a", "rid": ["x", "y"]}, "rid"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "tools": [{}]}, "tools"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
        ),
        ("/generate", {"text": ""}, "text"),
        ("/generate", {"text": []}, "text"),
        ("/generate", {"text": ["a", ""]}, "text[1]"),
        ("/generate", {"text": 5}, "text"),
        ("/generate", {"text": [1]}, "text"),
        ("/generate", {}, "input_ids"),
        ("/generate", {"text": "a", "input_ids": [1]}, "input_ids"),
        ("/generate", {"input_ids": []}, "input_ids"),
        ("/generate", {"input_ids": [[]]}, "input_ids[0]"),
        ("/generate", {"input_ids": [[1], [2, [3]]]}, "input_ids[1]"),
        ("/generate", {"input_ids": [[1], 2]}, "input_ids[1]"),
        ("/generate", {"input_ids": [1, VOCAB_SIZE]}, str(VOCAB_SIZE - 1)),
        ("/generate", {"input_ids": [-1]}, "-1"),
        ("/generate", {"input_ids": ["1"]}, "input_ids"),
        ("/generate", {"input_ids": [2**63]}, "input_ids"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        ("/generate", {"text": ["a"], "sampling_params": [{"zzz": 1}]}, "sampling_params[0].zzz"),
        ("/generate", {"text": "a", "sampling_params": {"zzz": 1}}, "sampling_params.zzz"),
        ("/generate", {"text": "a", "sampling_params": 5}, "sampling_params"),
        ("/generate", {"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ("/generate", {"text": "a", "zzz": 1}, "zzz"),
        ("/generate", {"text": ["a"] * 100, "sampling_params": {"n": 100}}, "4096"),
    ],
)
def test_wrong_bodies(server, path, body, word):
    for stream in (False, True):
        if stream and "stream_options" in body:
            continue
        message = refused(server.client.post(path, json=body | {"stream": stream}), path)
        assert word in message, message


@pytest.mark.parametrize("path", [*OPENAI, "/generate"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"[1]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"a": 1,}',
        b"[" * 5000,
    ],
)
def test_what_is_not_json(server, path, content):
    headers = {"content-type": "application/json"}
    refused(server.client.post(path, content=content, headers=headers), path)


def test_content_type_of_openai_routes(server):
    content = json.dumps(body_for("/v1/completions")).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = server.client.post("/v1/completions", content=content, headers={"content-type": kind})
        assert "application/json" in refused(response, "/v1/completions")
    kind = "application/json; charset=utf-8"
    assert server.client.post("/v1/completions", content=content, headers={"content-type": kind}).is_success
    assert server.client.post("/generate", content=json.dumps(body_for("/generate"))).is_success


@pytest.mark.parametrize("path", [*OPENAI, "/generate"])
def test_ten_megabytes(server, path):
    content = json.dumps({"prompt": "a" * 10_000_000}).encode()
    headers = {"content-type": "application/json"}
    message = refused(server.client.post(path, content=content, headers=headers), path, 413)
    assert str(8 << 20) in message
    assert "--max-body-bytes" in message
    chunks = (content[i : i + 65536] for i in range(0, len(content), 65536))
    refused(server.client.post(path, content=chunks, headers=headers), path, 413)


def test_a_declared_length_is_refused_before_the_body_comes(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 1000
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_prompt_lengths_around_the_context(server, path):
    def post(num_prompt: int, num_new: int):
        if path == "/generate":
            body = {"input_ids": [70] * num_prompt, "sampling_params": {"max_new_tokens": num_new}}
        else:
            body = {"prompt": [70] * num_prompt, "max_tokens": num_new}
        return server.client.post(path, json=body)

    name = "max_new_tokens" if path == "/generate" else "max_tokens"
    assert post(CONTEXT - 1, 1).status_code == 200
    for num_prompt in (CONTEXT, CONTEXT + 1):
        message = refused(post(num_prompt, 1), path)
        assert str(num_prompt) in message
        assert f"{CONTEXT} tokens" in message
    assert post(100, CONTEXT - 100).status_code == 200
    message = refused(post(100, CONTEXT - 99), path)
    assert name in message
    for number in (100, CONTEXT - 99, CONTEXT):
        assert str(number) in message


def test_unknown_paths_and_methods(server):
    response = server.client.get("/no/such/path")
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
    assert server.client.get("/generate").status_code == 405
    assert server.client.get("/metrics").status_code == 404


def test_pool_smaller_than_the_context(folder):
    with FakeServer(folder, "--max-total-tokens", "64") as server:
        body = {"input_ids": [70] * 60, "sampling_params": {"max_new_tokens": 6}}
        message = refused(server.client.post("/generate", json=body), "/generate")
        for word in ("60", "6", "64", "--max-total-tokens"):
            assert word in message
        body = {"prompt": [70] * 65, "max_tokens": 1}
        message = refused(server.client.post("/v1/completions", json=body), "/v1/completions")
        assert "KV pool" in message
        assert server.client.get("/server_info").json()["max_req_input_len"] == 64
        for num_prompt in (60, 64):  # the last token of a request takes no place in the pool
            body = {"input_ids": [70] * num_prompt, "sampling_params": {"max_new_tokens": None}}
            info = server.client.post("/generate", json=body).json()["meta_info"]
            assert info["completion_tokens"] == 65 - num_prompt


def test_auto_truncate(folder):
    with FakeServer(folder, "--allow-auto-truncate") as server:
        for num_prompt, num_new, expected in ((300, 5, (255, 1)), (200, 500, (200, 56)), (10, 5, (10, 5))):
            body = {"input_ids": [70] * num_prompt, "sampling_params": {"max_new_tokens": num_new}}
            info = server.client.post("/generate", json=body).json()["meta_info"]
            assert (info["prompt_tokens"], info["completion_tokens"]) == expected


def test_without_a_chat_template(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    with FakeServer(tmp_path) as server:
        response = server.client.post("/v1/chat/completions", json=body_for("/v1/chat/completions"))
        assert "--chat-template" in refused(response, "/v1/chat/completions")


def test_full_queue(folder):
    flags = ("--max-running-requests", "1", "--max-queued-requests", "1")
    with FakeServer(folder, *flags) as server:
        slow = {"max_new_tokens": 200, "sampling_seed": -30}
        with server.client.stream(
            "POST", "/generate", json={"text": ["ab", "cd"], "sampling_params": slow, "stream": True}
        ) as response:
            chunks = response.iter_bytes()
            next(chunks)
            for path in ("/generate", "/v1/completions"):
                full = server.client.post(path, json=body_for(path))
                assert full.status_code == 503
                assert int(full.headers["retry-after"]) >= 1
                assert "--max-queued-requests 1" in full.text
        deadline = time.monotonic() + 3
        while server.client.post("/generate", json=body_for("/generate")).status_code != 200:
            assert time.monotonic() < deadline


def test_keys(folder):
    with FakeServer(folder, "--api-key", "user", "--admin-api-key", "admin") as server:
        post, body = server.client.post, body_for("/generate")
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic user"}):
            response = post("/generate", json=body, headers=given)
            assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
        user, admin = {"authorization": "bearer user"}, {"authorization": "Bearer admin"}
        assert post("/generate", json=body, headers=user).status_code == 200
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/v1/models").status_code == 401
        abort = {"abort_all": True}
        assert post("/abort_request", json=abort, headers=user).status_code == 401
        assert post("/abort_request", json=abort, headers=admin).status_code == 200
        info = server.client.get("/server_info", headers=user).text
        assert '"admin' not in info
        assert '"user"' not in info
