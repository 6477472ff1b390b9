"""Tools and reasoning of chat on a real server: what reaches the model, and how its text comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.server import Server, running_server, speculative
from flashspark.text import TextTokenizer
from tiny_models import CHAT_TEMPLATE

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    + CHAT_TEMPLATE
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MESSAGES: Any = [
    {"role": "user", "content": "1 + 2"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3-thinking"]
    log = tmp_path_factory.mktemp("tools") / "log"
    with running_server(*speculative(*tiny_pair), *flags, "--chat-template", TEMPLATE, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.openai()


def ask(client: openai.OpenAI, stream: bool = False, **extra: Any) -> Any:
    body = {"ignore_eos": True, "skip_special_tokens": False} | extra
    tools = body.pop("tools", [TOOL])
    return client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=tools,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=stream,
        extra_body=body,
    )


def test_tools_reach_the_prompt(client: openai.OpenAI, server: Server) -> None:
    def count(**body: Any) -> int:
        return server.http.post("/tokenize", json={"messages": MESSAGES, **body}).json()["count"]

    used = ask(client).usage
    assert used.prompt_tokens == count(tools=[TOOL])
    assert ask(client, tool_choice="none").usage.prompt_tokens == count() < used.prompt_tokens


def test_text_without_calls_or_tags(client: openai.OpenAI) -> None:
    """A random model says neither: all is reasoning where it begins inside, else content, cut like any other text."""
    inside = ask(client)
    (choice,) = inside.choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)
    assert inside.usage.model_extra["reasoning_tokens"] == inside.usage.completion_tokens == NUM_TOKENS
    assert inside.usage.completion_tokens_details.reasoning_tokens == NUM_TOKENS
    whole = ask(client, separate_reasoning=False).choices[0].message
    assert whole.model_extra["reasoning_content"] is None
    assert choice.message.model_extra["reasoning_content"] == whole.content.strip() != ""
    outside = ask(client, chat_template_kwargs={"enable_thinking": False})
    said = outside.choices[0].message
    assert said.model_extra["reasoning_content"] is None
    assert outside.usage.model_extra["reasoning_tokens"] == 0
    pieces = [
        chunk.choices[0].delta.content
        for chunk in ask(client, stream=True, chat_template_kwargs={"enable_thinking": False})
    ]
    assert "".join(piece or "" for piece in pieces) == said.content != ""


def test_an_answer_that_goes_on(client: openai.OpenAI) -> None:
    """The prompt is that of the question, and what the answer begins with."""
    question: Any = [{"role": "user", "content": "hello"}]
    begun: Any = [*question, {"role": "assistant", "content": "well,"}]
    options: Any = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    asked = client.chat.completions.create(messages=question, **options)
    body = {"continue_final_message": True}
    goes_on = client.chat.completions.create(messages=begun, extra_body=body, **options)
    assert goes_on.usage.prompt_tokens == asked.usage.prompt_tokens + len("well,")


FLAG: Any = {
    "type": "function",
    "function": {
        "name": "set_flag",
        "parameters": {
            "type": "object",
            "properties": {"flag": {"enum": ["on", "off", "unknown"]}},
            "required": ["flag"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("mode", ["off", "static"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_flag"}}])
def test_a_call_is_forced(
    client: openai.OpenAI, tiny_pair: tuple[Path, Path], choice: Any, mode: str
) -> None:
    """A random model calls, and by the schema, with and without its draft."""
    blank = TextTokenizer.load(tiny_pair[0]).encode(" \n\t\r")
    body: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "flag?"}],
        "tools": [FLAG],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "n": 2,
        "extra_body": {
            "chat_template_kwargs": {"enable_thinking": False},
            "speculation": {"mode": mode},
            "logit_bias": {str(token_id): -10000 for token_id in blank},  # of which JSON allows any number
        },
    }
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body, seed=3) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        for one in answer.choices:
            assert (one.finish_reason, one.message.content or None) == ("tool_calls", None)
            (call,) = one.message.tool_calls or ()
            assert call.function.name == "set_flag"
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() == {"flag"}
            assert arguments["flag"] in {"on", "off", "unknown"}
