"""Health, models, server information, load, abort."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

import flashspark
from flashspark import envs
from flashspark.ipc import SamplingParams

from .context import ServerContext
from .engine_client import EngineClient, EngineDead
from .errors import RequestError, unavailable
from .generation import Generation, Prompt
from .metrics import kv_memory
from .protocol import AbortBody, SetInternalStateBody
from .sampling import default_speculation
from .wire import json_response, unless_disconnected

logger = logging.getLogger("flashspark.api")

# Flags that /set_internal_state changes: /server_info tells what holds now.
_LIVE_SETTINGS = frozenset({"ragged_verify_mode", "speculative_num_draft_tokens"})
_FLUSH_RETRY_S = 0.05
_SECRET_ARGS = frozenset({"api_key", "admin_api_key"})


async def health(request: Request, context: ServerContext) -> Response:
    """At once, from the step loop's signs of life."""
    return Response(status_code=200 if context.healthy else 503)


async def health_generate(request: Request, context: ServerContext) -> Response:
    """One token through the whole engine."""
    if not context.healthy or context.paused:
        return Response(status_code=503)
    try:
        await unless_disconnected(request.receive, probe(context))
    except (RequestError, TimeoutError, asyncio.TimeoutError):
        return Response(status_code=503)
    return Response(status_code=200)


async def probe(context: ServerContext) -> None:
    """Generates one token; `TimeoutError` or `RequestError` if it does not come."""
    prompt = Prompt(f"health-{uuid.uuid4().hex}", [0], SamplingParams(max_new_tokens=1, temperature=0.0))
    generation = Generation([prompt], context.tokenizer, default_speculation(context.args))
    try:
        generation.start(context.engine)
        await asyncio.wait_for(generation.run(), context.health_timeout_s)
    finally:
        generation.close()


async def ready(request: Request, context: ServerContext) -> Response:
    """Whether requests are taken and worked on."""
    return Response(status_code=200 if context.serving and not context.paused else 503)


async def root(request: Request, context: ServerContext) -> Response:
    """Says that something is here."""
    return json_response({"name": "FlashSpark", "version": flashspark.__version__})


async def ping(request: Request, context: ServerContext) -> Response:
    """Whether requests are taken."""
    return Response(status_code=200 if context.serving else 503)


def _model_card(context: ServerContext) -> dict[str, Any]:
    name = context.args.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "flashspark",
        "root": name,
        "parent": None,
        "max_model_len": context.limits.context_length,
    }


async def models(request: Request, context: ServerContext) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model_card(context)]})


async def model(request: Request, context: ServerContext) -> Response:
    """The one model by its name, which may contain slashes."""
    name = request.path_params["model_id"]
    if name != context.args.served_model_name:
        message = f"the model {name[:200]!r} does not exist; served: {context.args.served_model_name!r}"
        raise RequestError(message, param="model", status=404, code="model_not_found")
    return json_response(_model_card(context))


async def model_info(request: Request, context: ServerContext) -> Response:
    """What clients and routers read to find the tokenizer and the kind of model."""
    args, config = context.args, context.model_config
    return json_response(
        {
            "model_path": args.model_path,
            "served_model_name": args.served_model_name,
            "tokenizer_path": args.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": args.preferred_sampling_params,
            "weight_version": args.weight_version,
            "load_format": args.load_format,
            "reasoning_parser": args.reasoning_parser,
            "tool_call_parser": args.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.get("model_type"),
            "architectures": config.get("architectures"),
        }
    )


