"""Grammars of tool calls, as xgrammar reads them: what they let through is what the parsers take for calls."""

from __future__ import annotations

import json

import pytest

from flashspark.api.call_grammar import FORCED_PARSER, call_grammar
from flashspark.api.grammar import after_reasoning
from flashspark.api.tool_fields import NamedTool, Tool
from flashspark.ipc import GrammarSpec
from flashspark.text.tool_calls import ToolCall, ToolCallParser
from unit.test_text_tool_calls import in_json

xgrammar = pytest.importorskip("xgrammar")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = in_json("weather", '{"city": "x</tool_call>"}')
OTHER = in_json("weather", '{"town": "x"}')
TIME = in_json("get-time", "{}")
NAMED = NamedTool.parse({"function": {"name": "weather"}})
END = 256


@pytest.fixture(scope="module")
def compiler():
    """Over the 256 bytes and an end."""
    vocabulary = [bytes([i]) for i in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info)


def tools(strict=False) -> list[Tool]:
    return [
        Tool.parse({"function": {"name": "weather", "parameters": CITY, "strict": strict}}),
        Tool.parse({"function": {"name": "get-time"}}),
    ]


def takes(compiler, spec, text: str) -> bool:
    """Whether the grammar lets exactly this text through."""
    assert spec.kind == "structural_tag"
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(spec.text))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


@pytest.mark.parametrize(
    ("choice", "only_one", "good", "bad"),
    [
        (
            "required",
            False,
            [WEATHER, TIME, f"{WEATHER}\n{TIME}"],
            ["", "hi", OTHER, f"{TIME} x", f"x {TIME}"],
        ),
        ("required", True, [WEATHER, TIME], ["", OTHER, f"{WEATHER}\n{TIME}"]),
        (NAMED, False, [WEATHER], ["", TIME, OTHER, f"{WEATHER}\n{WEATHER}"]),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_forced(compiler, choice, only_one, good, bad, inside):
    spec = call_grammar(tools(), choice, only_one, inside)
    assert spec.field == "tool_choice"
    begin = "Hm, <tool_call> …\n</think>" if inside else ""
    for text in good:
        assert takes(compiler, spec, begin + text)
        one = ToolCallParser(FORCED_PARSER, {"weather": {}, "get-time": {}})
        items = [*one.feed(text), *one.finish()]
        assert items and all(isinstance(item, ToolCall) for item in items)
    for text in bad:
        assert not takes(compiler, spec, begin + text)
    if inside:
        assert not takes(compiler, spec, good[0])


def test_strict_functions_have_arguments_of_their_schema_and_the_rest_is_free(compiler):
    spec = call_grammar(tools(strict=True), "auto", False, True)
    assert spec.field == "tools"
    arguments = in_json("get-time", '{"a": [1, {}]}')
    for text in ("", "hi", "<think>\nHm</think>\n\nhi", WEATHER, f"I look.\n{WEATHER}\n{arguments}\nso"):
        assert takes(compiler, spec, text)
    for text in (OTHER, in_json("nobody", "{}"), in_json("get-time", "[1]"), "<tool_call>hi"):
        assert not takes(compiler, spec, text)


def test_nothing_else_is_constrained():
    assert call_grammar(tools(), None, False, False) is None
    assert call_grammar(tools(), "auto", True, True) is None
    assert call_grammar([], "none", False, False) is None


def test_a_schema_of_nothing_is_one_of_objects():
    spec = call_grammar([Tool.parse({"function": {"name": "f", "parameters": {}}})], "required", True, False)
    (tag,) = json.loads(spec.text)["format"]["tags"]
    assert tag["content"]["json_schema"] == {"type": "object"}


TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "[1]"}}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "[", "schema": {"type": "integer"}, "end": "]"}],
    "triggers": ["["],
}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "array", "items": {"type": "integer"}}'),
        ("regex", r"\[[0-9]{1,2}\]"),
        ("ebnf", 'root ::= "[" digit "]"\ndigit ::= [0-9]'),
        ("structural_tag", json.dumps(TAG)),
        ("structural_tag", json.dumps(OLD_TAG)),
    ],
)
def test_a_grammar_begins_where_reasoning_ends(compiler, kind, text):
    spec = GrammarSpec(kind, text, "field")
    inside, maybe = (after_reasoning(spec, "", opened) for opened in (True, False))
    assert after_reasoning(spec, "<think>\n\n</think>\n\n", False) == spec
    assert inside.field == maybe.field == "field"
    thought = "Hm, <x> [7]: [x] …\n</think>"
    assert takes(compiler, inside, f"{thought}[1]")
    assert takes(compiler, maybe, "[1]")
    assert takes(compiler, maybe, f"<think>{thought}[1]")
    for spec, bad in (
        (inside, "[1]"),
        (inside, f"{thought}[x]"),
        (maybe, "[x]"),
        (maybe, f"<think>{thought}[x]"),
    ):
        assert not takes(compiler, spec, bad)
    assert not takes(compiler, inside, thought) or text == json.dumps(OLD_TAG)  # which may be empty


def test_a_tag_of_nothing_is_left_for_the_compiler_to_refuse():
    spec = GrammarSpec("structural_tag", '{"type": "structural_tag"}', "field")
    assert after_reasoning(spec, "", True) == spec
