"""Tool calls between `<tool_call>` and `</tool_call>`, taken out of a text that arrives in pieces.

A call is handed out when it is complete and well-formed, never in parts: what was sent cannot be taken back, and what
turns out not to be a call of an offered function is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .stop import StopMatcher

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN, _CLOSE = StopMatcher([OPEN]), StopMatcher([CLOSE])

# The `parameters` of each offered function, by its name: a JSON schema, or nothing.
Functions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """A function's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class _JsonEnd:
    """Where a body of JSON ends: at the first closing tag outside of its strings."""

    _IN_STRING, _OUTSIDE = re.compile(r'\\.|"', re.DOTALL), re.compile(f'"|{CLOSE}')

    def __init__(self) -> None:
        self._at, self._in_string = 0, False

    def find(self, body: str) -> int:
        """Offset of the closing tag, or -1. `body` has only grown since the last call: no part is read twice."""
        while True:
            match = (self._IN_STRING if self._in_string else self._OUTSIDE).search(body, self._at)
            if match is None:
                # What may be half of something: a backslash in a string, a tag outside.
                half = body.endswith("\\", self._at) if self._in_string else len(CLOSE) - 1
                self._at = max(self._at, len(body) - half)
                return -1
            if match.group() == CLOSE:
                return match.start()
            self._at = match.end()
            self._in_string ^= match.group() == '"'


