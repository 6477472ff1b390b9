"""The prefix cache of a real server: what answers, counters and metrics say of it, tenants, and flushing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.server import LONG, Server, generate_body, running_server, send, speculative

PROMPT = [70 + i % 50 for i in range(50)]  # three whole pages before its last token


@pytest.fixture(scope="module")
def caching(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("prefix") / "log"
    flags = ["--max-running-requests", "4", "--enable-metrics", "--enable-cache-report"]
    with running_server(*speculative(*tiny_pair), *flags, log=log) as running:
        yield running


@pytest.fixture
def empty(caching: Server) -> Server:
    """The server with nothing cached."""
    assert caching.http.post("/flush_cache?timeout=30").status_code == 200
    state = caching.wait_idle()
    assert (state["num_cached_pages"], state["num_free_pages"]) == (0, state["num_pages"])
    return caching


def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    if path == "/generate":
        body = generate_body(PROMPT, max_new_tokens=4) | body
    else:
        body = {
            "prompt": PROMPT,
            "max_tokens": 4,
            "temperature": 0,
            "return_cached_tokens_details": True,
        } | body
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer: dict[str, Any]) -> int:
    if "meta_info" in answer:
        return answer["meta_info"]["cached_tokens"]
    num_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer["sglext"]["cached_tokens_details"] == {"device": num_tokens, "host": 0}
    return num_tokens


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_answers_say_what_was_found(empty: Server, path: str) -> None:
    cold, hit = ask(empty, path), ask(empty, path)
    assert (cached(cold), cached(hit)) == (0, 48)
    if path == "/generate":
        assert hit["output_ids"] == cold["output_ids"]
    else:
        assert hit["choices"] == cold["choices"]
    chat = {"messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 4, "temperature": 0}
    answers = [empty.http.post("/v1/chat/completions", json=chat).json() for _ in range(2)]
    found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert found == [0, (answers[0]["usage"]["prompt_tokens"] - 1) // 16 * 16]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_tenants_share_nothing(empty: Server, path: str) -> None:
    fields = [{}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "b"}, {"cache_salt": ["a"]}]
    assert [cached(ask(empty, path, **f)) for f in fields] == [0, 0, 0, 0, 48]
    assert cached(ask(empty, path, cache_salt="", extra_key=None)) == 48  # as good as none
    refused = empty.http.post(
        path,
        json={"prompt": PROMPT, "cache_salt": ["a", "b"]}
        if "v1" in path
        else generate_body(PROMPT) | {"cache_salt": ["a", "b"]},
    )
    assert refused.status_code == 400
    assert "cache_salt: 2 keys for 1 prompts" in refused.text


def test_keys_of_a_batch(empty: Server) -> None:
    body = generate_body(PROMPT, max_new_tokens=4) | {"input_ids": [PROMPT] * 3, "extra_key": ["a", "b", "a"]}
    answers = empty.http.post("/generate", json=body).json()
    assert [cached(answer) for answer in answers[:2]] == [0, 0]
    assert cached(ask(empty, "/generate", extra_key="b")) == 48


def test_counters_and_metrics(empty: Server) -> None:
    before = empty.state()
    for _ in range(3):
        ask(empty, "/generate")
    state = empty.wait_idle()
    assert state["num_cached_tokens"] - before["num_cached_tokens"] == 96
    text = empty.http.get("/metrics").text
    samples = {s.name: s for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["sglang:cached_tokens_total"].value == state["num_cached_tokens"]
    assert samples["sglang:cached_tokens_total"].labels["cache_source"] == "device"
    assert samples["sglang:cache_hit_rate"].value == pytest.approx(state["cache_hit_rate"])
    assert samples["sglang:kv_evictable_tokens"].value == 16 * state["num_evictable_pages"] == 48
    assert samples["sglang:kv_available_tokens"].value == 16 * state["num_free_pages"]
    assert samples["sglang:num_used_tokens"].value == 0


def test_a_busy_server_is_not_flushed(empty: Server) -> None:
    ask(empty, "/generate")
    connection = send(empty, "/generate", generate_body("wait", max_new_tokens=LONG, ignore_eos=True))
    empty.wait_running(1)
    refused = empty.http.post("/flush_cache")
    assert (refused.status_code, refused.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert empty.state()["num_cached_pages"] >= 3
    assert empty.http.post("/abort_request", json={"abort_all": True}).status_code == 200
    waited = empty.http.get("/flush_cache", params={"timeout": "60"})
    assert (waited.status_code, waited.text) == (200, "Cache flushed.\n")
    connection.close()
    assert cached(ask(empty, "/generate")) == 0


@pytest.mark.parametrize("timeout", ["soon", "-1", "nan", "inf"])
def test_a_timeout_is_seconds(caching: Server, timeout: str) -> None:
    response = caching.http.post("/flush_cache", params={"timeout": timeout})
    assert response.status_code == 400
    assert "timeout" in response.text
