"""Tools and reasoning over the real HTTP server, and by the official client. The fake engine echoes its prompt, and
the template is made so that the prompt is the last message: a test says what the model says."""

from __future__ import annotations

import asyncio
import copy
import json
from types import SimpleNamespace

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_server import FakeServer
from flashspark.api.chat_tools import ChatFormat, ChatOutput, check_tools
from flashspark.api.errors import RequestError
from flashspark.api.openai_prompts import render_chat
from flashspark.api.protocol import ChatMessage
from flashspark.api.tool_fields import Tool
from flashspark.args import ServerArgs
from flashspark.args.server_args import ArgumentError, flags
from flashspark.text import TextTokenizer
from flashspark.text.reasoning import REASONING_PARSERS
from flashspark.text.tool_calls import TOOL_CALL_PARSERS
from tiny_models import write_tokenizer
from unit.test_api_openai import DRAFT, frames, post
from unit.test_text_tool_calls import cut, in_json, in_xml, places

ECHO = "{% if tools and shown %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"
END = "<|im_end|>"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
    },
    {"type": "function", "function": {"name": "get-time"}},
]
WEATHER = in_json("weather", '{"city": "Zürich"}')
TIME = in_json("get-time", "{}")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder):
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with FakeServer(folder, *DRAFT, *parsers, "--chat-template", ECHO, "--context-length", "1024") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def say(text, **body):
    """A chat body that is answered by `text`."""
    return {"messages": [{"role": "user", "content": text + END}], "tools": TOOLS, **body}


def ask(server, text, **body):
    (choice,) = post(server, CHAT, **say(text, **body)).json()["choices"]
    return choice


def gather(bodies) -> dict[int, dict]:
    """Each choice's message out of a stream, and its finish reason."""
    messages: dict[int, dict] = {}
    for body in bodies:
        for choice in body["choices"]:
            kept = {"content": "", "reasoning_content": "", "tool_calls": []}
            message = messages.setdefault(choice["index"], kept)
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta["reasoning_content"] or ""
            for call in delta.get("tool_calls", ()):
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append(call)
            message["finish_reason"] = choice["finish_reason"]
    return messages


def functions(calls) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls or ()]


def test_flags_name_the_parsers_there_are():
    assert set(flags()["tool_call_parser"].choices) == set(TOOL_CALL_PARSERS)
    assert set(flags()["reasoning_parser"].choices) == set(REASONING_PARSERS)
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ArgumentError, match="use one of") as caught:
            ServerArgs(model_path="m", **{name: "pythonic"})
        assert f"--{name.replace('_', '-')} pythonic" in str(caught.value)


SAID = {
    "plain": ("Hello.", "Hello.", None, []),
    "call": (f"I look.\n{WEATHER}", "I look.", None, [("weather", '{"city": "Zürich"}')]),
    "calls": (f"{WEATHER}\n{TIME}\n", None, None, [("weather", '{"city": "Zürich"}'), ("get-time", "{}")]),
    "reasoning": ("<think>\nHm.\n</think>\n\nHello.", "Hello.", "Hm.", []),
    "both": (
        f"<think>\nHm {TIME}\n</think>\n\n{WEATHER}",
        None,
        f"Hm {TIME}",
        [("weather", '{"city": "Zürich"}')],
    ),
    "malformed": ("so <tool_call>\n{}\n</tool_call>\n", "so <tool_call>\n{}\n</tool_call>\n", None, []),
    "unknown": (in_json("nobody", "{}"), in_json("nobody", "{}"), None, []),
}


@pytest.mark.parametrize("case", SAID)
def test_whole(server, case):
    text, content, reasoning, calls = SAID[case]
    choice = ask(server, text)
    message = choice["message"]
    assert message["content"] == content
    assert message["reasoning_content"] == reasoning
    assert functions(message["tool_calls"]) == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    for call in message["tool_calls"] or ():
        assert call.keys() == {"id", "type", "function"}
        assert call["type"] == "function"
        assert call["id"].startswith("call_")


