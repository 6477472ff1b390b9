"""Writes docs/compatibility.md from the flags, the routes and the request models, so that it cannot drift.

python scripts/compatibility.py            write the page
python scripts/compatibility.py --check    say whether the page is what would be written (exit code 1 if not)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from starlette.applications import Starlette

from flashspark import envs
from flashspark.api.app import ROUTES
from flashspark.api.fields import RequestModel, neutral_fields
from flashspark.api.http_metrics import HttpMetricsMiddleware
from flashspark.api.metrics import PREFIX, SCHEDULER_METRICS, RequestMetrics, scheduler_families
from flashspark.api.middleware import auth_class
from flashspark.api.protocol import (
    BODIES,
    ChatBody,
    CompletionBody,
    GenerateBody,
    NativeSampling,
)
from flashspark.args.server_args import Flag, ServerArgs, flag_name
from flashspark.ipc import SchedulerMetrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
COMMAND = "python scripts/compatibility.py"

HEAD = f"""# Compatibility

What of SGLang's and OpenAI's surface is there, and how. This page is written by `{COMMAND}`
from the code: edit that instead.

- **honoured**: does what it says.
- **neutral only**: accepted at the values shown, which clients send without meaning them. Any other value is refused
  with HTTP 400 (a flag: exit code 2), naming the field and what to do instead.
- **no effect**: accepted with a warning in the log, because it cannot change an answer.
- **refused**: everything that is not on this page. An unknown field is a 400 that names it, an unknown flag a usage
  message and exit code 2, an unknown path a 404.

An explicit `null` equals absence, `max_new_tokens` of `/generate` excepted. Bodies are strict: `"1"` is no number and
`1.0` no whole number.
"""

FLAGS = """## Flags

Any unambiguous beginning of a name works (`--tp` for `--tp-size`), as do `--flag value` and `--flag=value`.
`--config FILE.yaml` supplies flags by name, and the command line wins. A *size* may be written `32k` (32,000) or `32Ki`
(32,768).
"""

METRICS_HEAD = """## Metrics

Of `/metrics`, with `--enable-metrics`; all have the prefix `sglang:`.
"""

ABSENT_METRICS = {
    "cuda_graph_passes_total": "`verify_tier_tokens` counts steps by the rows they ran",
    "forward_execution_seconds_total": "`plan_measured_step_seconds_total` has those of predicted steps",
    "graph_memory_usage_gb": "the log has it, once graphs are captured",
    "is_cuda_graph": "`/server_info` has `disable_cuda_graph` and the tiers",
    "new_token_ratio": "admission estimates nothing: a request is retracted when pages run out",
    "per_stage_req_latency_seconds": "`queue_time_seconds` and `time_to_first_token_seconds` have the two stages",
    "weight_memory_usage_gb": "weights may be packed on their way in",
}

VARIABLES = """## Environment variables

SGLang's names; the older prefix `SGL_` works too. A value that cannot be read warns and counts as unset.
"""

ROUTES_HEAD = """## Routes

Keys: *open* routes want none. *normal* ones want `Authorization: Bearer` with `--api-key`, where that is set. *admin*
ones want `--admin-api-key` where that is set (the other key is not enough then), else `--api-key` where that is set.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(value: Any) -> str:
    """A value as JSON, in code style."""
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def flag_rows() -> list[list[str]]:
    """One row per flag."""
    rows = []
    for item in dataclasses.fields(ServerArgs):
        spec: Flag = item.metadata["flag"]
        names = ", ".join(f"`{name}`" for name in (flag_name(item.name), *spec.aliases))
        default = "" if item.default in (None, "", False) else f"`{item.default}`"
        rows.append([names, _flag_type(item.type, spec), default, *_flag_status(spec)])
    return rows


def _flag_type(annotation: Any, spec: Flag) -> str:
    if spec.neutral is not None:
        return ""
    if spec.choices is not None:
        return ", ".join(f"`{choice}`" for choice in spec.choices)
    kind = str(annotation).removesuffix(" | None")
    words = {"bool": "switch", "str": "text", "int": "whole number", "float": "number"}
    text = "size" if spec.size else words.get(kind, "whole numbers")
    bounds = [
        f"{word} {bound:g}" if abs(bound) < 1e6 else f"{word} {int(bound):,}"
        for word, bound in (("from", spec.minimum), ("to", spec.maximum))
        if bound is not None
    ]
    return " ".join([text, *bounds])


def _flag_status(spec: Flag) -> list[str]:
    if spec.hint is not None:
        return ["no effect", spec.hint.removeprefix("has no effect: ")]
    if spec.neutral is None:
        return ["honoured", spec.help]
    values = [value for value in spec.neutral if value not in (None, False)]
    shown = " or ".join(f"`{value}`" for value in values) or "left out"
    return [f"neutral only: {shown}", f"{spec.help}: {spec.remedy}"]


