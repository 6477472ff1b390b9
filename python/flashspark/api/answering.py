"""From a started generation to an HTTP answer: whole or as an event stream, abandoned when the client goes."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol

from starlette.requests import Request

from .errors import RequestError
from .generation import Choice, Generation
from .wire import DONE_FRAME, EventStream, frame, unless_disconnected

logger = logging.getLogger("flashspark.api")


class StreamFormat(Protocol):
    """How one route writes its frames."""

    def update(self, changed: Iterable[Choice]) -> list[Any]:
        """Frame bodies for choices that grew or ended."""
        ...

    def last(self) -> list[Any]:
        """Frame bodies after every choice has ended, before `[DONE]`."""
        ...

    def error(self, error: RequestError) -> Any:
        """The body of an error frame."""
        ...


async def complete(request: Request, generation: Generation) -> None:
    """Waits for all answers."""
    try:
        await unless_disconnected(request.receive, generation.run())
    finally:
        generation.close()


async def stream(request: Request, generation: Generation, form: StreamFormat) -> EventStream:
    """An event stream. Its 200 waits for the first tokens: what fails before them can still be a status."""
    generation.is_streaming = True
    try:
        first = await unless_disconnected(request.receive, generation.first_updates())
    except BaseException:
        generation.close()
        raise
    return EventStream(_frames(generation, form, first), generation.close)


async def _frames(
    generation: Generation, form: StreamFormat, changed: list[Choice]
) -> AsyncGenerator[bytes, None]:
    try:
        while True:
            bodies = form.update(changed)
            if bodies:
                yield b"".join(map(frame, bodies))
            if generation.finished:
                break
            changed = await generation.updates()
        last = form.last()
        if last:
            yield b"".join(map(frame, last))
    except RequestError as error:
        yield frame(form.error(error))
    except Exception:  # a bug of ours: this stream alone ends, and says so
        logger.exception("the stream of request %r failed", generation.prompts[0].request_id)
        yield frame(form.error(RequestError("internal error", status=500, code="internal_error")))
    yield DONE_FRAME
