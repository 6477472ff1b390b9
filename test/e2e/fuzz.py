"""A fuzzer that knows the grammar of requests: valid bodies from the request models, and mutations of them.

    outcome = fuzz(server, num_requests=2000, seed=1)

Request i of a seed is always the same one. Fields come from the models themselves, so that a new field is sent
without anybody's doing: by its entry in `GRAMMAR` where it has one, else by what its JSON schema allows.
"""

from __future__ import annotations

import argparse
import copy
import functools
import http.client
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from flashspark.api.fields import RequestModel, neutral_fields
from flashspark.api.protocol import (
    BODIES,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerateBody,
    NativeSampling,
    StreamOptions,
)
from flashspark.api.tool_fields import MessageToolCall, Tool, ToolFunction

Draw = random.Random
NUM_CLIENTS = 12
MAX_NEW_TOKENS = 6
VOCAB_SIZE = 260  # of the tiny pair
WORDS = ("def", " x", "(", ")", ":\n", " é", "日本", "🎉", "\t", "\\", '"', "<|im_end|>", "0")

# What is asked how often: the routes that generate carry most of the surface.
WEIGHTS = {"/generate": 30, "/v1/completions": 25, "/v1/chat/completions": 25}
# Asked alone, since they hold up everybody else, and what undoes them.
ALONE = {"/pause_generation": "/continue_generation", "/start_profile": "/stop_profile"}
# Sent before anything else: what once failed. With a stop id that is suppressed, no token may be left.
_MINIMUM = {"max_new_tokens": 4, "min_new_tokens": 4, "stop_token_ids": [176]}
KNOWN: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    ("/generate", {"text": '"', "sampling_params": _MINIMUM | {"regex": regex}, "stream": stream})
    for regex in ("🎉", "xx🎉", "xx(🎉)?")
    for stream in (False, True)
)
LOOKS = (  # requests without a body
    *("/health", "/ready", "/ping", "/", "/v1/models", "/v1/models/tiny", "/v1/models/other", "/model_info"),
    *(
        "/get_model_info",
        "/get_load",
        "/metrics",
        "/no/such/path",
        "/generate",
        "/server_info?x=%00",
        "/docs",
    ),
    *("/v1/loads?include=core,spec", "/v1/loads?include=nothing", "/v1/loads?format=prometheus&dp_rank=x"),
)


def text(draw: Draw, most: int = 8) -> str:
    return "".join(draw.choices(WORDS, k=draw.randint(1, most)))


def ids(draw: Draw, most: int = 12) -> list[int]:
    return [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, most))]


def few(draw: Draw, make: Callable[[Draw], Any], most: int = 3) -> list[Any]:
    return [make(draw) for _ in range(draw.randint(1, most))]


def _rid(draw: Draw) -> str:
    return f"fuzz-{draw.randrange(2**40)}"


def _content(draw: Draw) -> Any:
    if draw.random() < 0.7:
        return text(draw)
    return [{"type": "text", "text": part} for part in few(draw, text)]


def _message(draw: Draw) -> dict[str, Any]:
    return body_of(ChatMessage, draw, {"role", "content"}, rate=0.15)


def _tools(draw: Draw) -> list[dict[str, Any]]:
    names = draw.sample(["weather", "get-time", "f.g"], draw.randint(1, 3))
    tools = [body_of(Tool, draw, {"function"}, rate=0.5) for _ in names]
    for tool, name in zip(tools, names, strict=True):
        tool["function"] = body_of(ToolFunction, draw, {"name"}, rate=0.5) | {"name": name}
    return tools


def _tool_call(draw: Draw) -> dict[str, Any]:
    call = body_of(MessageToolCall, draw, {"function"}, rate=0.5)
    arguments = draw.choice(['{"city": "é"}', "{}", "", {"city": [1, None]}])
    call["function"] = {"name": "weather", "arguments": arguments}
    return call


def _stop_token_ids(draw: Draw) -> list[int]:
    return ids(draw, 3)


