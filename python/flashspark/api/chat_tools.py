"""Tools and reasoning of chat: what the template gets of them, and what an answer's text becomes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashspark.text.reasoning import ReasoningParser
from flashspark.text.tool_calls import TOOL_CALL_PARSERS, Functions, ToolCall, ToolCallParser

from .call_grammar import FORCED_PARSER, is_forced
from .context import ServerContext
from .errors import RequestError
from .protocol import ChatBody
from .tool_fields import MessageToolCall, NamedTool, Tool


def check_tools(tools: Sequence[Tool] | None, context: ServerContext) -> None:
    """Refuses names that are given twice, arguments that are no object, and tools that the template passes over."""
    names: set[str] = set()
    for i, tool in enumerate(tools or ()):
        if (tool.function.parameters or {}).get("type", "object") != "object":
            name = f"tools[{i}].function.parameters"
            raise RequestError(f"{name}: must be a schema of type 'object'", param=name)
        if tool.function.name in names:
            name = f"tools[{i}].function.name"
            raise RequestError(f"{name}: {tool.function.name!r} is given twice", param=name)
        names.add(tool.function.name)
    if tools and not context.tokenizer.template_takes_tools:
        message = "tools: this model's chat template knows no tools; --chat-template can name another"
        raise RequestError(message, param="tools", code="unsupported_value")


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates want them; None where there are none."""
    own = {"function": {"strict"}}  # means nothing here
    return [tool.model_dump(exclude_none=True, exclude=own) for tool in tools or ()] or None


def template_calls(calls: Sequence[MessageToolCall], name: str) -> list[dict[str, Any]]:
    """An earlier turn's calls as templates want them: arguments are objects, which some iterate over."""
    turns = []
    for i, call in enumerate(calls):
        turn = call.model_dump(exclude_none=True, include={"id", "type"})
        arguments = _arguments(call.function.arguments, f"{name}[{i}].function.arguments")
        turns.append(turn | {"function": {"name": call.function.name, "arguments": arguments}})
    return turns


def _arguments(given: str | dict[str, Any] | None, name: str) -> dict[str, Any]:
    if not isinstance(given, str):
        return given or {}
    try:
        value = json.loads(given) if given.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{name}: must be the text of a JSON object", param=name)
    return value


def offered_tools(body: ChatBody, context: ServerContext) -> list[Tool]:
    """The tools that this answer may call; none where `tool_choice` says so."""
    tools, choice = body.tools or [], body.tool_choice
    check_tools(tools, context)
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        name = "tool_choice.function.name"
        raise RequestError(f"{name}: {choice.function.name!r} is none of the tools", param=name)
    if choice == "required" and not tools:
        raise RequestError("tool_choice: 'required' needs tools", param="tool_choice")
    if choice == "none" or not tools:
        return []
    parser = context.args.tool_call_parser
    if is_forced(choice):
        return tools
    if parser is None:
        raise RequestError(
            "tools: this server was started without --tool-call-parser, which finds calls in the text; "
            "tool_choice may still force one, or be 'none'",
            param="tools",
            code="unsupported_value",
        )
    for i, tool in enumerate(tools):
        if tool.function.strict and not TOOL_CALL_PARSERS[parser].is_json:
            name = f"tools[{i}].function.strict"
            message = f"{name}: only of a call that is forced, or written in JSON, which {parser} is not"
            raise RequestError(message, param=name, code="unsupported_value")
    return tools


@dataclass(frozen=True)
class ChatFormat:
    """How the text of a call's answers is taken apart; the same for all its choices."""

    tool_call_parser: str | None  # None: no calls in it
    functions: Functions
    only_one_call: bool
    reasons_inside: bool | None  # None: no reasoning in it; else whether it begins as such
    holds_reasoning: bool

    @classmethod
    def of(
        cls, body: ChatBody, tools: Sequence[Tool], reasons_inside: bool | None, parser: str | None
    ) -> ChatFormat:
        """What a body asks for."""
        return cls(
            (FORCED_PARSER if is_forced(body.tool_choice) else parser) if tools else None,
            {tool.function.name: tool.function.parameters or {} for tool in tools},
            not body.parallel_tool_calls,
            reasons_inside if body.separate_reasoning else None,
            not body.stream_reasoning,
        )


class ChatOutput:
    """One choice's text on its way into a message."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        inside, parser = form.reasons_inside, form.tool_call_parser
        self._reasoning = None if inside is None else ReasoningParser(inside)
        self._calls = None if parser is None else ToolCallParser(parser, form.functions)
        self._held_reasoning = ""
        self.num_calls = 0

    def push(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Appends text; what it adds to the message: deltas without their empty keys, in order."""
        reasoning, content = self._split(text, is_last)
        deltas: list[dict[str, Any]] = [{"reasoning_content": reasoning}] if reasoning else []
        items: list[str | ToolCall] = [content] if content else []
        if self._calls is not None:
            items = self._calls.feed(content) + (self._calls.finish() if is_last else [])
        for item in items:
            if isinstance(item, str):
                deltas.append({"content": item})
            elif not (self._form.only_one_call and self.num_calls):
                deltas.append({"tool_calls": [self._call(item)]})
        return deltas

    def message(self, text: str) -> dict[str, Any]:
        """The whole message of an ended choice."""
        parts: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        for delta in self.push(text, is_last=True):
            for key, value in delta.items():
                parts[key] += value
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in parts["tool_calls"]]
        return {
            "role": "assistant",
            "content": parts["content"] or (None if calls else ""),
            "reasoning_content": parts["reasoning_content"] or None,
            "tool_calls": calls or None,
        }

    def _split(self, text: str, is_last: bool) -> tuple[str, str]:
        if self._reasoning is None:
            return "", text
        reasoning, content = self._reasoning.feed(text)
        if is_last:
            rest = self._reasoning.finish()
            reasoning, content = reasoning + rest.reasoning, content + rest.content
        if self._form.holds_reasoning:
            self._held_reasoning += reasoning
            reasoning = ""
            if is_last or self._reasoning.has_ended:
                reasoning, self._held_reasoning = self._held_reasoning, ""
        return reasoning, content

    def _call(self, call: ToolCall) -> dict[str, Any]:
        self.num_calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "index": self.num_calls - 1,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": function,
        }