@pytest.mark.parametrize("padding", range(4))  # blocks of four tokens, cut at every place
@pytest.mark.parametrize("case", SAID)
def test_streamed(server, case, padding):
    text, content, reasoning, calls = SAID[case]
    bodies = frames(post(server, CHAT, **say(" " * padding + text, stream=True)))
    message = gather(bodies)[0]
    assert message["content"].strip() == (content or "").strip()
    assert message["reasoning_content"] == (reasoning or "")
    assert functions(message["tool_calls"]) == calls
    assert message["finish_reason"] == ("tool_calls" if calls else "stop")
    assert all("<" not in (b["choices"][0]["delta"].get("content") or "") for b in bodies) or not calls
    (*_, end) = bodies
    assert end["choices"][0]["delta"] == {"reasoning_content": None}
    assert end["usage"] is None


@pytest.mark.parametrize("mode", ["off", "static"])
def test_several_choices_usage_and_statistics(server, mode):
    text = f"<think>\nHm.\n</think>\n\n{WEATHER}"
    body = say(text, n=3, speculation={"mode": mode})
    whole = post(server, CHAT, **body, return_meta_info=True).json()
    bodies = frames(post(server, CHAT, **body, stream=True, stream_options={"include_usage": True}))
    num_reasoning = len("<think>\nHm.\n</think>")
    for used in (whole["usage"], bodies[-1]["usage"]):
        assert used["completion_tokens"] == 3 * (len(text.encode()) + 1)
        assert used["reasoning_tokens"] == 3 * num_reasoning
        assert used["completion_tokens_details"] == {"reasoning_tokens": 3 * num_reasoning}
    messages = gather(bodies)
    ids = set()
    for choice in whole["choices"]:
        streamed = messages[choice["index"]]
        assert choice["meta_info"]["reasoning_tokens"] == num_reasoning
        assert functions(choice["message"]["tool_calls"]) == functions(streamed["tool_calls"])
        assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"
        ids |= {call["id"] for call in choice["message"]["tool_calls"] + streamed["tool_calls"]}
    assert len(ids) == 6


def test_one_call_at_most(server):
    text = f"{WEATHER}\n{TIME}"
    for stream in (False, True):
        body = say(text, parallel_tool_calls=False, stream=stream)
        answer = post(server, CHAT, **body)
        message = gather(frames(answer))[0] if stream else answer.json()["choices"][0]["message"]
        assert functions(message["tool_calls"]) == [("weather", '{"city": "Zürich"}')]
        assert not message["content"]


def test_what_ends_an_answer_in_the_middle_of_a_call(server):
    length = ask(server, f"{TIME}\n{WEATHER}", max_tokens=len(TIME) + 30)
    assert functions(length["message"]["tool_calls"]) == [("get-time", "{}")]
    assert length["message"]["content"] == f"\n{WEATHER}"[:30]
    assert length["finish_reason"] == "length"
    stop = ask(server, f"I look.\n{WEATHER}", stop=["arguments"])
    assert stop["message"]["content"] == f"I look.\n{WEATHER[: WEATHER.index('arguments')]}"
    assert (stop["finish_reason"], stop["matched_stop"]) == ("stop", "arguments")
    # Nothing but the tag is missing: it is a call.
    tag = ask(server, WEATHER, stop=["</tool_call>"])
    assert functions(tag["message"]["tool_calls"]) == [("weather", '{"city": "Zürich"}')]
    assert tag["finish_reason"] == "tool_calls"
    thinking = ask(server, "<think>\nHm, well", max_tokens=12)
    assert (thinking["message"]["reasoning_content"], thinking["message"]["content"]) == ("Hm,", "")


