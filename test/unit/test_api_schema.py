"""Every field of every body: honoured, or accepted at its neutral values only, or refused by its name."""

from __future__ import annotations

import pytest

from flashspark.api.errors import RequestError
from flashspark.api.fields import RequestModel, neutral_fields
from flashspark.api.protocol import (
    BODIES,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerateBody,
    NativeSampling,
    ResponseFormat,
    SpeculationOptions,
    StreamOptions,
)
from flashspark.api.tool_fields import (
    CalledFunction,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    Tool,
    ToolFunction,
)

MODELS: dict[type[RequestModel], dict] = {model: {} for model in BODIES.values()} | {
    NativeSampling: {},
    StreamOptions: {},
    GenerateBody: {"text": "x"},
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    ChatMessage: {"role": "user", "content": "x"},
    SpeculationOptions: {"mode": "off"},
    ToolFunction: {"name": "f"},
    Tool: {"function": {"name": "f"}},
    NamedTool: {"function": {"name": "f"}},
    NamedFunction: {"name": "f"},
    CalledFunction: {"name": "f"},
    MessageToolCall: {"function": {"name": "f"}},
    ResponseFormat: {"type": "text"},
}
MODELS[BODIES["/detokenize"]] = {"tokens": [1]}
MODELS[BODIES["/set_internal_state"]] = {"server_args": {}}

# One good value per honoured field (or `Model.field`), where a default would not do as an example.
GOOD: dict[str, object] = {
    "prompt": "text",
    "text": "text",
    "input_ids": [1, 2],
    "messages": [{"role": "user", "content": "x"}],
    "tokens": [1],
    "sampling_params": {"temperature": 0},
    "speculation": {"mode": "off"},
    "stream_options": {"include_usage": True},
    "stop": ["a"],
    "stop_token_ids": [5],
    "logit_bias": {"5": 1.5},
    "rid": "r1",
    "max_tokens": 4,
    "max_new_tokens": 4,
    "max_completion_tokens": 4,
    "seed": -(2**63),
    "sampling_seed": 2**63 - 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "frequency_penalty": -2,
    "presence_penalty": 2,
    "repetition_penalty": 1.5,
    "stream_interval": 2,
    "best_of": 1,
    "extra_key": "k",
    "cache_salt": ["s"],
    "user": "u",
    "safety_identifier": "u",
    "metadata": {"a": 1},
    "chat_template_kwargs": {"a": 1},
    "role": "user",
    "content": "x",
    "name": "n",
    "reasoning_content": "r",
    "tool_call_id": "t",
    "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "type": "function",
    "function": {"name": "f"},
    "description": "d",
    "parameters": {"type": "object"},
    "arguments": "{}",
    "id": "t",
    "abort_message": "m",
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 5,
    "token_ids_logprob": [5],
    "top_logprobs": 5,
    "server_args": {"a": None, "b": True, "c": 1, "d": 0.5},
    "mode": "off",
    "max_verify_len": 4,
    "model": "m",
    "PauseBody.mode": "retract",
    "output_dir": "traces",
    "activities": ["CPU", "GPU"],
    "profile_prefix": "run-1",
    "num_steps": "5",
    "json_schema": {"schema": {}},
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "structural_tag": "{}",
    "response_format": {"type": "json_object"},
    "ResponseFormat.type": "text",
    "structures": [{}],
    "triggers": ["a"],
    "format": {},
}
WRONG = {"bool": "yes", "str": 5}


def fields(honoured: bool) -> list:
    return [
        pytest.param(model, name, id=f"{model.__name__}.{name}")
        for model in MODELS
        for name in model.model_fields
        if (name not in neutral_fields(model)) == honoured
    ]


def refusal(model: type[RequestModel], body: object) -> RequestError:
    with pytest.raises(RequestError) as error_info:
        model.parse(body)
    assert error_info.value.status == 400
    return error_info.value


@pytest.mark.parametrize(("model", "name"), fields(honoured=True))
def test_honoured_field_takes_good_values_and_null(model, name):
    info = model.model_fields[name]
    good = not info.default if isinstance(info.default, bool) else 1
    good = GOOD.get(f"{model.__name__}.{name}", GOOD.get(name, good))
    parsed = model.parse({**MODELS[model], name: good})
    assert name in parsed.model_fields_set
    if not info.is_required() and name not in model.NULLABLE:
        without = {key: value for key, value in MODELS[model].items() if key != name}
        assert getattr(model.parse({**without, name: None}), name) == info.default


@pytest.mark.parametrize(("model", "name"), fields(honoured=True))
def test_honoured_field_refuses_another_type_by_name(model, name):
    # A value no field takes: a whole number that is a fraction, inside a list inside a list.
    error = (
        refusal(model, {**MODELS[model], name: [[1.5]]})
        if name not in {"prompt", "input_ids", "tokens"}
        else None
    )
    if error is not None:
        assert error.param.startswith(name), error.message
        assert error.message.startswith(name)


