"""Prompts of the OpenAI routes: texts, ids, conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flashspark.text import ChatTemplateError
from flashspark.text.chat_template import ChatTemplate

from .context import ServerContext
from .errors import RequestError
from .generation import Prompt
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
            )
        )
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


async def chat_prompt(body: ChatBody, context: ServerContext, call_id: str) -> Prompt:
    """The one prompt of `/v1/chat/completions`."""
    kwargs = body.chat_template_kwargs or {}
    text = await render_chat(body.messages, kwargs, context)
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
    return Prompt(
        request_id=request_ids(body.rid, 1, call_id)[0],
        input_ids=input_ids,
        sampling=params,
        n=body.n,
        no_stop_trim=body.no_stop_trim,
        stream_interval=context.args.stream_interval,
        text=text,
        cache_namespace=cache_namespaces(body, 1)[0],
    )


async def render_chat(
    messages: Sequence[ChatMessage], template_kwargs: dict[str, Any], context: ServerContext
) -> str:
    """A conversation as the text the model was trained on, however long it is."""
    num_parts = sum(len(message.content) if isinstance(message.content, list) else 1 for message in messages)
    if num_parts <= _INLINE_PARTS:
        return _render(messages, template_kwargs, context)
    return await asyncio.to_thread(_render, messages, template_kwargs, context)


def _render(messages: Sequence[ChatMessage], template_kwargs: dict[str, Any], context: ServerContext) -> str:
    reserved = ChatTemplate.RESERVED & template_kwargs.keys()
    if reserved:
        name = f"chat_template_kwargs.{min(reserved)}"
        raise RequestError(f"{name}: is set by the server", param=name)
    turns = [_turn(message, i) for i, message in enumerate(messages)]
    try:
        return context.tokenizer.apply_chat_template(turns, template_kwargs=template_kwargs)
    except ChatTemplateError as error:
        raise RequestError(f"messages: {error}", param="messages") from None


def _turn(message: ChatMessage, index: int) -> dict[str, Any]:
    turn = message.model_dump(
        exclude_none=True, include={"role", "name", "reasoning_content", "tool_call_id"}
    )
    content = message.content
    if isinstance(content, list):
        texts = []
        for i, part in enumerate(content):
            name = f"messages[{index}].content[{i}]"
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(f"{name}: only parts of type 'text' are supported", param=name)
            texts.append(part["text"])
        content = " ".join(texts)
    turn["content"] = content or ""
    return turn