def _temperature(draw: Draw) -> Any:
    return draw.choice([0, 0.0, 1e-320, 1e-6, 0.7, 1, 1.3, 100, 1e6])


# Values that make sense, by name of a field: the same in every model that has the name, or `Model.field` for one.
GRAMMAR: dict[str, Callable[[Draw], Any]] = {
    "prompt": lambda draw: draw.choice([text, ids, lambda d: few(d, text), lambda d: few(d, ids)])(draw),
    "TokenizeBody.prompt": lambda draw: draw.choice([text, lambda d: few(d, text)])(draw),
    "text": lambda draw: text(draw) if draw.random() < 0.8 else few(draw, text),
    "input_ids": lambda draw: ids(draw) if draw.random() < 0.8 else few(draw, ids),
    "messages": lambda draw: few(draw, _message),
    "content": _content,
    "role": lambda draw: draw.choice(["system", "developer", "user", "assistant", "tool", "USER"]),
    "tokens": lambda draw: ids(draw) if draw.random() < 0.8 else few(draw, ids),
    "sampling_params": lambda draw: body_of(NativeSampling, draw, {"max_new_tokens"}, rate=0.15),
    "max_new_tokens": lambda draw: draw.randint(0, MAX_NEW_TOKENS),
    "max_tokens": lambda draw: draw.randint(1, MAX_NEW_TOKENS),
    "max_completion_tokens": lambda draw: draw.randint(1, MAX_NEW_TOKENS),
    "min_new_tokens": lambda draw: draw.choice([0, 0, 1]),
    "min_tokens": lambda draw: draw.choice([0, 0, 1]),
    "n": lambda draw: draw.choice([1, 1, 2, 3]),
    "temperature": _temperature,
    "top_p": lambda draw: draw.choice([1, 1.0, 0.5, 1e-300]),
    "top_k": lambda draw: draw.choice([-1, 1, 5, 2**31 - 1]),
    "min_p": lambda draw: draw.choice([0, 0.1, 1]),
    "frequency_penalty": lambda draw: draw.uniform(-2, 2),
    "presence_penalty": lambda draw: draw.uniform(-2, 2),
    "repetition_penalty": lambda draw: draw.choice([1e-320, 0.5, 1, 1.2, 2]),
    "stop": lambda draw: draw.choice([text(draw, 2), few(draw, text), []]),
    "stop_token_ids": _stop_token_ids,
    "logit_bias": lambda draw: {str(i): draw.choice([-10000, -1.5, 10000]) for i in ids(draw, 4)},
    "seed": lambda draw: draw.choice([0, -1, 2**63 - 1, -(2**63)]),
    "sampling_seed": lambda draw: draw.choice([0, -1, 2**63 - 1, -(2**63)]),
    "rid": _rid,
    "stream_options": lambda draw: body_of(StreamOptions, draw, set(), rate=0.6),
    "best_of": lambda draw: 1,
    "tools": _tools,
    "tool_choice": lambda draw: draw.choice(
        ["auto", "none", *[{"type": "function", "function": {"name": "weather"}}] * 3]
    ),
    "tool_calls": lambda draw: few(draw, _tool_call),
    "chat_template_kwargs": lambda draw: {"enable_thinking": draw.random() < 0.5},
    "metadata": lambda draw: {"who": text(draw)},
    "abort_all": lambda draw: draw.random() < 0.1,
    "output_dir": lambda draw: "",  # the default
    "profile_prefix": lambda draw: "fuzz",
    "activities": lambda draw: ["CPU"],
    "start_step": lambda draw: "0",
    "num_steps": lambda draw: draw.choice([0, 1, "2"]),
    "server_args": lambda draw: draw.choice(
        [
            *({"speculative_accept_threshold_single": 1.0}, {"speculation": True}, {"no_such_setting": 1}),
            *(
                {"speculative_num_draft_tokens": draw.choice([None, 2, 99])},
                {"dspark_force_budget_frac": 0.5},
            ),
        ]
    ),
}
# Fields that a body of the model cannot do without, and pairs of which only one may be given.
NEEDED: dict[type[RequestModel], set[str]] = {
    GenerateBody: {"sampling_params"},
    CompletionBody: {"max_tokens"},
    ChatBody: {"max_tokens"},
    BODIES["/abort_request"]: {"rid"},
}
ONE_OF: dict[type[RequestModel], tuple[str, str]] = {
    GenerateBody: ("text", "input_ids"),
    BODIES["/tokenize"]: ("prompt", "messages"),
}
ODD = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 5e-324),
    *("", "x", "\x00", "\ud800", "1", "true", [], [[]], [None], {}, {"a": {"b": []}}, ["a", 1]),
    *({"type": "text"}, "𝄞" * 40, [[[[[[]]]]]], list(range(300)), {str(i): i for i in range(300)}),
)


