"""Request models of tools: functions on offer, which of them to call, calls of earlier turns."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from .fields import RequestModel

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def _function_name(value: Any) -> Any:
    if isinstance(value, str) and _NAME.fullmatch(value) is None:
        raise ValueError("must be 1 to 128 letters, digits, '_', '.' and '-'")
    return value


FunctionName = Annotated[str, BeforeValidator(_function_name)]


class ToolFunction(RequestModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool = Field(False, description="arguments follow the schema, which a grammar sees to")


class Tool(RequestModel):
    """One of `tools`."""

    type: Literal["function"] = "function"
    function: ToolFunction


class NamedFunction(RequestModel):
    """A function by its name."""

    name: FunctionName


class NamedTool(RequestModel):
    """`tool_choice` that names the one to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(RequestModel):
    """What an assistant turn called."""

    name: FunctionName
    arguments: str | dict[str, Any] | None = Field(None, description="a JSON object, as text or as it is")


class MessageToolCall(RequestModel):
    """One of an assistant turn's `tool_calls`."""

    id: Annotated[str, StringConstraints(max_length=512)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="as streamed; the order of the list counts")


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
MessageToolCalls = Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)]
