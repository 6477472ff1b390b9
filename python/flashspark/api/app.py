"""The FastAPI application: which path leads where, and what becomes of errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import flashspark

from . import admin, control, dashboard, loads, metrics, native, openai, text_routes
from .context import ServerContext
from .errors import RequestError, error_response, unavailable
from .http_metrics import HttpMetricsMiddleware
from .middleware import KeyMiddleware, RequestIdMiddleware
from .protocol import BODIES
from .wire import ClientGone

logger = logging.getLogger("flashspark.api")

Handler = Callable[[Request, ServerContext], Awaitable[Response]]

ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/generate", ("POST", "PUT"), native.generate),
    ("/v1/completions", ("POST",), openai.completions),
    ("/v1/chat/completions", ("POST",), openai.chat_completions),
    ("/v1/models", ("GET",), admin.models),
    ("/v1/models/{model_id:path}", ("GET",), admin.model),
    ("/tokenize", ("POST",), text_routes.tokenize),
    ("/v1/tokenize", ("POST",), text_routes.tokenize),
    ("/detokenize", ("POST",), text_routes.detokenize),
    ("/v1/detokenize", ("POST",), text_routes.detokenize),
    ("/health", ("GET", "HEAD"), admin.health),
    ("/health_generate", ("GET",), admin.health_generate),
    ("/ready", ("GET", "HEAD"), admin.ready),
    ("/ping", ("GET", "HEAD"), admin.ping),
    ("/", ("GET", "HEAD"), admin.root),
    ("/model_info", ("GET",), admin.model_info),
    ("/get_model_info", ("GET",), admin.model_info),
    ("/server_info", ("GET",), admin.server_info),
    ("/get_server_info", ("GET",), admin.server_info),
    ("/metrics", ("GET",), metrics.metrics),
    ("/metrics/{path:path}", ("GET",), metrics.metrics),
    ("/dashboard", ("GET", "HEAD"), dashboard.dashboard),
    ("/dashboard/state", ("GET",), dashboard.dashboard_state),
    ("/get_load", ("GET",), loads.get_load),
    ("/v1/loads", ("GET",), loads.loads),
    ("/abort_request", ("POST",), admin.abort_request),
    ("/flush_cache", ("GET", "POST"), admin.flush_cache),
    ("/set_internal_state", ("POST", "PUT"), admin.set_internal_state),
    ("/pause_generation", ("POST",), control.pause_generation),
    ("/continue_generation", ("POST",), control.continue_generation),
    ("/start_profile", ("GET", "POST"), control.start_profile),
    ("/stop_profile", ("GET", "POST"), control.stop_profile),
)


class StartupGate:
    """Answers 503 to everything until there is an application to ask."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            error = unavailable("the server is starting", retry_after_s=2)
            await error_response(scope["path"], error)(scope, receive, send)


def create_app(context: ServerContext) -> FastAPI:
    """The application of one server."""
    app = FastAPI(title="FlashSpark", version=flashspark.__version__)
    for path, method, handler in ((path, one, handler) for path, every, handler in ROUTES for one in every):
        app.add_api_route(
            path,
            _endpoint(handler, context),
            methods=[method],
            name=handler.__name__,
            operation_id=f"{method.lower()}_{path.strip('/').replace('/', '_') or 'root'}",
            summary=(handler.__doc__ or "").strip(),
            openapi_extra=_document(path),
            response_class=Response,
        )
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(KeyMiddleware, api_key=context.args.api_key, admin_api_key=context.args.admin_api_key)
    app.add_middleware(RequestIdMiddleware)
    if context.metrics is not None:
        paths = frozenset(path for path, _, _ in ROUTES if "{" not in path)
        app.add_middleware(HttpMetricsMiddleware, registry=context.metrics.registry, paths=paths)
    return app


def _endpoint(handler: Handler, context: ServerContext) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, context)

    return endpoint


def _document(path: str) -> dict[str, Any]:
    """Bodies are parsed by hand (limits, strictness, shapes of errors); the OpenAPI document still describes them."""
    text = {"type": "string"}
    names = re.findall(r"{(\w+)", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    document: dict[str, Any] = {"parameters": parameters} if parameters else {}
    body = BODIES.get(path) or BODIES.get(path.removeprefix("/v1"))
    if body is not None:
        schema = _inline(body.model_json_schema())
        document["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return document


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references, which would point outside the operation."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items()}

    return resolve(schema)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(request.url.path, error)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    request_id = request.scope.get("state", {}).get("request_id")
    logger.error("%s %s x-request-id=%r failed: %r", request.method, request.url.path, request_id, error)
    return error_response(request.url.path, RequestError("internal error", status=500, code="internal_error"))