def test_tool_choice_none_offers_nothing(server):
    for offered in ({"tool_choice": "none"}, {"tools": None}, {"tools": []}):
        choice = ask(server, WEATHER, **offered)
        assert choice["message"]["content"] == WEATHER
        assert choice["message"]["tool_calls"] is None
        assert choice["finish_reason"] == "stop"
    shown = {"chat_template_kwargs": {"shown": True}, "max_tokens": 300, "ignore_eos": True}
    assert "get-time" in ask(server, "hi", **shown)["message"]["content"]
    assert "get-time" not in ask(server, "hi", **shown, tool_choice="none")["message"]["content"]


def test_reasoning_that_is_not_wanted_apart_or_not_in_pieces(server):
    text = "<think>\nHm, that is long.\n</think>\n\nHello."
    message = ask(server, text, separate_reasoning=False)["message"]
    assert (message["content"], message["reasoning_content"]) == (text, None)
    for stream_reasoning in (True, False):
        body = say(text, stream=True, stream_reasoning=stream_reasoning)
        deltas = [
            item["choices"][0]["delta"]["reasoning_content"] for item in frames(post(server, CHAT, **body))
        ]
        pieces = [piece for piece in deltas if piece]
        assert "".join(pieces) == "Hm, that is long."
        assert stream_reasoning or len(pieces) == 1
    for holds, deltas in ((False, [{"reasoning_content": "Hm,"}]), (True, [])):
        assert ChatOutput(ChatFormat(None, {}, False, True, holds)).push("Hm, ", is_last=False) == deltas


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [("hi", "structural_tag"), ("<think>\n", "structural_tag"), ("<think>\n\n</think>\n\n", "regex")],
)
def test_a_grammar_waits_for_the_end_of_reasoning_that_may_come(server, prompt, kind):
    body = {"messages": [{"role": "user", "content": prompt}], "regex": "BAD"}
    assert server.client.post(CHAT, json=body).json()["message"] == f"regex: this is no {kind}"


def test_the_answer_goes_on_where_the_last_turn_ends(folder):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if open %}<think>{% endif %}"
    flag = ("--reasoning-parser", "qwen3", "--chat-template", template)
    with FakeServer(folder, *DRAFT, *flag) as server:

        def answer(*contents, role="assistant", **body):
            turns = [
                {"role": "user", "content": "hi"},
                *({"role": role, "content": text} for text in contents),
            ]
            options = {"continue_final_message": True, "ignore_eos": True, "max_tokens": 14}
            return server.client.post(CHAT, json={"messages": turns, **options, **body})

        def message(*contents, **body):
            return answer(*contents, **body).json()["choices"][0]["message"]

        assert message("So I")["content"] == "[hi]So I[hi]So"
        assert message("<think>a")["reasoning_content"] == "[hi]<think>a[h"
        assert message("<think>a</think>b")["reasoning_content"] is None
        assert message("x", chat_template_kwargs={"open": True})["reasoning_content"] == "[hi]<think>x[h"
        for bad in (
            answer("So I", role="user"),
            answer("x", messages=[{"role": "assistant", "content": "x", "reasoning_content": "y"}]),
            answer("x", messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]),
        ):
            assert bad.status_code == 400
            assert bad.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "'weather' is given twice", "tools[1].function.name"),
        ({"tool_choice": "required", "tools": []}, "needs tools", "tool_choice"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "schema of type 'object'",
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required", "regex": "a+"}, "regex and tool_choice: give only one", "tool_choice"),
        (
            {
                "tools": [{"function": {"name": "f", "strict": True}}],
                "response_format": {"type": "json_object"},
            },
            "response_format and tools: give only one",
            "tools",
        ),
        # As the engine refuses a schema that is none: told by the field it came in.
        ({"tool_choice": "required", "tools": [{"function": {"name": "BAD"}}]}, "is no", "tool_choice"),
        (
            {"tool_choice": {"function": {"name": "f"}}},
            "'f' is none of the tools",
            "tool_choice.function.name",
        ),
        (
            {"tools": None, "tool_choice": {"function": {"name": "f"}}},
            "'f' is none",
            "tool_choice.function.name",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "set by the server", "chat_template_kwargs.tools"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
                ]
            },
            "must be the text of a JSON object",
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
            "only an assistant's turn",
            "messages[0].tool_calls",
        ),
    ],
)
def test_refusals(server, body, message, param):
    response = server.client.post(CHAT, json=say("x", **body))
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert param in error["message"]


