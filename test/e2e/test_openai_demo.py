"""The official client against the shipped pair: log-probabilities, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from e2e.server import Server, running_server, speculative

MESSAGES: list[Any] = [{"role": "user", "content": "Add 1 and 2."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("openai") / "log"
    flags = ["--served-model-name", "demo", "--max-running-requests", "4"]
    with running_server(*speculative("demo", "demo-dflash2"), *flags, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def ask(server: Server) -> Any:
    """A greedy chat call; keywords are the client's."""
    client: openai.OpenAI = server.openai()

    def chat(**options: Any) -> Any:
        return client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, **{"max_tokens": 100, **options}
        )

    return chat


def test_log_probabilities(ask: Any) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = ask(**options)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens == 100
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == whole.choices[0].message.content
    for entry in entries:
        best, second = entry.top_logprobs
        assert (entry.token, entry.logprob) == (best.token, best.logprob)
        assert second.logprob <= best.logprob <= 0
    streamed = [
        entry.logprob
        for chunk in ask(**options, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
