"""The grammar that forces a tool call, or holds a call's arguments to their schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flashspark.ipc import GrammarSpec
from flashspark.text.tool_calls import CLOSE, OPEN

from .grammar import THOUGHT
from .tool_fields import NamedTool, Tool, ToolChoice

FORCED_PARSER = "hermes"  # of the form in which calls are forced, whatever the model's own is


def is_forced(choice: ToolChoice | None) -> bool:
    """Whether an answer has to be a call."""
    return choice == "required" or isinstance(choice, NamedTool)


def call_grammar(
    tools: Sequence[Tool], choice: ToolChoice | None, only_one: bool, reasons_inside: bool
) -> GrammarSpec | None:
    """What an answer that may call `tools` has to match; None if it may be anything.

    A forced answer is calls and nothing else, after the reasoning that it begins with, if any. One that is not forced
    is free but for its calls, and their arguments but for those of strict functions.
    """
    forced = is_forced(choice)
    if not forced and not any(tool.function.strict for tool in tools):
        return None
    named = choice.function.name if isinstance(choice, NamedTool) else None
    tags = [
        _tag(tool, forced or tool.function.strict) for tool in tools if named in (None, tool.function.name)
    ]
    form: dict[str, Any]
    if not forced:
        form = {"type": "triggered_tags", "triggers": [OPEN], "tags": tags}
    else:
        form = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": only_one or named is not None,
        }
        if reasons_inside:
            form = {"type": "sequence", "elements": [THOUGHT, form]}
    text = json.dumps({"type": "structural_tag", "format": form})
    return GrammarSpec("structural_tag", text, "tool_choice" if forced else "tools")


def _tag(tool: Tool, by_schema: bool) -> dict[str, Any]:
    schema = {"type": "object"} | ((tool.function.parameters or {}) if by_schema else {})
    return {
        "type": "tag",
        "begin": f'{OPEN}\n{{"name": "{tool.function.name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": f"}}\n{CLOSE}",
    }