def body_of(model: type[RequestModel], draw: Draw, always: set[str], rate: float = 0.1) -> dict[str, Any]:
    """A valid body: `always`, whatever is required, and each other field with probability `rate`."""
    neutral = neutral_fields(model)
    schema = _schema(model)
    body = {}
    for name, info in model.model_fields.items():
        if not (info.is_required() or name in always or draw.random() < rate):
            continue
        if name in neutral:
            body[name] = copy.deepcopy(draw.choice(neutral[name]["enum"]))
        elif (make := GRAMMAR.get(f"{model.__name__}.{name}") or GRAMMAR.get(name)) is not None:
            body[name] = make(draw)
        else:
            body[name] = from_schema(draw, schema["properties"][name], schema.get("$defs", {}))
    return body


@functools.cache
def _schema(model: type[RequestModel]) -> dict[str, Any]:
    return model.model_json_schema()


def from_schema(draw: Draw, schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """A value of a JSON schema, for fields that `GRAMMAR` does not know."""
    if "$ref" in schema:
        return from_schema(draw, definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return from_schema(draw, draw.choice(schema[key]), definitions)
    if "const" in schema:
        return copy.deepcopy(schema["const"])
    if "enum" in schema:
        return copy.deepcopy(draw.choice(schema["enum"]))
    match schema.get("type"):
        case "boolean":
            return draw.random() < 0.5
        case "integer":
            least = schema.get("minimum", 0)
            return draw.choice([least, max(least, 1), min(least + 3, schema.get("maximum", least + 3))])
        case "number":
            return schema.get("maximum", schema.get("minimum", 1))
        case "string":
            return text(draw, 2)[: schema.get("maxLength")]
        case "array":
            return [from_schema(draw, schema.get("items", {}), definitions)]
        case "object":
            needed = schema.get("required", [])
            properties = schema.get("properties", {})
            names = [name for name in properties if name in needed or draw.random() < 0.3]
            return {name: from_schema(draw, properties[name], definitions) for name in names}
    return None


@dataclass
class Case:
    """One request, and the model fields it carries (`GenerateBody.text`)."""

    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    fields: set[str] = field(default_factory=set)
    is_valid: bool = True


def case(seed: int, index: int) -> Case:
    """Request `index` of a run."""
    draw = Draw(f"{seed}:{index}")
    if draw.random() < 0.06:
        return Case(
            draw.choice(["GET", "GET", "HEAD", "OPTIONS", "DELETE"]), draw.choice(LOOKS), is_valid=False
        )
    paths = [path for path in BODIES if path not in ALONE and path not in ALONE.values()]
    path = draw.choices(paths, [WEIGHTS.get(path, 3) for path in paths])[0]
    model = BODIES[path]
    always = set(NEEDED.get(model, ()))
    chosen = draw.choice(ONE_OF[model]) if model in ONE_OF else None
    body = body_of(model, draw, always | ({chosen} if chosen else set()))
    for other in ONE_OF.get(model, ()):
        if other != chosen:
            body.pop(other, None)
    _agree(model, body)
    is_valid = draw.random() < 0.6
    if not is_valid:
        for _ in range(draw.choice([1, 1, 2, 4])):
            mutate(draw, body)
    fields = set(fields_of(model, body))
    # What JSON cannot hold is written as Python writes it, half surrogates and infinities included.
    content = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")
    headers = {"content-type": "application/json"}
    method = "POST"
    if not is_valid and draw.random() < 0.15:
        content = spoil(draw, content)
    if draw.random() < 0.03:
        odd = ("text/plain", "application/json; charset=latin-1", "", "application/x-www-form-urlencoded")
        headers = {"content-type": draw.choice(odd), "x-request-id": draw.choice(["a b", "é", "x" * 300])}
        is_valid = False
    if draw.random() < 0.02:
        method, is_valid = draw.choice(["PUT", "PATCH", "DELETE"]), False
    return Case(method, path, content, headers, fields, is_valid)


def known() -> Iterator[Case]:
    """The requests of `KNOWN`."""
    for path, body in KNOWN:
        headers = {"content-type": "application/json"}
        yield Case("POST", path, json.dumps(body).encode(), headers, set(fields_of(BODIES[path], body)))


def alone(seed: int, index: int, path: str) -> Case:
    """A valid request for a path of `ALONE`, with every field."""
    model = BODIES[path]
    body = body_of(model, Draw(f"{seed}:{index}:{path}"), set(), rate=1)
    headers = {"content-type": "application/json"}
    return Case("POST", path, json.dumps(body).encode(), headers, set(fields_of(model, body)))


def _agree(model: type[RequestModel], body: dict[str, Any]) -> None:
    """Mends what is good field by field and contradicts itself."""
    if "stream_options" in body:
        body["stream"] = True
    if isinstance(speculation := body.get("speculation"), dict) and speculation["mode"] == "off":
        speculation.pop("max_verify_len", None)
    for message in body.get("messages", ()):
        if message.get("tool_calls"):
            message["role"] = "assistant"
    if body.get("continue_final_message"):
        body["messages"].append({"role": "assistant", "content": "def"})
    if "messages" not in body:
        body.pop("tools", None)
    if isinstance(body.get("tool_choice"), dict):
        body["tools"] = [{"function": {"name": "weather"}}]
    if "tools" in body:  # may be a grammar, and there can be one only
        for name in ("response_format", "regex", "json_schema", "ebnf", "structural_tag"):
            body.pop(name, None)
    if model is GenerateBody:
        sampling = body["sampling_params"]
        sampling["min_new_tokens"] = min(sampling.get("min_new_tokens") or 0, sampling["max_new_tokens"])


def mutate(draw: Draw, value: Any) -> None:
    """Changes something somewhere in a JSON value, in place: what is put in has to be a copy."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = draw.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.6:
        mutate(draw, value[key])
        return
    match draw.choice(["odd", "odd", "odd", "drop", "add", "nest", "scale"]):
        case "odd":
            value[key] = copy.deepcopy(draw.choice(ODD))
        case "drop":
            del value[key]
        case "add" if isinstance(value, dict):
            value[draw.choice(["no_such_field", "", "text", "prompt", "__class__", "a" * 400])] = (
                copy.deepcopy(draw.choice(ODD))
            )
        case "nest":
            value[key] = [value[key]] if draw.random() < 0.5 else {"value": value[key]}
        case "scale" if isinstance(value[key], int | float):
            value[key] = value[key] * draw.choice([-1, 1.5, 10**6, 1e300])


def spoil(draw: Draw, content: bytes) -> bytes:
    """Bytes that are mostly no JSON any more."""
    at = draw.randrange(len(content) + 1)
    odd = (b"", b"\xff\xfe", b"\x00", b"{", b"]", b"NaN", b'"' + b"[" * 2000, b",,", b"\\ud800")
    return content[:at] + draw.choice(odd) + content[min(len(content), at + draw.randrange(4)) :]


def fields_of(model: type[RequestModel], body: Any) -> Iterator[str]:
    """`Model.field` of every field that a body carries, those of nested models included."""
    if not isinstance(body, dict):
        return
    for name, value in body.items():
        if name not in model.model_fields:
            continue
        yield f"{model.__name__}.{name}"
        inner = nested(model, name)
        for item in value if isinstance(value, list) else [value]:
            if inner is not None:
                yield from fields_of(inner, item)


def nested(model: type[RequestModel], name: str) -> type[RequestModel] | None:
    """The request model that a field holds, alone or in a list."""
    if name == "sampling_params":
        return NativeSampling  # parsed by hand
    found: list[type[RequestModel]] = []

    def walk(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, RequestModel):
            found.append(annotation)
        for part in getattr(annotation, "__args__", ()):
            walk(part)

    walk(model.model_fields[name].annotation)
    return found[0] if found else None


def every_field() -> set[str]:
    """All that there is to hit."""
    names: set[str] = set()

    def walk(model: type[RequestModel]) -> None:
        for name in model.model_fields:
            names.add(f"{model.__name__}.{name}")
            if (inner := nested(model, name)) is not None:
                walk(inner)

    for body in BODIES.values():
        walk(body)
    return names


@dataclass
class Outcome:
    """What became of a run."""

    statuses: Counter[int] = field(default_factory=Counter)
    refused_valid: Counter[str] = field(
        default_factory=Counter
    )  # messages, of bodies that should have been good
    sent: set[str] = field(default_factory=set)  # fields
    answered: set[str] = field(default_factory=set)  # fields of requests that got a 200
    failures: list[str] = field(default_factory=list)

    def add(self, one: Case, status: int, answer: bytes) -> None:
        """Judges one answer."""
        self.statuses[status] += 1
        self.sent |= one.fields
        if status == 200:
            self.answered |= one.fields
            if answer.startswith(b"data: ") and not answer.endswith(b"data: [DONE]\n\n"):
                self.failures.append(f"a stream without an end: {one} gave {answer[-300:]!r}")
            elif b'"code":500' in answer:
                self.failures.append(f"{one} gave {answer[-300:]!r}")
        elif status >= 500 and status != 503:
            self.failures.append(f"{status}: {one} gave {answer[:300]!r}")
        elif one.is_valid:
            self.refused_valid[answer[:120].decode(errors="replace")] += 1
        if 400 <= status < 500 and one.method not in {"HEAD"}:
            self._check_refusal(one, answer)

    def merge(self, other: Outcome) -> None:
        """Takes in another run's."""
        self.statuses += other.statuses
        self.refused_valid += other.refused_valid
        self.sent |= other.sent
        self.answered |= other.answered
        self.failures += other.failures

    def _check_refusal(self, one: Case, answer: bytes) -> None:
        try:
            body = json.loads(answer)
        except ValueError:
            body = None
        if not isinstance(body, dict) or not (body.get("error") or body.get("detail") or body.get("message")):
            self.failures.append(f"a refusal that says nothing: {one} gave {answer[:300]!r}")


def send(port: int, one: Case, timeout_s: float = 120) -> tuple[int, bytes]:
    """Status and the whole answer, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        headers = {name: value.encode("utf-8").decode("latin-1") for name, value in one.headers.items()}
        connection.request(one.method, one.path, one.content or None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def fuzz(port: int, num_requests: int, seed: int, first: int = 0) -> Outcome:
    """Sends requests `first` … `first + num_requests - 1` of a seed, some at once, and judges every answer. Before
    them, each path of `ALONE` once, and `KNOWN`."""
    outcome = Outcome()
    for one in known():
        outcome.add(one, *send(port, one))
    for path, undo in ALONE.items():
        one = alone(seed, first, path)
        outcome.add(one, *send(port, one))
        send(port, Case("POST", undo))
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        cases = (case(seed, first + i) for i in range(num_requests))
        for one, (status, answer) in pool.map(lambda one: (one, send(port, one)), cases):
            outcome.add(one, status, answer)
    return outcome


def main() -> None:
    """Process entry: fuzzes a server of the tiny pair that runs already."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="index of the first request")
    options = parser.parse_args()
    outcome = fuzz(options.port, options.num_requests, options.seed, options.first)
    print(f"{dict(outcome.statuses)}, never answered: {sorted(every_field() - outcome.answered)}")
    print("\n".join(outcome.failures) or "no failures")


if __name__ == "__main__":
    main()
