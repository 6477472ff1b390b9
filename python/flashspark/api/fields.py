"""What can be said about one request field: the types both APIs share, and the mark of a neutral-only field.

Every field of every request model is either honoured or made by `neutral`. An explicit null equals absence,
unless a model lists the field in `NULLABLE`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .errors import RequestError

MAX_CHOICES = 128
MAX_ANSWERS_PER_CALL = 4096  # prompts times choices
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_LOGIT_BIAS = 16384
MAX_MESSAGES = 16384
MAX_TOP_LOGPROBS = 256
MAX_LOGPROB_IDS = 256
MAX_PROMPT_LOGPROBS = 1 << 18  # of all prompts of a call: they come at once, and everyone else waits
MAX_GRAMMAR_CHARS = 1 << 17
MAX_FIELDS = 256  # of one object, known or not
INT64 = 2**63


def neutral(default: Any = None, *others: Any, remedy: str = "this feature is not available yet") -> Any:
    """A field that clients send without meaning it: accepted at `default`, `others` and null only."""
    values = [None, *(value for value in (default, *others) if value is not None)]
    return Field(default, json_schema_extra={"enum": values, "x-support": "neutral", "x-remedy": remedy})


def _is(value: Any, neutral_value: Any) -> bool:
    """Equal in JSON's sense: true is not 1, but 0 is 0.0."""
    if isinstance(value, bool) or isinstance(neutral_value, bool):
        return value is neutral_value
    return bool(value == neutral_value)


def _stop_list(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(stops)} entries, the limit is {MAX_STOP_STRINGS}")
    for stop in stops:
        if not stop:
            raise ValueError("must not contain an empty string")
        if len(stop) > MAX_STOP_CHARS:
            raise ValueError(f"has a string of {len(stop)} characters, the limit is {MAX_STOP_CHARS}")
    return stops


def _top_k(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value != -1 and not 1 <= value < 2**31:
        raise ValueError("must be -1 (all) or a whole number from 1 on")
    return value


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries, the limit is {MAX_LOGIT_BIAS}")
    for key, bias in value.items():  # here, because pydantic would collect every violation
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -10000 <= bias <= 10000:
            raise ValueError(f"key {key[:40]!r} must have a number from -10000 to 10000")
    return value


# Bounds keep a value, its reciprocal and the logits that it scales finite in float32.
Temperature = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, BeforeValidator(_top_k)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[
    float, Field(gt=0, le=2, allow_inf_nan=False), AfterValidator(lambda value: max(value, 1e-20))
]  # smaller ones would do the same, but for overflowing
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Seed = Annotated[int, Field(ge=-INT64, le=INT64 - 1)]
NumTokens = Annotated[int, Field(ge=0, le=INT64 - 1)]
PositiveTokens = Annotated[int, Field(ge=1, le=INT64 - 1)]
Stops = Annotated[list[str], BeforeValidator(_stop_list, json_schema_input_type=str | list[str])]
StopIds = Annotated[list[int], Field(max_length=MAX_STOP_IDS, fail_fast=True)]
Bias = Annotated[float, Field(ge=-10000, le=10000, allow_inf_nan=False)]
LogitBias = Annotated[dict[str, Bias], BeforeValidator(_logit_bias)]
Interval = Annotated[int, Field(ge=1, le=INT64 - 1)]
VerifyLen = Annotated[int, Field(ge=1, le=INT64 - 1)]  # the width of the block is the engine's to know
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
LogprobStart = Annotated[int, Field(ge=-1, le=INT64 - 1)]
LogprobIds = Annotated[list[int], Field(max_length=MAX_LOGPROB_IDS, fail_fast=True)]
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
RequestId = Annotated[str, Field(min_length=1, max_length=256)]


# What pydantic says about types, in the words of JSON.
_TYPE_ERRORS = {
    "model_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "missing": "is required",
}
# A value of the right type outside its range; every other violation is one of the schema.
_RANGE_ERRORS = frozenset(
    {
        "value_error",
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "too_long",
        "too_short",
        "string_too_long",
        "string_too_short",
        "finite_number",
    }
)


class RequestModel(BaseModel):
    """Strict types (no "1" for 1, no 1.0 for an integer), unknown fields refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    NULLABLE: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:
            raise ValueError(f"has {len(values)} fields, the limit is {MAX_FIELDS}")
        return {name: value for name, value in values.items() if value is not None or name in cls.NULLABLE}

    @model_validator(mode="after")
    def _neutral_only(self) -> RequestModel:
        for name in self.model_fields_set & neutral_fields(type(self)).keys():
            allowed = neutral_fields(type(self))[name]
            value = getattr(self, name)
            if not any(_is(value, item) for item in allowed["enum"]):
                context = {"field": name, "reason": _neutral_reason(allowed)}
                raise PydanticCustomError("unsupported_value", "{reason}", context)
        return self

    @classmethod
    def parse(cls, body: Any, prefix: str = "") -> Any:
        """A validated instance; the first violation as a `RequestError` that names its field."""
        if not isinstance(body, dict):
            where = prefix.rstrip(".") or "the request body"
            raise RequestError(f"{where} must be a JSON object", schema=True)
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _first_violation(error, body, prefix) from None


def _neutral_reason(allowed: dict[str, Any]) -> str:
    others = ", ".join(json.dumps(value) for value in allowed["enum"] if value is not None)
    only = f"null or {others}" if others else "null"
    return f"{allowed['x-remedy']}; accepted only as {only} or left out"


@functools.cache
def neutral_fields(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The neutral-only fields of a model, with the values they take."""
    return {
        name: info.json_schema_extra
        for name, info in model.model_fields.items()
        if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("x-support") == "neutral"
    }


def _path(parts: Sequence[int | str], body: Any, is_missing: bool) -> str:
    """`messages[1].role`. A part that is not in the body names a branch of a union, unless it is what is missing."""
    path = ""
    for i, part in enumerate(parts):
        if isinstance(part, int):
            path += f"[{part}]"
            body = body[part] if isinstance(body, list) and part < len(body) else None
        elif isinstance(body, dict) and part in body:
            path += f".{part}" if path else part
            body = body[part]
        elif is_missing and i == len(parts) - 1:
            path += f".{part}" if path else part
    return path


def _first_violation(error: ValidationError, body: dict[str, Any], prefix: str) -> RequestError:
    errors = error.errors(include_url=False, include_input=False)
    field = errors[0]["loc"][:1]
    # Of a union's branches, the one that came furthest is the one that was meant.
    first = max((one for one in errors if one["loc"][:1] == field), key=lambda one: len(one["loc"]))
    parts = list(first["loc"])
    if first["type"] == "unsupported_value":
        parts.append(first["ctx"]["field"])
    name = (prefix + _path(parts, body, first["type"] == "missing")[:200]).rstrip(".")
    match first["type"]:
        case "extra_forbidden":
            return RequestError(f"unknown field {name!r}", param=name, code="unknown_field", schema=True)
        case "unsupported_value":
            return RequestError(f"{name}: {first['msg']}", param=name, code="unsupported_value")
    text = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    text = _TYPE_ERRORS.get(first["type"], text)
    if first["type"] in {"too_long", "string_too_long"}:
        unit = "entries" if first["type"] == "too_long" else "characters"
        text = f"has too many {unit}, the limit is {first['ctx']['max_length']}"
    where = name or "the request body"
    return RequestError(f"{where}: {text}", param=name or None, schema=first["type"] not in _RANGE_ERRORS)
