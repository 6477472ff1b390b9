"""The bad-input list, live: each is refused in the shape of its route, naming the field, and harms nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.server import CONTEXT, Server, frames

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
every_route = pytest.mark.parametrize("route", ROUTES)
INT64 = 2**63


@pytest.fixture(autouse=True)
def engine_unharmed(server: Server) -> Iterator[None]:
    """Whatever a test sends, nothing of it stays, no counter of aborts moves, and a good request works."""
    before = server.wait_idle()
    yield
    assert server.wait_idle()["aborted"] == before["aborted"]
    assert len(server.generate("good", max_new_tokens=4, ignore_eos=True)["output_ids"]) == 4
    assert server.health() == 200
    assert "Traceback" not in server.log


def body_of(route: str, prompt: Any = "x", **fields: Any) -> dict[str, Any]:
    """A body of `route`; fields are given by their OpenAI names."""
    if route == "/generate":
        renamed = {"max_tokens": "max_new_tokens"}
        return {"text": prompt, "sampling_params": {renamed.get(k, k): v for k, v in fields.items()}}
    if route == "/v1/completions":
        return {"model": "tiny", "prompt": prompt, **fields}
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}


def field_name(route: str, name: str) -> str:
    """What the route calls a field in its messages."""
    if route == "/generate":
        return "sampling_params." + ("max_new_tokens" if name == "max_tokens" else name)
    return name


def post(server: Server, route: str, body: Any) -> Any:
    """Posts JSON as Python writes it, NaN and Infinity included."""
    return server.http.post(
        route, content=json.dumps(body), headers={"content-type": "application/json; charset=utf-8"}
    )


def refusal(server: Server, route: str, body: dict[str, Any], status: int = 400) -> tuple[str, str | None]:
    """Asserts the refusal, streamed and not, in the route's shape; returns message and param."""
    for stream in (True, False):
        response = post(server, route, body | {"stream": stream})
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        answer = response.json()
        if route == "/generate":
            assert answer.keys() == {"error"}
    if route == "/generate":
        error = answer["error"]
        return (error if isinstance(error, str) else error["message"]), None
    assert (answer["object"], answer["code"]) == ("error", status)
    assert answer["error"]["message"] == answer["message"]
    assert answer["error"]["param"] == answer["param"]
    assert isinstance(answer["error"]["code"], str)
    return answer["message"], answer["param"]


WRONG_VALUES: list[tuple[str, Any, str]] = [
    ("max_tokens", -1, "greater than or equal"),
    ("max_tokens", CONTEXT, str(CONTEXT)),
    ("max_tokens", 10**12, str(CONTEXT)),
    ("max_tokens", INT64, ""),
    ("max_tokens", 10**30, ""),
    ("max_tokens", 1.5, "whole number"),
    ("max_tokens", "5", "whole number"),
    ("temperature", -1, "0"),
    ("temperature", float("nan"), ""),
    ("temperature", float("inf"), ""),
    ("temperature", "hot", "number"),
    ("top_p", 0, "0"),
    ("top_p", 1.01, "1"),
    ("top_p", -0.5, "0"),
    ("top_k", 0, "-1"),
    ("top_k", -2, "-1"),
    ("min_p", 1.5, "1"),
    ("repetition_penalty", 0, "0"),
    ("repetition_penalty", 3, "2"),
    ("frequency_penalty", 2.5, "2"),
    ("n", 0, "1"),
    ("n", -1, "1"),
    ("n", 1000, "128"),
    ("stop", [""], "empty"),
    ("stop", ["a", ""], "empty"),
    ("stop", "", "empty"),
    ("stop", [1], "string"),
    ("stop", ["x"] * 33, "32"),
    ("stop_token_ids", [10**6], "259"),
    ("logit_bias", {"x": 1}, "token id"),
    ("logit_bias", {"5": 1e9}, "10000"),
    ("no_such_field", 1, "unknown field"),
]


@every_route
@pytest.mark.parametrize(("name", "value", "says"), WRONG_VALUES, ids=lambda value: repr(value)[:24])
def test_wrong_value(server: Server, route: str, name: str, value: Any, says: str) -> None:
    if (isinstance(value, float) and value != value) or value == float("inf"):
        message, _ = refusal(server, route, body_of(route, **{name: value}))
        assert "JSON" in message  # not a number in JSON: the parser says where
        return
    message, param = refusal(server, route, body_of(route, **{name: value}))
    assert field_name(route, name) in message
    assert says in message
    if param is not None:
        assert param.split("[")[0].split(".")[0] == name


@pytest.mark.parametrize("route", ROUTES[1:])
def test_max_tokens_0(server: Server, route: str) -> None:
    """OpenAI's API wants at least one; `/generate` answers with nothing."""
    message, param = refusal(server, route, body_of(route, max_tokens=0))
    assert (param, "1" in message) == ("max_tokens", True)
    assert server.generate("x", max_new_tokens=0)["output_ids"] == []