async def server_info(request: Request, context: ServerContext) -> Response:
    """Every resolved flag, the engine's limits, and its live state."""
    flags = {key: value for key, value in context.args.to_dict().items() if key not in _SECRET_ARGS}
    ready = context.ready
    tiers = _fixed_tiers(ready.info.get("verify_request_buckets"))
    state: dict[str, Any] = {}
    try:
        reply = await context.engine.state()
    except (EngineDead, TimeoutError, asyncio.TimeoutError):
        pass
    else:
        state.update(reply.state)
        if reply.info_record is not None:  # JSON already: thousands of records are not taken apart again here
            state["dspark_info_record"] = orjson.Fragment(reply.info_record)
    internal = {
        **flags,
        **ready.info,
        **tiers,
        "context_length": ready.context_length,
        "effective_max_running_requests_per_dp": ready.max_running_requests,
        "memory_usage": kv_memory(ready),
        "world_size": 1,
        **state,
    }
    body = {
        **flags,
        **ready.info,
        **tiers,
        "launch_command": context.launch_command,
        "status": context.status,
        "max_total_num_tokens": ready.max_total_num_tokens,
        "max_running_requests": ready.max_running_requests,
        "context_length": ready.context_length,
        "vocab_size": ready.vocab_size,
        "max_req_input_len": context.limits.longest_prompt,
        "startup_time": context.startup_seconds,
        "health_check_timeout": context.health_timeout_s,
        "enable_health_endpoint_generation": context.health_asks_engine,
        "timeout_keep_alive": envs.KEEP_ALIVE_TIMEOUT_S.get(),
        "version": flashspark.__version__,
        "frontend": "flashspark",
        "num_requests_in_flight": context.engine.num_in_flight,
        "heartbeat_age": context.engine.heartbeat_age_s,
        "internal_states": [internal],
    }
    body.update({name: state[name] for name in _LIVE_SETTINGS & state.keys()})
    return json_response(body)


def _fixed_tiers(buckets: Any) -> dict[str, Any]:
    """What scripts that profile a server want to know of its graphs: whether steps run in fixed shapes, and which."""
    if not isinstance(buckets, list) or not buckets:
        return {}
    decode = {"backend": "full", "bs": buckets, "max_bs": buckets[-1]}
    graphs = {"decode": decode, "prefill": {"backend": "disabled"}}
    return {"disable_cuda_graph": False, "cuda_graph_config": graphs, "decode_cuda_graph_bs": buckets}


async def abort_request(request: Request, context: ServerContext) -> Response:
    """Ends requests by the beginning of their id, or all; 200 even where nothing matches."""
    body = AbortBody.parse(await context.read_json(request))
    if not body.abort_all and not body.rid:
        raise RequestError("rid: give a request id, or abort_all: true", param="rid")
    matching = [
        request_id
        for request_id in context.engine.in_flight_ids()
        if body.abort_all or request_id.startswith(body.rid or "")
    ]
    context.engine.abort(matching, body.abort_message or "aborted by /abort_request")
    return Response(status_code=200)


async def flush_cache(request: Request, context: ServerContext) -> Response:
    """Empties the prefix cache of an idle server; `?timeout=s` waits so long for it to become idle."""
    given = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s < math.inf:
        raise RequestError(f"timeout: must be seconds, not {given[:80]!r}", param="timeout")
    try:
        flushed = await unless_disconnected(request.receive, _flush(context.engine, timeout_s))
    except EngineDead as error:
        raise unavailable(f"the engine is down: {error}", retry_after_s=5) from None
    except (TimeoutError, asyncio.TimeoutError):
        raise unavailable("the step loop does not answer; try again", retry_after_s=5) from None
    if not flushed:
        busy = "Not flushed: requests are running or waiting.\n"
        return Response(busy, status_code=400, media_type="text/plain")
    return Response("Cache flushed.\n", media_type="text/plain")


async def _flush(engine: EngineClient, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (flushed := await engine.flush_cache()) and time.monotonic() < deadline:
        await asyncio.sleep(_FLUSH_RETRY_S)
    return flushed


async def set_internal_state(request: Request, context: ServerContext) -> Response:
    """Changes live settings, all or none; the answer has one true or false per rank, and the log says why false."""
    context.check_serving()
    body = SetInternalStateBody.parse(await context.read_json(request))
    try:
        reply = await context.engine.set_state(body.server_args)
    except EngineDead as error:
        raise unavailable(f"the engine is down: {error}", retry_after_s=5) from None
    except (TimeoutError, asyncio.TimeoutError):
        raise unavailable("the step loop does not answer; try again", retry_after_s=5) from None
    if reply.refusal is not None:
        logger.warning("/set_internal_state %s refused: %s", body.server_args, reply.refusal)
    return json_response([reply.refusal is None])
