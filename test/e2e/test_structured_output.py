"""Structured output of a live server with the shipped pair: what clients send, and what they get."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest

from e2e.server import Server

MESSAGES: list[Any] = [{"role": "user", "content": "Describe a function."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "arguments": {"type": "array", "items": {"enum": ["self", "x", "y"]}, "minItems": 1, "maxItems": 3},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "arguments", "lines"],
    "additionalProperties": False,
}


class Function(pydantic.BaseModel):
    """`SCHEMA`, as a judge of its own."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    name: str = pydantic.Field(pattern="^[a-z_]{1,12}$")
    arguments: list[str] = pydantic.Field(min_length=1, max_length=3)
    lines: int = pydantic.Field(ge=1, le=99)


def json_schema(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "function", "schema": schema, "strict": True}}


@pytest.fixture(autouse=True)
def nothing_left_behind(demo: Server) -> Any:
    yield
    assert demo.wait_idle()["num_grammar_queue_reqs"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chat_answers_with_json_of_the_schema(demo: Server, temperature: float) -> None:
    client = demo.openai()
    options: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "max_tokens": 400,
        "temperature": temperature,
        "seed": 5,
        "response_format": json_schema(SCHEMA),
    }
    answer = client.chat.completions.create(**options, n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    for choice in answer.choices:
        Function.model_validate_json(choice.message.content or "")
    chunks = list(client.chat.completions.create(**options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    # The whole of it is in the answers of the other ways to ask, with and without the draft.
    native = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 400}
    drafted, plain = (
        demo.generate("def f", **native, speculation={"mode": mode}) for mode in ("static", "off")
    )
    Function.model_validate_json(drafted["text"])
    assert drafted["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    assert drafted["output_ids"] == plain["output_ids"]


def test_any_json_object(demo: Server) -> None:
    answer = demo.openai().chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=60, temperature=0, response_format={"type": "json_object"}
    )
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


def test_regex_and_ebnf(demo: Server) -> None:
    text = demo.generate("The version is", regex=r"v[0-9]{1,2}\.[0-9]{1,2}", max_new_tokens=40)["text"]
    assert re.fullmatch(r"v[0-9]{1,2}\.[0-9]{1,2}", text)
    grammar = 'root ::= "def " name "(" name "):"\nname ::= [a-z]{1,8}'
    completion = demo.openai().completions.create(
        model="demo", prompt="#", max_tokens=60, temperature=0.8, extra_body={"ebnf": grammar}
    )
    assert re.fullmatch(r"def [a-z]{1,8}\([a-z]{1,8}\):", completion.choices[0].text)
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "Hello, world."}}
    assert demo.generate("Say it:", structural_tag=tag, max_new_tokens=60)["text"] == "Hello, world."


@pytest.mark.parametrize("stream", [False, True])
def test_bad_grammars_are_400_and_name_the_field(demo: Server, stream: bool) -> None:
    client = demo.openai()
    with pytest.raises(openai.BadRequestError) as error_info:
        client.chat.completions.create(
            model="demo", messages=MESSAGES, response_format=json_schema({"type": "objekt"}), stream=stream
        )
    assert error_info.value.param == "response_format.json_schema.schema"
    assert "objekt" in error_info.value.message
    for field, value, word in (
        ("regex", "(ab", "parenthesis"),
        ("ebnf", 'root ::= "a" other', "other"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("structural_tag", {"format": {"type": "other"}}, "other"),
    ):
        with pytest.raises(openai.BadRequestError) as error_info:
            client.completions.create(model="demo", prompt="a", extra_body={field: value}, stream=stream)
        assert error_info.value.param == field
        body = {"text": "a", "sampling_params": {field: value}, "stream": stream}
        response = demo.http.post("/generate", json=body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message.startswith(f"sampling_params.{field}: ")
        assert word in message


def test_a_grammar_that_takes_too_much_fails_alone(demo: Server) -> None:
    """Others with grammars and without are served while it is followed, and so is everybody afterwards."""
    bad = "(((a{1,100}){1,100}){1,100}){1,100}"
    with ThreadPoolExecutor(6) as pool:
        sampling = {"regex": bad, "max_new_tokens": 400, "temperature": 0}
        body = {"text": "a", "sampling_params": sampling}
        refused = [pool.submit(demo.http.post, "/generate", json=body) for _ in range(2)]
        numbers = [
            pool.submit(demo.generate, "It is", regex="[0-9]{12}", max_new_tokens=30) for _ in range(2)
        ]
        free = [pool.submit(demo.generate, "It is", max_new_tokens=20, ignore_eos=True) for _ in range(2)]
        for answer in numbers:
            assert re.fullmatch("[0-9]{12}", answer.result()["text"])
        assert [len(answer.result()["output_ids"]) for answer in free] == [20, 20]
    for answer in refused:
        assert answer.result().status_code == 400
        message = answer.result().json()["error"]["message"]
        assert message.startswith("sampling_params.regex: ") and "too complex" in message
    assert re.fullmatch("[0-9]{5}", demo.generate("It is", regex="[0-9]{5}", max_new_tokens=30)["text"])