def test_a_template_without_tools_is_not_given_any(folder):
    context = SimpleNamespace(tokenizer=TextTokenizer.load(folder))
    with pytest.raises(RequestError, match="--chat-template can name another") as caught:
        check_tools([Tool.parse(TOOLS[0])], context)
    assert caught.value.param == "tools"
    check_tools([], context)


BEGIN = """<tool_call>
{"name": "{{ call.function.name }}", "arguments": """
TEMPLATES = {  # three ways in which Qwen's templates write calls of earlier turns
    "object": BEGIN + "{{ call.function.arguments | tojson }}}\n</tool_call>",
    "text or object": BEGIN
    + "{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}}\n</tool_call>",
    "items": "<tool_call>\n<function={{ call.function.name }}>{{ nl }}"
    "{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>{{ nl }}{{ value }}{{ nl }}</parameter>{{ nl }}{% endfor %}</function>\n</tool_call>",
}


@pytest.mark.parametrize("style", TEMPLATES)
def test_calls_of_earlier_turns_read_as_the_model_wrote_them(folder, style):
    calls = "{% for call in m.tool_calls or [] %}{{ nl }}" + TEMPLATES[style] + "{% endfor %}"
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}" + calls + "{{ nl }}{% endfor %}"
    tokenizer = TextTokenizer.load(folder, template)
    first, second = in_json("weather", '{"city": "Zürich", "days": 3}'), in_json("get-time", "{}")
    if style == "items":
        first, second = in_xml("weather", city="Zürich", days="3"), in_xml("get-time")
    written = f"I look.\n{first}\n{second}"
    form = ChatFormat(
        "qwen3_coder" if style == "items" else "qwen25", {"weather": {}, "get-time": {}}, False, None, False
    )
    answer = ChatOutput(form).message(written)
    turns = [answer, {"role": "tool", "tool_call_id": "t", "content": "20 degrees"}]
    as_object = copy.deepcopy(turns)
    for call in as_object[0]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    for said in (turns, as_object):
        messages = [ChatMessage.parse(turn) for turn in said]
        text = asyncio.run(render_chat(messages, {"nl": "\n"}, SimpleNamespace(tokenizer=tokenizer)))
        assert text == f"assistant:{written}\ntool:20 degrees\n"
    for empty in ("", " ", None):
        turn = {"role": "assistant", "tool_calls": [{"function": {"name": "get-time", "arguments": empty}}]}
        messages = [ChatMessage.parse(turn)]
        text = asyncio.run(render_chat(messages, {"nl": "\n"}, SimpleNamespace(tokenizer=tokenizer)))
        assert text == f"assistant:\n{second}\n"


def test_servers_that_cannot_do_it_say_so(folder):
    with FakeServer(folder, *DRAFT, "--chat-template", ECHO, "--context-length", "512") as server:
        refused = server.client.post(CHAT, json=say("x"))
        assert refused.status_code == 400
        assert "--tool-call-parser" in refused.json()["error"]["message"]
        # A forced call needs none: its form is the grammar's.
        forced = ask(server, WEATHER, tool_choice={"type": "function", "function": {"name": "weather"}})
        assert functions(forced["message"]["tool_calls"]) == [("weather", '{"city": "Zürich"}')]
        # Without a parser nothing is taken apart, and what is offered to nobody needs none.
        assert ask(server, f"<think>a</think>{TIME}", tool_choice="none")["message"] == {
            "role": "assistant",
            "content": f"<think>a</think>{TIME}",
            "reasoning_content": None,
            "tool_calls": None,
        }


