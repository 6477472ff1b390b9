"""What a request's output has to match: `json_schema`, `regex`, `ebnf`, `structural_tag` and `response_format`.

Only what is cheap is looked at here. Whether a grammar is one is found where it is compiled, beside the scheduler's
step loop; its refusal comes back before anything else of the request does.
"""

from __future__ import annotations

from typing import Any

import orjson

from flashspark.ipc import GrammarKind, GrammarSpec
from flashspark.text.reasoning import END_THINK, THINK

from .errors import RequestError
from .fields import MAX_GRAMMAR_CHARS
from .protocol import OpenAIFields, ResponseFormat, SamplingFields

# A thought from its inside to the closing tag; parts of structural tags.
THOUGHT: dict[str, Any] = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": END_THINK}
_JSON_SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


def grammar_spec(fields: SamplingFields, prefix: str = "") -> GrammarSpec | None:
    """The one grammar that a body asks for; None where it asks for none."""
    given: list[GrammarSpec] = []
    if fields.json_schema not in (None, ""):
        given.append(json_schema_spec(fields.json_schema, f"{prefix}json_schema"))
    if fields.regex:
        given.append(GrammarSpec("regex", fields.regex, f"{prefix}regex"))
    if fields.ebnf:
        given.append(GrammarSpec("ebnf", fields.ebnf, f"{prefix}ebnf"))
    if fields.structural_tag:
        given.append(_structural_tag(fields.structural_tag, f"{prefix}structural_tag"))
    if isinstance(fields, OpenAIFields) and fields.response_format is not None:
        spec = _of_response_format(fields.response_format)
        given += [] if spec is None else [spec]
    if len(given) > 1:
        names = " and ".join(spec.field for spec in given)
        raise RequestError(f"{names}: give only one of them", param=given[1].field)
    return given[0] if given else None


def json_schema_spec(schema: str | bool | dict[str, Any] | None, field: str) -> GrammarSpec:
    """JSON that a schema describes. `schema` is the schema or its JSON text; `field` is where it came from."""
    return _json("json_schema", schema, field, "a JSON schema: an object, true or false", (dict, bool))


def after_reasoning(spec: GrammarSpec, prompt: str, inside: bool) -> GrammarSpec:
    """The grammar of an answer to `prompt` that reasons freely before it follows `spec`. `inside`: it begins as
    reasoning; else the model may open a thought, unless the prompt ends with a closed one."""
    form = _format(spec)
    if form is None or (not inside and prompt.rstrip().endswith(END_THINK)):
        return spec
    thought = THOUGHT if inside else THOUGHT | {"begin": THINK}
    form = {"type": "sequence", "elements": [thought, form]} if inside else _either(thought, form)
    text = orjson.dumps({"type": "structural_tag", "format": form}).decode()
    return GrammarSpec("structural_tag", text, spec.field)


def _either(thought: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": [{"type": "sequence", "elements": [thought, form]}, form]}


def _format(spec: GrammarSpec) -> Any:
    """A grammar as a part of a structural tag; None of a tag without any, which is refused where it is compiled."""
    match spec.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": orjson.loads(spec.text)}
        case "regex":
            return {"type": "regex", "pattern": spec.text}
        case "ebnf":
            return {"type": "grammar", "grammar": spec.text}
    tag = orjson.loads(spec.text)
    if "structures" not in tag:
        return tag.get("format")
    tags = [
        {
            "type": "tag",
            "begin": item["begin"],
            "content": {"type": "json_schema", "json_schema": item["schema"]},
            "end": item["end"],
        }
        for item in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _structural_tag(tag: str | dict[str, Any], field: str) -> GrammarSpec:
    spec = _json("structural_tag", tag, field, "a JSON object", (dict,))
    value = orjson.loads(spec.text)
    if "structures" in value:  # SGLang's older form
        structures = value["structures"]
        if not isinstance(structures, list) or not isinstance(value.get("triggers"), list):
            raise RequestError(f"{field}: needs lists of structures and of triggers", param=field)
        keys = {"begin", "schema", "end"}
        if not all(isinstance(item, dict) and item.keys() == keys for item in structures):
            raise RequestError(f"{field}: each structure has begin, schema and end", param=field)
    return spec


def _json(kind: GrammarKind, value: Any, field: str, what: str, types: tuple[type, ...]) -> GrammarSpec:
    try:
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
        parsed = orjson.loads(text)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        raise RequestError(f"{field}: is not valid JSON ({error})", param=field) from None
    if not isinstance(parsed, types):
        raise RequestError(f"{field}: must be {what}", param=field)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"{field}: has {len(text)} characters, the limit is {MAX_GRAMMAR_CHARS}", param=field
        )
    return GrammarSpec(kind, text, field)


def _of_response_format(form: ResponseFormat) -> GrammarSpec | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            return GrammarSpec("json_schema", '{"type": "object"}', "response_format")
        case "structural_tag":
            if form.format is not None:
                parts: dict[str, Any] = {"format": form.format}
            else:
                parts = {"structures": form.structures, "triggers": form.triggers}
            return _structural_tag({"type": form.type, **parts}, "response_format")
    name = "response_format.json_schema"
    if form.json_schema is None:
        raise RequestError(f"{name}: is required", param=name, schema=True)
    unknown = form.json_schema.keys() - _JSON_SCHEMA_KEYS
    if unknown:
        field = f"{name}.{min(unknown)[:200]}"
        raise RequestError(f"unknown field {field!r}", param=field, code="unknown_field", schema=True)
    if form.json_schema.get("schema") is None:  # OpenAI: any JSON object
        return GrammarSpec("json_schema", '{"type": "object"}', name)
    return json_schema_spec(form.json_schema["schema"], f"{name}.schema")
