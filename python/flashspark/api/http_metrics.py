"""HTTP requests and responses for `/metrics`, by endpoint, method and status."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import PREFIX

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})
OTHER = "other"


class HttpMetricsMiddleware:
    """Counts what comes in and what goes out. Paths and methods that nobody serves are one label value, `other`."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, paths: frozenset[str]) -> None:
        self._app, self._paths = app, paths
        labels = ("endpoint", "method")
        self._requests = Counter(PREFIX + "http_requests", "HTTP requests.", labels, registry=registry)
        self._active = Gauge(
            PREFIX + "http_requests_active", "HTTP requests being answered.", labels, registry=registry
        )
        self._responses = Counter(
            PREFIX + "http_responses", "HTTP responses.", (*labels, "status_code"), registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = scope["path"] if scope["path"] in self._paths else OTHER
        method = scope["method"] if scope["method"] in _METHODS else OTHER

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses.labels(endpoint, method, str(message["status"])).inc()
            await send(message)

        self._requests.labels(endpoint, method).inc()
        active = self._active.labels(endpoint, method)
        active.inc()
        try:
            await self._app(scope, receive, counted)
        finally:
            active.dec()