WRONG_PROMPTS: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": ""}, "text"),
    ("/generate", {"text": 5}, "text"),
    ("/generate", {"text": ["a", ""]}, "text[1]"),
    ("/generate", {"text": []}, "text"),
    ("/generate", {"text": ["a", 5]}, "text"),
    ("/generate", {}, "text"),
    ("/generate", {"text": "a", "input_ids": [5]}, "input_ids"),
    ("/generate", {"input_ids": []}, "input_ids"),
    ("/generate", {"input_ids": [5, []]}, "input_ids"),
    ("/generate", {"input_ids": [260]}, "input_ids"),
    ("/generate", {"input_ids": [-1]}, "input_ids"),
    ("/generate", {"input_ids": [1.5]}, "input_ids"),
    ("/generate", {"input_ids": [True]}, "input_ids"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": 5}, "prompt"),
    ("/v1/completions", {"prompt": {}}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1]"),
    ("/v1/completions", {"prompt": ["a", 5]}, "prompt"),
    ("/v1/completions", {"prompt": [[5], []]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [260]}, "prompt"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, "messages"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
]


@pytest.mark.parametrize(("route", "body", "name"), WRONG_PROMPTS, ids=lambda value: str(value)[:40])
def test_wrong_prompt(server: Server, route: str, body: dict[str, Any], name: str) -> None:
    message, param = refusal(server, route, body)
    assert name.split("[")[0] in message
    if "[" in name:
        assert name in message
    if param is not None:
        assert param.startswith(name.split("[")[0])


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_prompt_around_the_limit(server: Server, over: int) -> None:
    """One token has to fit behind the prompt: context − 1 is the longest prompt."""
    ids = [70] * (CONTEXT - 1 + over)
    text = "b" * len(ids)
    if over <= 0:
        room = CONTEXT - len(ids)
        answer = server.generate(ids, max_new_tokens=None, ignore_eos=True)
        assert answer["meta_info"]["prompt_tokens"] == len(ids)
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == room
        message, _ = refusal(server, "/generate", body_of("/generate", text, max_tokens=room + 1))
        assert "sampling_params.max_new_tokens" in message and str(CONTEXT) in message
        message, param = refusal(
            server, "/v1/completions", body_of("/v1/completions", ids, max_tokens=room + 1)
        )
        assert param == "max_tokens" and str(len(ids)) in message and str(CONTEXT) in message
        return
    for route, prompt in (("/generate", text), ("/v1/completions", ids), ("/v1/chat/completions", text)):
        message, param = refusal(server, route, body_of(route, prompt, max_tokens=1))
        assert str(CONTEXT) in message
        assert param in (None, "prompt", "messages")


@every_route
def test_invalid_utf8(server: Server, route: str) -> None:
    body = json.dumps(body_of(route, "MARK")).encode().replace(b"MARK", b"\xff\xfe\xc3")
    response = server.http.post(route, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "not valid JSON" in response.text


@every_route
def test_half_a_surrogate_pair(server: Server, route: str) -> None:
    """JSON can spell text that no UTF-8 can hold."""
    body = json.dumps(body_of(route, "MARK")).replace("MARK", "\\ud800").encode()
    response = server.http.post(route, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text


@every_route
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"{}{}", b"\x00" * 10])
def test_not_a_json_object(server: Server, route: str, content: bytes) -> None:
    response = server.http.post(route, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.text


@every_route
def test_deep_nesting(server: Server, route: str) -> None:
    content = b'{"text":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    response = server.http.post(route, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400


@every_route
def test_10_mb_body(server: Server, route: str) -> None:
    body = body_of(route, "y" * 10_000_000)
    response = post(server, route, body)
    assert response.status_code == 413
    assert "--max-body-bytes" in response.text and str(8 << 20) in response.text
    below = post(server, route, body_of(route, "y" * 8_000_000))
    assert below.status_code == 400
    assert str(CONTEXT) in below.text


def test_10_mb_in_chunks_without_a_length(server: Server) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"text":"'
        for _ in range(100):
            yield b"z" * 100_000

    response = server.http.post("/generate", content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 413


@pytest.mark.parametrize("route", ROUTES[1:])
def test_content_type(server: Server, route: str) -> None:
    response = server.http.post(
        route, content=json.dumps(body_of(route)), headers={"content-type": "text/plain"}
    )
    assert response.status_code == 400
    assert "application/json" in response.text


@every_route
def test_wrong_method_and_speculation_mode(server: Server, route: str) -> None:
    assert server.http.get(route).status_code == 405
    message, _ = refusal(server, route, body_of(route) | {"speculation": {"mode": "warp"}})
    assert "speculation.mode" in message
    message, _ = refusal(server, route, body_of(route) | {"speculation": {"mode": "off", "width": 2}})
    assert "speculation.width" in message


def test_more_answers_than_one_call_may_ask(server: Server) -> None:
    body = {"text": ["a"] * 100, "sampling_params": {"n": 100}}
    message, _ = refusal(server, "/generate", body)
    assert "10000" in message and "4096" in message


def test_one_bad_prompt_of_a_batch_refuses_the_batch(server: Server) -> None:
    before = server.wait_idle()["finished"]
    message, _ = refusal(server, "/generate", {"text": ["fine", "x" * CONTEXT]})
    assert "text[1]" in message
    assert server.wait_idle()["finished"] == before


def test_rids(server: Server) -> None:
    two = {"text": ["a", "b"]}
    assert "rid" in refusal(server, "/generate", two | {"rid": ["same", "same"]})[0]
    assert "rid" in refusal(server, "/generate", two | {"rid": ["one"]})[0]
    assert "rid" in refusal(server, "/generate", two | {"rid": 5})[0]
    response = server.http.post("/abort_request", json={})
    assert response.status_code == 400 and "rid" in response.text


def test_a_good_stream_beside_bad_requests(server: Server) -> None:
    """Refusals while somebody else is served change nothing for them."""
    alone = server.generate("steady", max_new_tokens=80, ignore_eos=True)
    body = {"text": "steady", "stream": True}
    body["sampling_params"] = {"max_new_tokens": 80, "ignore_eos": True, "temperature": 0}
    raw = b""
    with server.http.stream("POST", "/generate", json=body) as response:
        for chunk in response.iter_raw():
            if raw.count(b"data:") < 30:
                assert post(server, "/v1/completions", body_of("/v1/completions", n=0)).status_code == 400
            raw += chunk
    assert frames(raw)[-1]["output_ids"] == alone["output_ids"]
