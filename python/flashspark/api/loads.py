"""How busy the server is: `/get_load`, which routers poll, and `/v1/loads`, which says more."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import flashspark

from .context import ServerContext
from .engine_client import EngineDead
from .errors import RequestError, unavailable
from .metrics import kv_memory
from .wire import json_response

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues")


async def get_load(request: Request, context: ServerContext) -> Response:
    """One entry per data-parallel rank; routers poll it."""
    beat = context.engine.heartbeat
    return json_response(
        [
            {
                "dp_rank": 0,
                "num_reqs": beat.num_running_reqs + beat.num_queue_reqs,
                "num_waiting_reqs": beat.num_queue_reqs,
                "num_tokens": beat.num_used_tokens + beat.num_queue_tokens,
                "num_pending_tokens": beat.num_queue_tokens,
                "ts_tic": time.perf_counter(),
            }
        ]
    )


async def loads(request: Request, context: ServerContext) -> Response:
    """Load per rank; `?include=` names sections (core, memory, spec, lora, disagg, queues, all), `?dp_rank=` one rank,
    `?format=prometheus` asks for text gauges."""
    query = request.query_params
    sections = _sections(query.get("include", "all"))
    rank = query.get("dp_rank")
    if rank is not None and not (rank.isascii() and rank.isdecimal()):
        raise RequestError(f"dp_rank: must be a whole number, not {rank[:40]!r}", param="dp_rank")
    shape = query.get("format", "json")
    if shape not in {"json", "prometheus"}:
        raise RequestError(f"format: must be json or prometheus, not {shape[:40]!r}", param="format")
    found = [await _load(context, sections)] if rank is None or int(rank) == 0 else []
    if shape == "prometheus":
        lines = [
            f'sglang:load_{name}{{dp_rank="{load["dp_rank"]}"}} {value}\n'
            for load in found
            for name, value in load.items()
            if isinstance(value, int | float) and name != "dp_rank"
        ]
        return Response("".join(lines), headers={"content-type": CONTENT_TYPE_LATEST})
    device = str(context.ready.info.get("device", "cpu"))
    return json_response(
        {
            "timestamp": time.time(),
            "version": flashspark.__version__,
            "accelerator": device.partition(":")[0],
            "num_accelerators": 0 if device == "cpu" else 1,
            "loads": found,
        }
    )


def _sections(include: str) -> set[str]:
    wanted = {name.strip() for name in include.split(",") if name.strip()}
    unknown = sorted(wanted - {*SECTIONS, "all"})
    if unknown:
        message = f"include: no section {unknown[0][:40]!r}; there are {', '.join(SECTIONS)} and all"
        raise RequestError(message, param="include")
    return set(SECTIONS) if "all" in wanted else wanted | {"core"}


async def _load(context: ServerContext, sections: set[str]) -> dict[str, Any]:
    """The only rank's entry, from the scheduler's metrics."""
    try:
        metrics = await context.engine.metrics()
    except EngineDead as error:
        raise unavailable(f"the engine is down: {error}", retry_after_s=5) from None
    except (TimeoutError, asyncio.TimeoutError):
        raise unavailable("the step loop does not answer; try again", retry_after_s=5) from None
    values = {sample.name: sample.value for sample in metrics.samples if not sample.labels}
    ready, queued = context.ready, context.engine.heartbeat.num_queue_tokens
    running, used = int(values.get("num_running_reqs", 0)), int(values.get("num_used_tokens", 0))
    waiting = int(values.get("num_queue_reqs", 0))
    load: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": queued,
        "num_used_tokens": used,
        "num_total_tokens": used + queued,
        "max_total_num_tokens": ready.max_total_num_tokens,
        "max_running_requests": ready.max_running_requests,
        "token_usage": values.get("token_usage", 0.0),
        "gen_throughput": values.get("gen_throughput", 0.0),
        "cache_hit_rate": values.get("cache_hit_rate", 0.0),
        "utilization": running / ready.max_running_requests,
    }
    if "memory" in sections:
        memory = kv_memory(ready)
        load["memory"] = {"kv_cache_gb": memory["kvcache"], "token_capacity": memory["token_capacity"]}
    if "spec" in sections and "spec_accept_length" in values:
        rate = values.get("spec_accept_rate")
        load["speculative"] = {"accept_length": values["spec_accept_length"], "accept_rate": rate}
    if "queues" in sections:
        load["queues"] = {"waiting": waiting, "retracted": int(values.get("num_retracted_reqs", 0))}
    return load