@pytest.mark.parametrize(("model", "name"), fields(honoured=False))
def test_neutral_field_takes_its_neutral_values_only(model, name):
    spec = neutral_fields(model)[name]
    for value in spec["enum"]:
        model.parse({**MODELS[model], name: value})
    for value in (7, "something", [3], {"a": 1}, 0.5):
        error = refusal(model, {**MODELS[model], name: value})
        assert error.param == name
        assert error.code == "unsupported_value"
        assert name in error.message
        assert "accepted only as" in error.message
    others = [value for value in (True, False) if not any(value is item for item in spec["enum"])]
    for value in others:
        assert refusal(model, {**MODELS[model], name: value}).param == name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_unknown_field_is_refused_by_name(model):
    error = refusal(model, {**MODELS[model], "no_such_field": None, "another": 1})
    assert error.code == "unknown_field"
    assert "another" in error.message


@pytest.mark.parametrize("body", [None, [], "text", 5, True])
@pytest.mark.parametrize("model", BODIES.values(), ids=lambda model: model.__name__)
def test_body_must_be_an_object(model, body):
    assert "JSON object" in refusal(model, body).message


@pytest.mark.parametrize("model", [NativeSampling, CompletionBody, ChatBody])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "0"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("n", 0),
        ("n", 1000),
        ("n", 1.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 33),
        ("stop", ["a", None]),
        ("stop", 5),
        ("stop_token_ids", [1, None]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", 1),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": float("inf")}),
        ("logit_bias", [1]),
        ("ignore_eos", 1),
    ],
)
def test_sampling_ranges(model, name, value):
    error = refusal(model, {**MODELS[model], name: value})
    assert error.param.split("[")[0].split(".")[0] == name
    assert error.message.startswith(name)


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, 2.0**70])
def test_openai_token_numbers(value):
    for model, name in ((CompletionBody, "max_tokens"), (ChatBody, "max_completion_tokens")):
        assert refusal(model, {**MODELS[model], name: value}).param == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        *(
            ({"tools": [{"function": {"name": name}}]}, "tools[0].function.name")
            for name in ("", "a b", "a>", "é", "x" * 129, "a\n", 5)
        ),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f", "more": 1}}]}, "tools[0].function.more"),
        ({"tools": [{"function": {"name": "f"}}] * 1025}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.function"),
        ({"tool_choice": {"function": {"name": ""}}}, "tool_choice.function.name"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_tools_are_refused_by_path(fields, name):
    error = refusal(ChatBody, {**MODELS[ChatBody], **fields})
    assert error.param == name
    assert name in error.message


def test_limits_are_named():
    assert "128" in refusal(CompletionBody, {"prompt": "x", "n": 1000}).message
    assert "32" in refusal(CompletionBody, {"prompt": "x", "stop": ["a"] * 33}).message


def test_native_null_and_zero_tokens():
    assert NativeSampling.parse({"max_new_tokens": None}).max_new_tokens is None
    assert NativeSampling.parse({}).max_new_tokens == 128
    assert NativeSampling.parse({"max_new_tokens": 0}).max_new_tokens == 0
    assert refusal(NativeSampling, {"max_new_tokens": -1}).param == "max_new_tokens"


def test_nested_fields_are_named_by_path():
    message = {"role": "user", "content": "x"}
    assert refusal(ChatBody, {"messages": [message, {"role": "nobody"}]}).param == "messages[1].role"
    calls = {**message, "tool_calls": [{}]}
    assert refusal(ChatBody, {"messages": [calls]}).param == "messages[0].tool_calls[0].function"
    for speculation, name in (
        ({"mode": "fast"}, "mode"),
        ({"max_verify_len": 2}, "mode"),
        ({"mode": "static", "max_verify_len": 0}, "max_verify_len"),
        ({"mode": "static", "max_verify_len": 2.0}, "max_verify_len"),
        ({"mode": "adaptive", "max_verify_len": True}, "max_verify_len"),
        ({"mode": "off", "min_verify_len": 1}, "min_verify_len"),
    ):
        for model, good in ((GenerateBody, "text"), (CompletionBody, "prompt")):
            assert refusal(model, {good: "x", "speculation": speculation}).param == f"speculation.{name}"
    assert ChatBody.parse({"messages": [{"role": "USER", "content": "x"}]}).messages[0].role == "user"


# What the clients of the design page send without meaning it.
CLIENT_BODIES = [
    (
        GenerateBody,
        {
            "text": "x",
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
            "stream": True,
            "lora_path": None,
            "return_logprob": False,
            "return_routed_experts": False,
            "logprob_start_len": -1,
        },
    ),
    (
        GenerateBody,
        {
            "text": "x",
            "model": None,
            "return_text_in_logprobs": False,
            "log_metrics": True,
            "return_hidden_states": False,
            "background": False,
            "no_logs": False,
            "return_bytes": False,
            "return_entropy": False,
        },
    ),
    (
        CompletionBody,
        {
            "model": "m",
            "prompt": "x",
            "best_of": 1,
            "max_tokens": 8,
            "stream": True,
            "temperature": 0.0,
            "ignore_eos": True,
            "echo": False,
        },
    ),
    (
        ChatBody,
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_completion_tokens": 8,
            "logprobs": False,
            "no_stop_trim": False,
            "ignore_eos": False,
            "continue_final_message": False,
            "skip_special_tokens": True,
            "separate_reasoning": True,
            "stream_reasoning": True,
            "return_hidden_states": False,
        },
    ),
]


@pytest.mark.parametrize(("model", "body"), CLIENT_BODIES)
def test_bodies_of_real_clients_are_accepted(model, body):
    model.parse(body)