class _XmlEnd:
    """Where a body of tags ends: at the first closing tag after that of the function, with every parameter closed.

    A value that shows a whole call, as text about tool calls does, is not cut there.
    """

    _TAG = re.compile(rf"<parameter=|</parameter>|</function>\s{{0,64}}{CLOSE}")
    _LONGEST = len("</function>") + 64 + len(CLOSE)

    def __init__(self) -> None:
        self._at, self._depth = 0, 0

    def find(self, body: str) -> int:
        """As `_JsonEnd.find`."""
        while (match := self._TAG.search(body, self._at)) is not None:
            self._at = match.end()
            if match.group() == "<parameter=":
                self._depth += 1
            elif match.group() == "</parameter>":
                self._depth -= 1
            elif self._depth == 0:
                return match.end() - len(CLOSE)
        self._at = max(self._at, len(body) - self._LONGEST)
        return -1


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _load(text: str) -> Any:
    """JSON as models write it: line breaks in strings are read, NaN is not."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        return json.dumps(value, allow_nan=False)
    return text


def read_json_call(body: str, functions: Functions) -> ToolCall | None:
    """`{"name": …, "arguments": {…}}`; None for anything else."""
    try:
        value = _load(body)
        if not isinstance(value, dict) or not value.keys() <= {"name", "arguments"}:
            return None
        name, arguments = value.get("name"), value.get("arguments", {})
        if not isinstance(name, str) or name not in functions or not isinstance(arguments, dict):
            return None
        return ToolCall(name, _dump(arguments))
    except (ValueError, RecursionError):
        return None


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?:([^<>\n]+)>)?|</parameter>")


def read_xml_call(body: str, functions: Functions) -> ToolCall | None:
    """`<function=name>` around `<parameter=key>` and its value each; None for anything else."""
    function = _FUNCTION.fullmatch(body)
    if function is None or function[1] not in functions:
        return None
    properties = functions[function[1]].get("properties")
    values = _parameters(function[2])
    if values is None:
        return None
    arguments: dict[str, Any] = {}
    for key, text in values.items():
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _typed(text, _types(schema))
    try:
        return ToolCall(function[1], _dump(arguments))
    except (ValueError, RecursionError):
        return None


def _parameters(text: str) -> dict[str, str] | None:
    """Values by key, each without the line break at either end; None where there is anything else."""
    values: dict[str, str] = {}
    key, start, depth = "", 0, 0
    for tag in _PARAMETER.finditer(text):
        if depth == 0:
            if tag[1] is None or tag[1] in values or text[start : tag.start()].strip():
                return None
            key, start = tag[1], tag.end()
        depth += -1 if tag.group() == "</parameter>" else 1
        if depth == 0:
            values[key] = text[start : tag.start()].removeprefix("\n").removesuffix("\n")
            start = tag.end()
    return None if depth or text[start:].strip() else values


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names at its top; empty if none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set()
    if isinstance(named, list):
        types |= {item for item in named if isinstance(item, str)}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else []:
            named = branch.get("type") if isinstance(branch, Mapping) else None
            types |= {named} if isinstance(named, str) else set()
    return types


_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # templates write Python's too


def _typed(text: str, types: set[str]) -> Any:
    """A value by the types its schema allows; the text itself where it is none of them, for the client to judge."""
    word = _WORDS.get(text.strip().lower(), text)
    if not types or ("string" in types and not (word == "null" and "null" in types)):
        return text
    try:
        value = _load(word)
        _dump(value)
    except (ValueError, RecursionError):
        return text
    return value if value is None or _json_types(value) & types else text


def _json_types(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case dict():
            return {"object"}
        case list():
            return {"array"}
    return set()


@dataclass(frozen=True)
class _Format:
    end: Callable[[], _JsonEnd | _XmlEnd]
    read: Callable[[str, Functions], ToolCall | None]
    is_json: bool


_JSON, _XML = _Format(_JsonEnd, read_json_call, True), _Format(_XmlEnd, read_xml_call, False)
# Under SGLang's names.
TOOL_CALL_PARSERS: dict[str, _Format] = {"hermes": _JSON, "qwen": _JSON, "qwen25": _JSON, "qwen3_coder": _XML}


class ToolCallParser:
    """One answer. What `feed` and `finish` return, together, does not depend on how the text was cut.

    The texts joined are the answer without its calls. White space is dropped before a call, and after one where another
    call or the end follows; an answer without calls is unchanged. What an unfinished call may hold is never a call.
    """

    def __init__(self, parser: str, functions: Functions) -> None:
        self._format, self._functions = TOOL_CALL_PARSERS[parser], functions
        self._held = ""  # may yet be white space before a call, or a tag; in a call, its body so far
        self._gap = ""  # white space before the open call
        self._end: _JsonEnd | _XmlEnd | None = None  # of the open call
        self._follows_call = False  # no text since the last call

    def feed(self, text: str) -> list[str | ToolCall]:
        """Appends text; texts and calls that have become certain, in order."""
        self._held += text
        items: list[str | ToolCall] = []
        while True:
            if self._end is None and not self._text(items):
                return items
            assert self._end is not None
            at = self._end.find(self._held)
            if at < 0:
                return items
            call = self._format.read(self._held[:at], self._functions)
            rest = self._held[at + len(CLOSE) :]
            self._leave(items, call, self._held[: at + len(CLOSE)])
            self._held = rest

    def finish(self) -> list[str | ToolCall]:
        """The rest. A call that lacks no more than its closing tag is one."""
        items: list[str | ToolCall] = []
        if self._end is not None:
            body = self._held[: _CLOSE.releasable(self._held)]
            self._leave(items, self._format.read(body, self._functions), self._held)
        elif self._held and not (self._follows_call and self._held.isspace()):
            items.append(self._held)
        self._held = ""
        return items

    def _text(self, items: list[str | ToolCall]) -> bool:
        """Takes text up to the next opening tag; whether there is one, whose call is then open."""
        tag = self._held.find(OPEN)
        sure = self._held[: tag if tag >= 0 else _OPEN.releasable(self._held)]
        text = sure.rstrip()
        if text:
            items.append(text)
            self._follows_call = False
        if tag < 0:
            self._held = self._held[len(text) :]
            return False
        self._gap, self._held = sure[len(text) :], self._held[tag + len(OPEN) :]
        self._end = self._format.end()
        return True

    def _leave(self, items: list[str | ToolCall], call: ToolCall | None, body: str) -> None:
        """Ends the open call, as a call or as the text it is."""
        items.append(call or f"{self._gap}{OPEN}{body}")
        self._end, self._follows_call = None, call is not None