def test_the_other_format_and_answers_that_begin_inside(folder):
    flag = ("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "deepseek-r1", "--chat-template", ECHO)
    with FakeServer(folder, *DRAFT, *flag, "--context-length", "1024") as server:
        call = in_xml("weather", city="Zürich", days="3")
        message = ask(server, f"Hm.\n</think>\n\n{call}")["message"]
        assert message["reasoning_content"] == "Hm."
        assert functions(message["tool_calls"]) == [("weather", '{"city": "Zürich", "days": "3"}')]
        forced = ask(server, f"Hm.</think>{WEATHER}", tool_choice="required")
        assert functions(forced["message"]["tool_calls"]) == [("weather", '{"city": "Zürich"}')]
        strict = {"function": {"name": "f", "strict": True}}
        refused = server.client.post(CHAT, json=say("x", tools=[*TOOLS, strict]))
        assert refused.json()["error"]["param"] == "tools[2].function.strict"
        info = server.client.get("/model_info").json()
        assert (info["tool_call_parser"], info["reasoning_parser"]) == ("qwen3_coder", "deepseek-r1")


def test_tokenize_shows_tools(server):
    def count(**body):
        return post(server, "/tokenize", messages=[{"role": "user", "content": "hi"}], **body).json()["count"]

    kwargs = {"chat_template_kwargs": {"shown": True}}
    dumped = json.dumps(TOOLS, ensure_ascii=False)
    assert count(tools=TOOLS, **kwargs) == count(**kwargs) + len(dumped)
    response = server.client.post("/tokenize", json={"prompt": "hi", "tools": TOOLS})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


class TestOfficialClient:
    """The `openai` package as it comes: its helpers put deltas together their own way."""

    def test_whole(self, client):
        answer = client.chat.completions.create(
            model="m", **say(f"I look.\n{WEATHER}\n{TIME}"), tool_choice="auto"
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content == "I look."
        assert [call.function.name for call in message.tool_calls] == ["weather", "get-time"]
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Zürich"}
        # What came back can be sent again, with its results.
        turn = message.model_dump(exclude_none=True)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": f"done{END}"}]}
            for call in message.tool_calls
        ]
        messages = [{"role": "user", "content": "hi"}, turn, *results]
        answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "done"

    def test_stream(self, client):
        body = say(f"<think>Hm</think>I look.\n{WEATHER}\n{TIME}")
        with client.chat.completions.stream(model="m", **body) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        (choice,) = final.choices
        assert choice.message.content == "I look."
        assert [call.function.name for call in choice.message.tool_calls] == ["weather", "get-time"]
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Zürich"}'
        assert choice.finish_reason == "tool_calls"


scraps = st.lists(
    st.sampled_from(
        ["<think>", "</think>", WEATHER, TIME, in_json("nobody", "{}"), "<tool_call>", "\n", "so "]
    )
    | st.text(max_size=4),
    max_size=12,
).map("".join)


@settings(deadline=None, max_examples=200)
@given(
    text=scraps,
    where=places,
    inside=st.none() | st.booleans(),
    only_one=st.booleans(),
    holds=st.booleans(),
)
def test_any_cut_gives_the_same_message(text, where, inside, only_one, holds):
    form = ChatFormat("hermes", {"weather": {}, "get-time": {}}, only_one, inside, holds)
    output = ChatOutput(form)
    pieces = cut(text, where)
    content, reasoning, calls = "", [], []
    for i, piece in enumerate(pieces):
        for delta in output.push(piece, is_last=i == len(pieces) - 1):
            assert len(delta) == 1
            content += delta.get("content", "")
            reasoning += [delta["reasoning_content"]] if "reasoning_content" in delta else []
            calls += delta.get("tool_calls", [])
    whole = ChatOutput(form).message(text)
    assert content == (whole["content"] or "")
    assert "".join(reasoning) == (whole["reasoning_content"] or "")
    assert len(reasoning) <= 1 or not holds
    assert functions(calls) == functions(whole["tool_calls"])
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len(calls) <= 1 or not only_one
    for _, arguments in functions(calls):
        assert isinstance(json.loads(arguments), dict)
