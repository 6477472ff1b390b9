"""The scheduler process: `python -m flashspark.scheduler.process`, started by the API process.

It reads one JSON line on stdin (`args`, `requests_address`, `outputs_address`) and from then on watches stdin:
when the API process is gone, however it went, the pipe ends and this process leaves.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from flashspark import envs
from flashspark.args import ServerArgs, configure_logging
from flashspark.heap import SCHEDULER_FULL_PASS_EVERY, freeze_heap
from flashspark.ipc import (
    AbortRequest,
    FlushCacheReply,
    FlushCacheRequest,
    GenerateRequest,
    Heartbeat,
    MetricsReply,
    MetricsRequest,
    PauseRequest,
    ProfileRequest,
    SchedulerChannel,
    SchedulerFailed,
    SchedulerReady,
    SetStateReply,
    SetStateRequest,
    Shutdown,
    StateReply,
    StateRequest,
    ToScheduler,
)

from .build import build_scheduler
from .deadlines import Deadlines
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .step_profiler import Option, StepProfiler

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
IDLE_WAIT_MS = 250


class SchedulerService:
    """Turns the scheduler's loop over the channel until it is told to shut down."""

    def __init__(
        self, scheduler: Scheduler, channel: SchedulerChannel, deadlines: Deadlines | None = None
    ) -> None:
        self._scheduler, self._channel, self._deadlines = scheduler, channel, deadlines or Deadlines()
        self._last_heartbeat = 0.0
        self._stopping = self._paused = False
        self._profiler: StepProfiler | None = None

    def run(self) -> None:
        """Receive, step, report; waits for messages only when there is nothing to do."""
        while not self._stopping:
            for message in self._channel.receive_all(0 if self._may_step else IDLE_WAIT_MS):
                self._handle(message)
            if self._may_step:
                self._scheduler.step()
                if self._profiler is not None:
                    self._profiler.tick(self._scheduler.num_steps)
            self._report()

    @property
    def _may_step(self) -> bool:
        return self._scheduler.has_work and not self._paused

    def _pause(self, mode: str | None) -> None:
        self._paused = mode is not None
        if self._paused:
            self._scheduler.settle()
        if mode == "retract":
            self._scheduler.retract_all()
        logger.info("the step loop %s", f"is paused ({mode})" if self._paused else "goes on")

    def _profile(self, options: Mapping[str, Option] | None) -> str | None:
        from .step_profiler import StepProfiler  # torch.profiler takes its time to load, and few ask for it

        if self._profiler is None:
            self._profiler = StepProfiler()
        if options is None:
            return self._profiler.stop()
        return self._profiler.start(options, self._scheduler.num_steps)

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case GenerateRequest():
                self._scheduler.add(message)
            case AbortRequest():
                self._scheduler.abort(message.request_ids, message.message)
            case StateRequest():
                scheduler = self._scheduler
                state = {**scheduler.state(), **scheduler.verification_state(), **scheduler.charts()}
                record = scheduler.info_record() if message.with_records else None
                self._channel.send(StateReply(message.query_id, state, record))
            case MetricsRequest():
                self._channel.send(MetricsReply(message.query_id, self._scheduler.metrics()))
            case SetStateRequest():
                refusal = self._scheduler.set_internal_state(message.values)
                logger.info("live settings %r: %s", message.values, refusal or "changed")
                self._channel.send(SetStateReply(message.query_id, refusal))
            case FlushCacheRequest():
                flushed = self._scheduler.flush_cache()
                logger.info("prefix cache: %s", "flushed" if flushed else "not flushed, requests are running")
                self._channel.send(FlushCacheReply(message.query_id, flushed))
            case PauseRequest():
                self._pause(message.mode)
                self._channel.send(SetStateReply(message.query_id))
            case ProfileRequest():
                self._channel.send(SetStateReply(message.query_id, self._profile(message.options)))
            case Shutdown():
                self._stopping = True

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat < HEARTBEAT_SECONDS:
            return
        self._last_heartbeat = now
        self._scheduler.expire(self._deadlines, now)
        state = self._scheduler.state()
        self._channel.send(
            Heartbeat(
                num_steps=int(state["num_steps"]),
                num_running_reqs=int(state["num_running_reqs"]),
                num_queue_reqs=int(state["num_queue_reqs"]),
                num_used_tokens=int(state["num_used_tokens"]),
                num_queue_tokens=sum(len(request.tokens) for request in self._scheduler.residency.queue),
            )
        )


def prepare_profiling(scheduler: Scheduler, ready: SchedulerReady) -> SchedulerReady:
    """Turns on what the environment asks for, and says so in the log and in /server_info."""
    components, simulated = envs.record_components(), envs.simulated_accept_length()
    if components:
        scheduler.keep_records(components, simulated)
        logger.info("a record of every decode step is kept for /server_info (%s)", ", ".join(components))
    if simulated is not None:
        logger.warning(
            "%s=%g: each step commits so many tokens of a request, whatever the target says of its drafts. This is for "
            "measuring step times: serve without it",
            envs.SIMULATE_ACC_LEN.name,
            simulated,
        )
    profiling = {
        "verify_request_buckets": scheduler.verify_request_buckets,
        "dspark_record_components": list(components),
        "simulate_acc_len": simulated,
    }
    return msgspec.structs.replace(ready, info={**ready.info, **profiling})


def read_deadlines() -> Deadlines:
    """What the environment asks for; a negative value means none."""
    values = (envs.REQ_WAITING_TIMEOUT_S.get(), envs.REQ_RUNNING_TIMEOUT_S.get())
    return Deadlines(*(value if value >= 0 else None for value in values))


def _leave_with_the_api_process() -> None:
    # Not through sys.stdin: a thread that blocks in its lock aborts the interpreter at a clean exit.
    while os.read(sys.stdin.fileno(), 65536):
        pass
    os._exit(0)


def main() -> int:
    """Process entry; the exit code is 0 only after a `Shutdown`."""
    # Ctrl-C and process-group signals are the API process's business: it drains, then tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = json.loads(sys.stdin.buffer.readline())
    args = ServerArgs.from_dict(start["args"])
    configure_logging(args.log_level)
    threading.Thread(target=_leave_with_the_api_process, daemon=True).start()
    channel = SchedulerChannel(start["requests_address"], start["outputs_address"])
    try:
        try:
            scheduler, ready = build_scheduler(args, channel.send)
            ready = prepare_profiling(scheduler, ready)
            deadlines = read_deadlines()
            info = {"req_waiting_timeout": deadlines.waiting_s, "req_running_timeout": deadlines.running_s}
            ready = msgspec.structs.replace(ready, info=ready.info | info)
        except ValueError as error:  # a folder, draft or limit that cannot be served: the message says it all
            logger.debug("building the scheduler failed", exc_info=True)
            channel.send(SchedulerFailed(str(error)))
            return 1
        freeze_heap(SCHEDULER_FULL_PASS_EVERY)
        channel.send(ready)
        SchedulerService(scheduler, channel, deadlines).run()
        scheduler.close()
        return 0
    except Exception as error:  # whatever it is, the clients must hear it rather than hang
        logger.error("%s", traceback.format_exc())
        channel.send(SchedulerFailed(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
