"""The official client against the shipped pair: tools, a JSON schema and log-probabilities, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from e2e.server import Server, running_server, speculative
from tiny_models import CHAT_TEMPLATE

MESSAGES: list[Any] = [{"role": "user", "content": "Add 1 and 2."}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
# The small model calls no tools by itself, so a grammar writes its answer.
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 1, "b": [0-9]\}\}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"is_even": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["is_even", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("openai") / "log"
    # The model's own template knows no tools.
    template = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + CHAT_TEMPLATE
    flags = ["--chat-template", template]
    flags += ["--tool-call-parser", "qwen25", "--served-model-name", "demo", "--max-running-requests", "4"]
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


def test_tools(ask: Any) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "extra_body": {"regex": CALL}}
    (choice,) = ask(**options).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.type, call.function.name, arguments["a"]) == ("function", "add", 1)
    assert 0 <= arguments["b"] <= 9
    name, text, reason = "", "", None
    for chunk in ask(**options, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name += delta.function.name or ""
            text += delta.function.arguments or ""
        assert not chunk.choices[0].delta.content
        reason = chunk.choices[0].finish_reason or reason
    assert (name, json.loads(text), reason) == ("add", arguments, "tool_calls")


def test_json_schema(ask: Any) -> None:
    named = {"name": "number", "schema": SCHEMA, "strict": True}
    options: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": named}}
    options["max_tokens"] = 600  # the model likes white space, and a schema allows it
    (choice,) = ask(**options).choices
    value = json.loads(choice.message.content)
    assert choice.finish_reason == "stop"
    assert value.keys() == {"is_even", "size"}
    assert isinstance(value["is_even"], bool) and value["size"] in {"small", "large"}
    chunks = ask(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


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
