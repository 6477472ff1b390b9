"""The scheduler process as seen from the event loop: submit, outputs, abort, state, signs of life."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from flashspark.ipc import (
    AbortRequest,
    ApiChannel,
    FlushCacheReply,
    FlushCacheRequest,
    GenerateRequest,
    Heartbeat,
    MetricsReply,
    MetricsRequest,
    PauseRequest,
    ProfileRequest,
    Query,
    RequestOutput,
    SchedulerFailed,
    SchedulerMetrics,
    SchedulerReady,
    SetStateReply,
    SetStateRequest,
    Shutdown,
    StateReply,
    StateRequest,
    ToScheduler,
)

logger = logging.getLogger(__name__)


class EngineDead(Exception):
    """The scheduler process failed; the message says why. Nothing submitted will be answered any more."""


class DuplicateRequest(Exception):
    """A request id that is still in flight, or twice in one call."""


class EngineCall:
    """The requests of one client call, and what has come back for them. Owned by the route that made it."""

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._unfinished = set(request_ids)
        self._pending: list[RequestOutput] = []
        self._arrived = asyncio.Event()
        self._error: EngineDead | None = None
        self.abort_status: int | None = None  # status of an abort that the server itself ordered

    async def outputs(self) -> list[RequestOutput]:
        """Everything new, in order; waits for at least one."""
        await self._arrived.wait()
        self._arrived.clear()
        pending, self._pending = self._pending, []
        if not pending and self._error is not None:
            self._arrived.set()
            raise self._error
        return pending

    def close(self) -> None:
        """Gives up what is unfinished: the scheduler frees its slots at its next step."""
        unfinished, self._unfinished = self._unfinished, set()
        if unfinished:
            self._client.abandon(unfinished)

    def push(self, output: RequestOutput) -> None:
        """For the client's receiving task."""
        if output.finish is not None:
            self._unfinished.discard(output.request_id)
        self._pending.append(output)
        self._arrived.set()

    def fail(self, error: EngineDead) -> None:
        """For the client: nothing will come any more."""
        self._error = error
        self._unfinished.clear()
        self._arrived.set()


