"""Bytes in and out: JSON bodies under a limit, JSON answers, event streams, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE_FRAME = b"data: [DONE]\n\n"


class BodyTooLarge(Exception):
    """The body is larger than the limit. What lies beyond the limit was not read."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the request body is larger than the limit of {limit_bytes} bytes (--max-body-bytes)"
        )


class ClientGone(Exception):
    """The client closed its connection before the answer."""


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer. orjson writes NaN and infinities as null, so that what leaves is always valid JSON."""
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")


def frame(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body; stops reading at the limit.

    A declared length above it is refused at once. The server then discards what still arrives, so that a
    client which only listens after sending gets its answer.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled (and `ClientGone` raised) when the client goes away first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for unfinished in (task, watcher):
            if not unfinished.done():
                unfinished.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Sends frames as they come; calls `on_close` at the end, at once when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream"
        self._frames = frames
        self._on_close = on_close  # a generator that never ran would not run its own `finally`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_frames(send))
        except ClientGone:
            pass
        finally:
            self._on_close()
            await self._frames.aclose()

    async def _send_frames(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._frames:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
