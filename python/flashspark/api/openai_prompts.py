"""Prompts of the OpenAI routes: texts, ids, conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from flashspark.text import ChatTemplateError
from flashspark.text.chat_template import ChatTemplate
from flashspark.text.reasoning import END_THINK, THINK, begins_inside

from .call_grammar import call_grammar
from .chat_tools import template_calls, template_tools
from .context import ServerContext
from .errors import RequestError
from .generation import Prompt
from .grammar import after_reasoning
from .logprobs import chat_logprobs, check_num_values, completion_logprobs
from .protocol import ChatBody, ChatMessage, CompletionBody
from .sampling import (
    cache_namespaces,
    check_num_answers,
    check_prompt_ids,
    encode_prompt,
    fit,
    openai_lengths,
    request_ids,
    sampling_params,
)
from .tool_fields import Tool

# Longer conversations are rendered in a thread: the event loop serves everyone else meanwhile.
_INLINE_PARTS = 256


async def completion_prompts(body: CompletionBody, context: ServerContext, call_id: str) -> list[Prompt]:
    """The prompts of `/v1/completions`."""
    if body.best_of is not None and body.best_of not in {1, body.n}:
        raise RequestError(
            f"best_of: {body.best_of} is not available; leave it out, or use the value of n", param="best_of"
        )
    inputs = _completion_inputs(body.prompt)
    check_num_answers(len(inputs), body.n)
    ids = request_ids(body.rid, len(inputs), call_id)
    namespaces = cache_namespaces(body, len(inputs))
    lengths = openai_lengths(body, body.max_tokens, "max_tokens")
    prompts = []
    for i, item in enumerate(inputs):
        name = "prompt" if len(inputs) == 1 else f"prompt[{i}]"
        if isinstance(item, str):
            input_ids = await encode_prompt(context.tokenizer, item, name, context.limits)
        else:
            input_ids = check_prompt_ids(item, name, context.limits)
        input_ids, max_new_tokens = fit(input_ids, lengths, name, context.limits)
        params = sampling_params(body, max_new_tokens, lengths, body.seed, context.limits)
        prompts.append(
            Prompt(
                request_id=ids[i],
                input_ids=input_ids,
                sampling=params,
                n=body.n,
                no_stop_trim=body.no_stop_trim,
                stream_interval=context.args.stream_interval,
                text=item if isinstance(item, str) else None,
                cache_namespace=namespaces[i],
                logprobs=completion_logprobs(body, len(input_ids), context.limits),
            )
        )
    lens = [len(prompt.input_ids) for prompt in prompts]
    check_num_values([prompt.logprobs for prompt in prompts], lens, body.n, "logprobs")
    return prompts


def _completion_inputs(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        message = "prompt: must be a string, a list of strings, token ids, or a list of token id lists"
        raise RequestError(message, param="prompt", schema=True)
    if not prompt:
        raise RequestError("prompt: must not be empty", param="prompt")
    if all(isinstance(item, str) for item in prompt) or any(isinstance(item, list) for item in prompt):
        return prompt
    return [prompt]


async def chat_prompt(
    body: ChatBody, context: ServerContext, call_id: str, tools: Sequence[Tool] = ()
) -> Prompt:
    """The one prompt of `/v1/chat/completions`, which offers `tools`."""
    kwargs = body.chat_template_kwargs or {}
    messages, begun = body.messages, ""
    if body.continue_final_message:
        messages, begun = messages[:-1], _begun_answer(messages[-1], len(messages) - 1)
    rendered = await render_chat(messages, kwargs, context, tools)
    text = rendered + begun
    input_ids = await encode_prompt(
        context.tokenizer, text, "messages", context.limits, add_special_tokens=False
    )
    if body.max_completion_tokens is not None:
        lengths = openai_lengths(body, body.max_completion_tokens, "max_completion_tokens")
    else:
        lengths = openai_lengths(body, body.max_tokens, "max_tokens")
    input_ids, max_new_tokens = fit(input_ids, lengths, "messages", context.limits)
    params = sampling_params(
        body, max_new_tokens, lengths, body.seed, context.limits, defaults=context.chat_defaults
    )
    # Without a parser too: what the template has opened, a forced call must wait for.
    inside = _reasons_inside(context.args.reasoning_parser or "qwen3", rendered, begun)
    grammar = call_grammar(tools, body.tool_choice, not body.parallel_tool_calls, inside)
    if grammar is not None:
        if params.grammar is not None:
            message = f"{params.grammar.field} and {grammar.field}: give only one of them"
            raise RequestError(message, param=grammar.field)
        params = msgspec.structs.replace(params, grammar=grammar)
    elif params.grammar is not None and context.args.reasoning_parser is not None:
        params = msgspec.structs.replace(
            params, grammar=after_reasoning(params.grammar, rendered + begun, inside)
        )
    return Prompt(
        request_id=request_ids(body.rid, 1, call_id)[0],
        input_ids=input_ids,
        sampling=params,
        n=body.n,
        no_stop_trim=body.no_stop_trim,
        stream_interval=context.args.stream_interval,
        text=text,
        cache_namespace=cache_namespaces(body, 1)[0],
        logprobs=chat_logprobs(body, len(input_ids), context.limits),
        reasons_inside=None if context.args.reasoning_parser is None else inside,
    )


def _begun_answer(message: ChatMessage, index: int) -> str:
    """The text that the answer continues."""
    if message.role != "assistant" or message.tool_calls or message.reasoning_content:
        name = "continue_final_message"
        raise RequestError(
            f"{name}: the last message must be the assistant's, with content alone", param=name
        )
    return _text(message.content, f"messages[{index}]")


def _reasons_inside(parser: str, rendered: str, begun: str) -> bool:
    """Whether the answer begins as reasoning."""
    if THINK in begun or END_THINK in begun:
        return begun.rfind(THINK) > begun.rfind(END_THINK)
    return begins_inside(parser, rendered)


async def render_chat(
    messages: Sequence[ChatMessage],
    template_kwargs: dict[str, Any],
    context: ServerContext,
    tools: Sequence[Tool] | None = None,
) -> str:
    """A conversation as the text the model was trained on, however long it is."""
    num_parts = sum(len(message.content) if isinstance(message.content, list) else 1 for message in messages)
    if num_parts + len(tools or ()) <= _INLINE_PARTS:
        return _render(messages, template_kwargs, context, tools)
    return await asyncio.to_thread(_render, messages, template_kwargs, context, tools)


def _render(
    messages: Sequence[ChatMessage],
    template_kwargs: dict[str, Any],
    context: ServerContext,
    tools: Sequence[Tool] | None,
) -> str:
    reserved = ChatTemplate.RESERVED & template_kwargs.keys()
    if reserved:
        name = f"chat_template_kwargs.{min(reserved)}"
        raise RequestError(f"{name}: is set by the server", param=name)
    turns = [_turn(message, i) for i, message in enumerate(messages)]
    try:
        return context.tokenizer.apply_chat_template(
            turns, tools=template_tools(tools), template_kwargs=template_kwargs
        )
    except ChatTemplateError as error:
        raise RequestError(f"messages: {error}", param="messages") from None


def _turn(message: ChatMessage, index: int) -> dict[str, Any]:
    turn = message.model_dump(
        exclude_none=True, include={"role", "name", "reasoning_content", "tool_call_id"}
    )
    turn["content"] = _text(message.content, f"messages[{index}]")
    if message.tool_calls:
        name = f"messages[{index}].tool_calls"
        if message.role != "assistant":
            raise RequestError(f"{name}: only an assistant's turn has them", param=name)
        turn["tool_calls"] = template_calls(message.tool_calls, name)
    return turn


def _text(content: str | list[dict[str, Any]] | None, name: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        part_name = f"{name}.content[{i}]"
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{part_name}: only parts of type 'text' are supported", param=part_name)
        texts.append(part["text"])
    return " ".join(texts)
