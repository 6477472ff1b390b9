"""Tool calls out of text: what is one, what is not, and that it never matters how the text was cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashspark.text.tool_calls import TOOL_CALL_PARSERS, ToolCall, ToolCallParser

FUNCTIONS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": "number"},
            "hourly": {"type": "boolean"},
            "options": {"type": "object"},
            "places": {"type": "array"},
            "note": {"type": ["string", "null"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "any": {},
        },
    },
    "get-time": {},
}
FORMATS = ["hermes", "qwen3_coder"]


def parse(parser: str, *pieces: str) -> list[str | ToolCall]:
    """Everything that comes out, texts between two calls joined."""
    one, items = ToolCallParser(parser, FUNCTIONS), []
    for item in [*(item for piece in pieces for item in one.feed(piece)), *one.finish()]:
        assert item != ""
        if isinstance(item, str) and items and isinstance(items[-1], str):
            items[-1] += item
        else:
            items.append(item)
    return items


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def in_json(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def in_xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def test_names():
    assert set(TOOL_CALL_PARSERS) == {"hermes", "qwen", "qwen25", "qwen3_coder"}


@pytest.mark.parametrize("name", ["hermes", "qwen", "qwen25"])
def test_json_calls(name):
    first, second = in_json("weather", '{"city": "Zürich"}'), in_json("get-time", "{}")
    calls = [ToolCall("weather", '{"city": "Zürich"}'), ToolCall("get-time", "{}")]
    assert parse(name, f"I look.\n\n{first}\n{second}\n") == ["I look.", *calls]


def test_xml_calls():
    text = f"I look.\n\n{in_xml('weather', city='Zürich', days='3')}\n{in_xml('get-time')}\nNow.\n"
    assert parse("qwen3_coder", text) == [
        "I look.",
        ToolCall("weather", '{"city": "Zürich", "days": 3}'),
        ToolCall("get-time", "{}"),
        "\nNow.\n",
    ]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "weather"}', "{}"),
        ('{"arguments": {"a": 1}, "name": "weather"}', '{"a": 1}'),
        ('  {"name":"weather","arguments":{"a":[1,{"b":null}]}}', '{"a": [1, {"b": null}]}'),
        ('{"name": "weather", "arguments": {"a": "</tool_call> and \\"quotes\\" \\\\"}}', None),
        ('{"name": "weather", "arguments": {"a": "<tool_call>\\n{}"}}', None),
        ('{"name": "weather", "arguments": {"a": "a line\nbreak"}}', '{"a": "a line\\nbreak"}'),
        ('{"name": "weather", "arguments": {"a": "\\ud800"}}', '{"a": "\\ud800"}'),
        ('{"name": "weather", "arguments": {"a": 123456789012345678901234567890}}', None),
    ],
)
def test_json_bodies(body, arguments):
    (call,) = parse("hermes", f"<tool_call>{body}</tool_call>")
    assert isinstance(call, ToolCall)
    expected = json.loads(body, strict=False).get("arguments", {})
    assert json.loads(call.arguments) == expected
    assert arguments is None or call.arguments == arguments
    call.arguments.encode()  # can be sent


MALFORMED = {
    "hermes": [
        *("", "{}", "[]", "null", "weather", '{"name": "weather", "arguments": {}', '{"name": "weather"}}'),
        '{"name": "nobody", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "weather", "arguments": "{}"}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": null}',
        '{"name": "weather", "arguments": {}, "more": 1}',
        '{"name": "weather", "arguments": {"a": NaN}}',
        '{"name": "weather", "arguments": {"a": 1e999}}',
        '{"name": "weather", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"name": "weather", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "weather", "arguments": {"a": "open}}',
        in_xml("weather", city="x").removeprefix("<tool_call>").removesuffix("</tool_call>"),
    ],
    "qwen3_coder": [
        *("", "weather", "<function=nobody></function>", "<function=weather>", "<function=>x</function>"),
        "<function=weather>city</function>",
        "<function=weather><parameter=city>x</function>",
        "<function=weather><parameter=city>x</parameter>y</function>",
        "<function=weather></parameter></function>",
        "<function=weather><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "<function=weather><parameter=a\n>1</parameter></function>",
        "text <function=weather></function>",
        '{"name": "weather", "arguments": {}}',
    ],
}


@pytest.mark.parametrize(
    ("parser", "body"), [(p, body) for p, bodies in MALFORMED.items() for body in bodies]
)
def test_what_is_no_call_is_text(parser, body):
    text = f"before \n<tool_call>{body}</tool_call>\n after "
    assert parse(parser, text) == [text]
    assert parse(parser, *text) == [text]


@pytest.mark.parametrize("parser", FORMATS)
def test_a_call_after_one_that_is_none(parser):
    good = in_json("get-time", "{}") if parser == "hermes" else in_xml("get-time")
    bad = "<tool_call>\nwhat</function>\n</tool_call>"
    assert parse(parser, f"{bad}\n{good}") == [bad, ToolCall("get-time", "{}")]


@pytest.mark.parametrize("parser", FORMATS)
def test_cut_short(parser):
    """By a length limit or a stop string: text as it is, unless nothing but the closing tag is missing."""
    whole = in_json("weather", '{"city": "x"}') if parser == "hermes" else in_xml("weather", city="x")
    complete = whole.index("</tool_call>") - 1
    for length in range(len(whole)):
        text = f"so \n{whole[:length]}"
        call = [ToolCall("weather", '{"city": "x"}')]
        assert parse(parser, *text) == (["so", *call] if length >= complete else [text])


def test_a_call_that_is_quoted_in_another_is_not_made():
    shown = in_xml("get-time", zone="a", when="b")
    (call,) = parse("qwen3_coder", in_xml("weather", city=f"as in\n{shown}\nhere"))
    assert json.loads(call.arguments) == {"city": f"as in\n{shown}\nhere"}
    unfinished = in_xml("weather", city=f"as in\n{shown}\nhere").removesuffix("</function>\n</tool_call>")
    for text in (unfinished, in_xml("nobody", city=shown)):
        assert parse("qwen3_coder", text) == [text]
    shown = in_json("get-time", "{}")
    (call,) = parse("hermes", in_json("weather", json.dumps({"city": shown})))
    assert json.loads(call.arguments) == {"city": shown}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("city", "\n two \n", "\n two \n"),
        ("city", "</parameter", "</parameter"),
        ("days", "5", 5),
        ("days", " 5 ", 5),
        ("days", "5.5", "5.5"),
        ("days", "five", "five"),
        ("days", "1_000", "1_000"),
        ("days", "True", "True"),
        ("days", "null", None),
        ("scale", "5", 5),
        ("scale", "-1.5e3", -1500.0),
        ("scale", "1e999", "1e999"),
        ("scale", "NaN", "NaN"),
        ("hourly", "true", True),
        ("hourly", "False", False),
        ("hourly", "1", "1"),
        ("hourly", "None", None),
        ("options", '{"a": [1, "b"]}', {"a": [1, "b"]}),
        ("options", "{'a': 1}", "{'a': 1}"),
        ("options", "[1]", "[1]"),
        ("places", '["a"]', ["a"]),
        ("places", "[" * 5000, "[" * 5000),
        ("note", "null", None),
        ("note", "5", "5"),
        ("limit", "5", 5),
        ("limit", "none", None),
        ("any", "5", "5"),
        ("unknown", "5", "5"),
    ],
)
def test_values_by_their_schema(key, text, value):
    (call,) = parse("qwen3_coder", in_xml("weather", **{key: text}))
    assert json.loads(call.arguments) == {key: value}
    assert type(json.loads(call.arguments)[key]) is type(value)


def test_a_schema_may_be_anything():
    for schema in (
        {"properties": 5},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": 5, "anyOf": 3}}},
    ):
        one = ToolCallParser("qwen3_coder", {"f": schema})
        assert [*one.feed(in_xml("f", a="1")), *one.finish()] == [ToolCall("f", '{"a": "1"}')]


# Any text

SCRAPS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<", ">", "\n", "  ", '"', "\\", "{", "}"),
    *("<function=weather>", "<function=", "</function>", "<parameter=city>", "</parameter>", "word", "é"),
    *('{"name": "weather", "arguments": {"city": "x"}}', '{"name": "get-time"', ', "arguments": {}}'),
    in_json("get-time", '{"zone": "</tool_call>"}'),
    in_xml("get-time", zone="</tool_call>"),
]
texts = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=4), max_size=25).map("".join)
places = st.lists(st.integers(0, 10**6), max_size=30)


@settings(deadline=None, max_examples=400)
@given(parser=st.sampled_from(FORMATS), text=texts, where=places)
@example("hermes", in_json("weather", '{"a": "\\\\"}'), [*range(60)])
def test_any_cut_of_any_text_gives_the_same(parser, text, where):
    whole = parse(parser, text)
    assert parse(parser, *cut(text, where)) == parse(parser, *text) == whole
    for item in whole:
        if isinstance(item, ToolCall):
            assert item.name in FUNCTIONS
            assert isinstance(json.loads(item.arguments), dict)
    if not any(isinstance(item, ToolCall) for item in whole):
        assert "".join(whole) == text


@settings(deadline=None, max_examples=100)
@given(
    parser=st.sampled_from(FORMATS), text=texts.filter(lambda text: "<tool_call>" not in text), where=places
)
def test_text_without_calls_is_unchanged_and_hardly_waits(parser, text, where):
    one, sent, fed = ToolCallParser(parser, FUNCTIONS), "", ""
    for piece in cut(text, where):
        fed += piece
        sent += "".join(one.feed(piece))
        waiting = fed.removeprefix(sent)
        assert "<tool_call>".startswith(waiting.lstrip())
    assert sent + "".join(one.finish()) == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
plain = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), min_size=1, max_size=20)
calls = st.tuples(st.sampled_from(sorted(FUNCTIONS)), st.dictionaries(st.text(), json_values, max_size=4))


@settings(deadline=None, max_examples=200)
@given(
    said=st.lists(plain.map(str.strip).filter(bool) | calls, max_size=6), ascii_=st.booleans(), where=places
)
def test_json_calls_come_back_as_they_were_written(said, ascii_, where):
    parts = [
        item if isinstance(item, str) else in_json(item[0], json.dumps(item[1], ensure_ascii=ascii_))
        for item in said
    ]
    got = parse("hermes", *cut("\n".join(parts), where))
    assert [(c.name, json.loads(c.arguments)) for c in got if isinstance(c, ToolCall)] == [
        item for item in said if not isinstance(item, str)
    ]
    written = "\n".join(item for item in said if isinstance(item, str))
    assert "".join(item for item in got if isinstance(item, str)).split() == written.split()


@settings(deadline=None, max_examples=150)
@given(
    values=st.dictionaries(st.sampled_from(["city", "any", "x"]), st.text(max_size=40), max_size=3),
    where=places,
)
def test_xml_calls_come_back_as_they_were_written(values, where):
    (call,) = parse("qwen3_coder", *cut(in_xml("weather", **values), where))
    assert json.loads(call.arguments) == values


def test_long_calls():
    """Thousands of hostile pieces; none of them makes a scan begin again."""
    for parser, begin, piece in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": "', "</tool_call>\\n"),
        ("qwen3_coder", "<tool_call><function=weather><parameter=a>", "</function></tool_call>"),
        ("hermes", "<tool_call>", "<tool_call>{}"),
    ):
        one = ToolCallParser(parser, FUNCTIONS)
        items = one.feed(begin)
        for _ in range(5_000):
            items += one.feed(piece)
        assert "".join([*items, *one.finish()]) == begin + piece * 5_000