class EngineClient:
    """Owns the channel. `start` begins receiving; `wait_ready` returns once the scheduler can serve."""

    def __init__(self, channel: ApiChannel) -> None:
        self._channel = channel
        # None: abandoned, its id stays taken until the scheduler has said that it is gone.
        self._calls: dict[str, EngineCall | None] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._query_ids = itertools.count()
        self._ready: asyncio.Future[SchedulerReady] = asyncio.get_running_loop().create_future()
        # A send waits while no scheduler is connected, so nobody but one task sends.
        self._outbox: asyncio.Queue[ToScheduler] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_progress_s = time.monotonic()
        self.heartbeat = Heartbeat(0, 0, 0, 0)
        self.failure: str | None = None
        self.num_submitted = 0
        self.num_finished = 0

    def start(self) -> None:
        """Begins sending and receiving."""
        for work in (self._send_forever(), self._receive_forever()):
            task = asyncio.ensure_future(work)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(f"the messages of the scheduler cannot be read: {error!r}")

    async def wait_ready(self) -> SchedulerReady:
        """The limits of the engine; raises `EngineDead` if it failed to start."""
        return await asyncio.shield(self._ready)

    @property
    def ready(self) -> SchedulerReady:
        """The limits of the engine, once ready."""
        return self._ready.result()

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the step loop last showed progress."""
        return time.monotonic() - self._last_progress_s

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended, abandoned ones included."""
        return len(self._calls)

    def in_flight_ids(self) -> list[str]:
        """Ids of requests whose call still waits for them."""
        return [request_id for request_id, call in self._calls.items() if call is not None]

    def submit(self, requests: Sequence[GenerateRequest]) -> EngineCall:
        """Queues all requests of one call. Ids must be new."""
        if self.failure is not None:
            raise EngineDead(self.failure)
        ids = [request.request_id for request in requests]
        seen: set[str] = set()
        for request_id in ids:
            if request_id in self._calls or request_id in seen:
                raise DuplicateRequest(request_id)
            seen.add(request_id)
        call = EngineCall(self, ids)
        self._calls.update(dict.fromkeys(ids, call))
        self.num_submitted += len(ids)
        for request in requests:
            self._outbox.put_nowait(request)
        return call

    def abort(self, request_ids: Iterable[str], message: str, status: int | None = None) -> None:
        """Ends requests whose call waits: it gets an abort finish with this message."""
        known = [request_id for request_id in request_ids if self._calls.get(request_id) is not None]
        for request_id in known:
            call = self._calls[request_id]
            if call is not None and status is not None:
                call.abort_status = status
        if known:
            self._outbox.put_nowait(AbortRequest(known, message))

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Ends requests that nobody waits for any more."""
        known = [request_id for request_id in request_ids if request_id in self._calls]
        for request_id in known:
            self._calls[request_id] = None
        if known and self.failure is None:
            self._outbox.put_nowait(AbortRequest(known, "the client went away"))

    async def state(self, timeout_s: float = 5.0, with_records: bool = True) -> StateReply:
        """Counters and live values of the scheduler; raises `TimeoutError` when it does not answer."""
        return await self._ask(StateRequest(next(self._query_ids), with_records), timeout_s)

    async def metrics(self, timeout_s: float = 5.0) -> SchedulerMetrics:
        """The scheduler's part of /metrics; raises `TimeoutError` when it does not answer."""
        reply: MetricsReply = await self._ask(MetricsRequest(next(self._query_ids)), timeout_s)
        return reply.metrics

    async def set_state(
        self, values: dict[str, bool | int | float | str | None], timeout_s: float = 30.0
    ) -> SetStateReply:
        """Changes live settings between two steps, all or none; the reply says why where it is none."""
        return await self._ask(SetStateRequest(next(self._query_ids), values), timeout_s)

    async def flush_cache(self, timeout_s: float = 5.0) -> bool:
        """Empties the prefix cache; False, and nothing, where the scheduler is busy."""
        reply: FlushCacheReply = await self._ask(FlushCacheRequest(next(self._query_ids)), timeout_s)
        return reply.flushed

    async def pause(
        self, mode: Literal["abort", "retract", "in_place"] | None, timeout_s: float = 30.0
    ) -> SetStateReply:
        """Stops the step loop before its next step; None: lets it go on."""
        return await self._ask(PauseRequest(next(self._query_ids), mode), timeout_s)

    async def profile(
        self, options: dict[str, bool | int | float | str | list[str]] | None, timeout_s: float = 120.0
    ) -> SetStateReply:
        """Begins a trace of the step loop; None: ends it, which takes as long as writing it."""
        return await self._ask(ProfileRequest(next(self._query_ids), options), timeout_s)

    async def _ask(self, query: Query, timeout_s: float) -> Any:
        if self.failure is not None:
            raise EngineDead(self.failure)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[query.query_id] = future
        try:
            self._outbox.put_nowait(query)
            return await asyncio.wait_for(future, timeout_s)
        finally:
            del self._queries[query.query_id]

    def shut_down(self) -> None:
        """Asks the scheduler to leave."""
        self._outbox.put_nowait(Shutdown())

    def fail(self, reason: str) -> None:
        """The scheduler is gone: everyone who waits is told the reason. Only the first reason counts."""
        if self.failure is not None:
            return
        self.failure = reason
        error = EngineDead(reason)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # looked at, so that nobody has to wait for it
        for call in {call for call in self._calls.values() if call is not None}:
            call.fail(error)
        self._calls.clear()
        for future in self._queries.values():
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Stops receiving and closes the channel."""
        for task in self._tasks:
            task.cancel()
        self._channel.close()

    async def _send_forever(self) -> None:
        while True:
            await self._channel.send(await self._outbox.get())

    async def _receive_forever(self) -> None:
        while True:
            message = await self._channel.receive()
            match message:
                case RequestOutput():
                    self._route(message)
                case Heartbeat():
                    self._last_progress_s = time.monotonic()
                    self.heartbeat = message
                case StateReply() | MetricsReply() | SetStateReply() | FlushCacheReply():
                    future = self._queries.get(message.query_id)
                    if future is not None and not future.done():
                        future.set_result(message)
                case SchedulerReady():
                    self._last_progress_s = time.monotonic()
                    if not self._ready.done():
                        self._ready.set_result(message)
                case SchedulerFailed():
                    self.fail(message.message)

    def _route(self, output: RequestOutput) -> None:
        self._last_progress_s = time.monotonic()
        call = self._calls.get(output.request_id)
        if output.finish is not None and output.request_id in self._calls:
            del self._calls[output.request_id]
            self.num_finished += 1
        if call is not None:
            call.push(output)
