"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .chat_tools import check_tools
from .context import ServerContext
from .errors import RequestError
from .openai_prompts import render_chat
from .protocol import DetokenizeBody, TokenizeBody
from .sampling import check_token_ids, encode
from .wire import json_response

_INLINE_IDS = 4096  # more are decoded in a thread: the event loop serves everyone else meanwhile


async def tokenize(request: Request, context: ServerContext) -> Response:
    """Ids of a text, of several texts, or of a conversation."""
    body = TokenizeBody.parse(await context.read_json(request, content_type=True))
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: exactly one of prompt and messages is required", param="prompt")
    if body.tools and body.messages is None:
        raise RequestError("tools: only with messages", param="tools")
    limits = context.limits
    tokens: Any
    if body.messages is not None:
        check_tools(body.tools, context)
        text = await render_chat(body.messages, body.chat_template_kwargs or {}, context, body.tools)
        tokens = await encode(context.tokenizer, text, "messages", add_special_tokens=False)
    elif isinstance(body.prompt, list):
        tokens = [
            await encode(context.tokenizer, text, f"prompt[{i}]", body.add_special_tokens)
            for i, text in enumerate(body.prompt)
        ]
    else:
        tokens = await encode(context.tokenizer, body.prompt or "", "prompt", body.add_special_tokens)
    several = isinstance(body.prompt, list)
    count = [len(ids) for ids in tokens] if several else len(tokens)
    return json_response({"tokens": tokens, "count": count, "max_model_len": limits.context_length})


async def detokenize(request: Request, context: ServerContext) -> Response:
    """Text of ids, or texts of lists of ids."""
    body = DetokenizeBody.parse(await context.read_json(request, content_type=True))
    several = any(isinstance(item, list) for item in body.tokens)
    if several or len(body.tokens) > _INLINE_IDS:
        texts = await asyncio.to_thread(_texts, body, several, context)
    else:
        texts = _texts(body, several, context)
    return json_response({"text": texts if several else texts[0]})


def _texts(body: DetokenizeBody, several: bool, context: ServerContext) -> list[str]:
    texts = []
    for i, ids in enumerate(body.tokens if several else [body.tokens]):
        name = f"tokens[{i}]" if several else "tokens"
        checked = check_token_ids(ids, name, context.limits)
        texts.append(context.tokenizer.decode(checked, body.skip_special_tokens))
    return texts
