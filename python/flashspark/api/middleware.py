"""Around every route: request ids that come back, and keys."""

from __future__ import annotations

import hmac
import re
import uuid
from typing import Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .wire import json_response

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN_PREFIXES = ("/health", "/ready", "/metrics")
_OPEN_PATHS = frozenset({"/dashboard"})  # the page alone: what it asks for needs the key
_ADMIN_PATHS = frozenset(
    {
        *("/abort_request", "/flush_cache", "/set_internal_state"),
        *("/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"),
    }
)
AuthClass = Literal["open", "normal", "admin"]


def auth_class(path: str) -> AuthClass:
    """Which key a path wants: none, the API key, or the admin key (where one is set, else the API key)."""
    if path in _OPEN_PATHS or path.startswith(_OPEN_PREFIXES):
        return "open"
    return "admin" if path in _ADMIN_PATHS else "normal"


class RequestIdMiddleware:
    """Echoes `x-request-id`, so that logs of proxy and engine can be joined; makes one up where it is absent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id  # for log lines

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class KeyMiddleware:
    """Bearer keys: none on open paths; the admin key, where set, on management paths; the API key elsewhere."""

    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope):
            await json_response({"error": "Unauthorized"}, status=401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        needed = auth_class(scope["path"])
        if scope["method"] == "OPTIONS" or needed == "open":
            return True
        key = self._api_key
        if needed == "admin" and self._admin_api_key is not None:
            key = self._admin_api_key
        if key is None:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are read as Latin-1: this gives back the bytes that were sent.
        sent = given.strip().encode("latin-1")
        return scheme.lower() == "bearer" and hmac.compare_digest(sent, key.encode())
