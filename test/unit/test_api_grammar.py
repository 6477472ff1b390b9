"""Structured output at the API: which grammar a body asks for, and that a bad one is a 400 before a stream begins."""

from __future__ import annotations

import json

import pytest

from fake_server import FakeServer
from flashspark.api.errors import RequestError
from flashspark.api.grammar import grammar_spec, json_schema_spec
from flashspark.api.protocol import ChatBody, CompletionBody, NativeSampling
from flashspark.ipc import GrammarSpec
from tiny_models import write_tokenizer
from unit.test_api_refusals import OPENAI, body_for, refused

CHAT = {"messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "integer"}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
OBJECT = {"type": "object"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with FakeServer(write_tokenizer(tmp_path_factory.mktemp("model"))) as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({}, None, None),
        ({"json_schema": "", "regex": "", "ebnf": "", "structural_tag": "", "response_format": None}, None, None),
        ({"response_format": {"type": "text"}}, None, None),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": {}}, "json_schema", {}),
        ({"json_schema": "true"}, "json_schema", True),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structural_tag": TAG}, "structural_tag", TAG),
        ({"structural_tag": json.dumps(TAG)}, "structural_tag", TAG),
        ({"response_format": {"type": "json_object"}}, "json_schema", OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_schema", OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            "structural_tag",
            {"type": "structural_tag", **TAG},
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            {"type": "structural_tag", "format": {"type": "any_text"}},
        ),
    ],
)  # fmt: skip
def test_spec_of_a_body(fields, kind, text):
    bodies = [ChatBody.parse(CHAT | fields), CompletionBody.parse({"prompt": "x"} | fields)]
    if "response_format" not in fields:
        bodies.append(NativeSampling.parse(fields))
    for body in bodies:
        spec = grammar_spec(body)
        if kind is None:
            assert spec is None
        else:
            assert spec.kind == kind
            assert (json.loads(spec.text) if kind in {"json_schema", "structural_tag"} else spec.text) == text
            assert spec.field.split(".")[0] in fields


def test_spec_of_a_schema_for_other_callers():
    assert json_schema_spec(SCHEMA, "tools[0]") == GrammarSpec(
        "json_schema", '{"type":"integer"}', "tools[0]"
    )
    with pytest.raises(RequestError) as error_info:
        json_schema_spec("nope", "tools[0]")
    assert error_info.value.param == "tools[0]"


@pytest.mark.parametrize("path", [*OPENAI, "/generate"])
def test_two_grammars(server, path):
    message = refused(server.client.post(path, json=body_for(path, regex="a", ebnf="b")), path)
    assert "regex" in message and "ebnf" in message and "only one" in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"a": "BAD"}}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": "{"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}, "response_format.json_schema.shema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "structural_tag"}, "response_format"),
        ({"type": "structural_tag", "format": {"type": "BAD"}}, "response_format"),
        ({}, "response_format.type"),
    ],
)  # fmt: skip
def test_bad_response_formats(server, path, form, param, stream):
    response = server.client.post(path, json=body_for(path, response_format=form) | {"stream": stream})
    refused(response, path)
    assert response.json()["param"] == param
    assert param in response.json()["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_grammar_of_a_batch(server, stream):
    """However far the others are, none of them has been shown."""
    samplings = [
        {"max_new_tokens": 40, "regex": "a+"},
        {"max_new_tokens": 40},
        {"max_new_tokens": 40, "regex": "BAD", "sampling_seed": -5},
    ]
    body = {"text": ["ab", "cd", "ef"], "sampling_params": samplings, "stream": stream}
    message = refused(server.client.post("/generate", json=body), "/generate")
    assert message == "sampling_params.regex: this is no regex"
    samplings[2]["regex"] = "b+"
    assert server.client.post("/generate", json=body).status_code == 200


def test_streams_show_no_empty_frame(server):
    """The scheduler says when a grammar is taken; no client sees that."""
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 4, "regex": "a+"}, "stream": True}
    events = server.client.post("/generate", json=body).text.split("\n\n")
    texts = [
        json.loads(event.removeprefix("data: "))["text"] for event in events if event.startswith("data: {")
    ]
    assert texts == ["abab"] or texts[-1] == "abab"
    assert all(texts)
