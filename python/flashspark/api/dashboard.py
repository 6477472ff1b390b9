"""`/dashboard`: one page that shows the server at work, and the numbers it polls."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

import flashspark

from .context import ServerContext
from .engine_client import EngineDead
from .errors import unavailable
from .wire import json_response

_KEY = 'data-key="none"'  # in the page: whether it has to ask for a key before it polls


@functools.cache
def page(needs_key: bool) -> tuple[bytes, str]:
    """The page, and the content security policy under which it runs: its own script and style, by their hashes."""
    text = resources.files(__package__).joinpath("dashboard.html").read_text(encoding="utf-8")
    assert text.count(_KEY) == 1
    if needs_key:
        text = text.replace(_KEY, 'data-key="required"')
    policy = {"default-src": "'none'", "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'"}
    policy |= {"form-action": "'none'", "frame-ancestors": "'none'"}
    for kind in ("script", "style"):
        (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        policy[f"{kind}-src"] = f"'sha256-{digest}'"
    return text.encode(), "; ".join(f"{name} {value}" for name, value in policy.items())


async def dashboard(request: Request, context: ServerContext) -> Response:
    """The page, open to all: without a key it shows nothing of the server."""
    content, policy = page(context.args.api_key is not None)
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(content, headers=headers, media_type="text/html")


async def dashboard_state(request: Request, context: ServerContext) -> Response:
    """What the page polls: the live part of /server_info without the records of steps."""
    try:
        reply = await context.engine.state(with_records=False)
    except EngineDead as error:
        raise unavailable(f"the engine is down: {error}", retry_after_s=5) from None
    except (TimeoutError, asyncio.TimeoutError):
        raise unavailable("the step loop does not answer; try again", retry_after_s=5) from None
    args = context.args
    return json_response(
        {
            "status": context.status,
            "version": flashspark.__version__,
            "served_model_name": args.served_model_name,
            "speculative_algorithm": args.speculative_algorithm,
            "max_total_num_tokens": context.ready.max_total_num_tokens,
            "state": reply.state,
        }
    )