def variable_rows() -> list[list[str]]:
    """One row per environment variable."""
    variables = [value for value in vars(envs).values() if isinstance(value, envs.EnvVar)]
    variables += [variable for variable in envs.UNAVAILABLE if variable not in variables]
    rows = []
    for variable in sorted(variables, key=lambda variable: variable.name):
        refused = any(variable is other for other in envs.UNAVAILABLE)
        default = "" if variable.default == "" else f"`{variable.default}`"
        status = f"neutral only: {default or 'unset'}" if refused else "honoured"
        rows.append([f"`{variable.name}`", default, status, variable.help])
    return rows


def route_rows() -> list[list[str]]:
    """One row per path."""
    rows = []
    for path, methods, handler in ROUTES:
        text = " ".join((handler.__doc__ or "").split("\n\n")[0].split())
        rows.append([f"`{path}`", ", ".join(methods), auth_class(path), text])
    return rows


def models() -> list[tuple[str, type[RequestModel]]]:
    """Every request model once, under a title: bodies by route, and below each what it contains."""
    titles: dict[type[RequestModel], str] = {
        GenerateBody: "`/generate`",
        NativeSampling: "`/generate`: `sampling_params`",
        CompletionBody: "`/v1/completions`",
        ChatBody: "`/v1/chat/completions`",
    }
    for path, body in BODIES.items():
        titles.setdefault(body, f"`{path}`")
    found = dict(titles)
    for body in titles:
        for model in nested_models(body):
            first, *_ = (model.__doc__ or "").strip().splitlines() or [""]
            found.setdefault(model, f"`{model.__name__}`" + (f": {first}" if first else ""))
    return [(title, model) for model, title in found.items()]


def nested_models(model: type[BaseModel]) -> list[type[RequestModel]]:
    """The request models that stand in the fields of `model`, at any depth."""
    found: list[type[RequestModel]] = []

    def walk(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, RequestModel) and annotation not in found:
            found.append(annotation)
            for info in annotation.model_fields.values():
                walk(info.annotation)
        for part in getattr(annotation, "__args__", ()):
            walk(part)

    for info in model.model_fields.values():
        walk(info.annotation)
    return found


def field_rows(model: type[RequestModel]) -> list[list[str]]:
    """One row per field: honoured ones first, each group in the model's order."""
    neutral = neutral_fields(model)
    schema = model.model_json_schema()
    honoured, others = [], []
    for name, info in model.model_fields.items():
        if name in neutral:
            values = [value for value in neutral[name]["enum"] if value is not None] or [None]
            shown = ", ".join(map(code, values))
            others.append([f"`{name}`", "", "", f"neutral only: {shown}", neutral[name]["x-remedy"]])
        else:
            kind = _kind(schema["properties"][name], schema.get("$defs", {}))
            text = " ".join((info.description or "").split())
            honoured.append([f"`{name}`", kind, _default(info), "honoured", text])
    return honoured + others


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    return "" if info.default is None else code(info.default)


def _kind(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _kind(definitions[name], definitions) if "enum" in definitions[name] else f"`{name}`"
    if "anyOf" in schema:
        kinds = [_kind(one, definitions) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(map(code, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), definitions)}{_bounds(schema)}"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    return words.get(schema.get("type", ""), schema.get("type", "any")) + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    texts = []
    for key, word in (
        ("exclusiveMinimum", "above"),
        ("minimum", "from"),
        ("maximum", "to"),
        ("exclusiveMaximum", "below"),
        ("maxItems", "at most"),
        ("maxLength", "at most"),
        ("maxProperties", "at most"),
    ):
        if key in schema:
            bound = schema[key]
            power = {2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}.get(bound)
            texts.append(f"{word} {power or format(bound, 'g' if isinstance(bound, float) else 'd')}")
    return "".join(f" {text}" for text in texts)


def metric_rows() -> Iterable[Sequence[str]]:
    """Every metric that is served, then SGLang's that are not, with the reason."""
    request_metrics = RequestMetrics("")
    steps = scheduler_families(SchedulerMetrics([], [0, 0], 0), {})
    HttpMetricsMiddleware(Starlette(), request_metrics.registry, frozenset())
    rows = {
        family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else ""): (
            family.type,
            family.documentation,
        )
        for family in [*request_metrics.registry.collect(), *steps]
    }
    rows |= {
        name: ("counter" if name.endswith("_total") else "gauge", text)
        for name, text in SCHEDULER_METRICS.items()
    }
    for name, (kind, text) in sorted(rows.items()):
        yield f"`{name}`", kind, "served", text
    for name, reason in sorted(ABSENT_METRICS.items()):
        assert name not in rows, name
        yield f"`{name}`", "", "not served", reason


def page() -> str:
    """The whole page."""
    columns = ("type", "default", "status", "")
    parts = [
        HEAD,
        FLAGS,
        table(("flag", *columns), flag_rows()),
        "",
        VARIABLES,
        table(("variable", "default", "status", ""), variable_rows()),
        "",
        ROUTES_HEAD,
        table(("path", "methods", "key", ""), route_rows()),
        "",
        "## Fields\n",
    ]
    for title, model in models():
        parts += [f"### {title}\n", table(("field", *columns), field_rows(model)), ""]
    parts += [METRICS_HEAD, table(("metric", "type", "status", ""), metric_rows())]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    """Process entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    text = page()
    if not check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        print(f"{PAGE.name} is not what the code says: run `{COMMAND}`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
