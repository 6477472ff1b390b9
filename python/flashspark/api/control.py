"""What an operator does to a running server: pause and go on, and traces of what its steps spend time on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response

from flashspark.ipc import SetStateReply

from .context import ServerContext
from .engine_client import EngineDead
from .errors import RequestError, unavailable
from .protocol import ContinueBody, PauseBody, StartProfileBody
from .wire import json_response

logger = logging.getLogger("flashspark.api")


async def _done(asked: Awaitable[SetStateReply]) -> None:
    """Waits for the scheduler to do it; a refusal is a 400 with its reason."""
    try:
        reply = await asked
    except EngineDead as error:
        raise unavailable(f"the engine is down: {error}", retry_after_s=5) from None
    except (TimeoutError, asyncio.TimeoutError):
        raise unavailable("the step loop does not answer; try again", retry_after_s=5) from None
    if reply.refusal is not None:
        raise RequestError(reply.refusal)


async def pause_generation(request: Request, context: ServerContext) -> Response:
    """Stops the step loop until /continue_generation; requests in flight do as `mode` says, and new ones wait."""
    context.check_serving()
    body = PauseBody.parse(await context.read_json(request, empty={}))
    if body.mode == "abort":
        context.engine.abort(context.engine.in_flight_ids(), "aborted by /pause_generation")
    await _done(context.engine.pause(body.mode))
    context.paused = True
    return json_response({"status": "ok", "message": f"Generation paused ({body.mode})."})


async def continue_generation(request: Request, context: ServerContext) -> Response:
    """Lets the step loop go on."""
    context.check_serving()
    ContinueBody.parse(await context.read_json(request, empty={}))
    await _done(context.engine.pause(None))
    context.paused = False
    return json_response({"status": "ok", "message": "Generation continued."})


async def start_profile(request: Request, context: ServerContext) -> Response:
    """Records a trace of the engine's steps, until /stop_profile or for `num_steps` of them."""
    context.check_serving()
    body = StartProfileBody.parse(await context.read_json(request, empty={}))
    options = body.model_dump(include=set(StartProfileBody.OPTIONS), exclude_none=True)
    await _done(context.engine.profile(options))
    return Response("Start profiling.\n", media_type="text/plain")


async def stop_profile(request: Request, context: ServerContext) -> Response:
    """Ends the trace and writes it; the log says where."""
    context.check_serving()
    ContinueBody.parse(await context.read_json(request, empty={}))
    await _done(context.engine.profile(None))
    return Response("Stop profiling.\n", media_type="text/plain")
