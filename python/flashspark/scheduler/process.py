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

import msgspec

from flashspark import envs
from flashspark.args import ServerArgs, configure_logging
from flashspark.ipc import (
    AbortRequest,
    FlushCacheReply,
    FlushCacheRequest,
    GenerateRequest,
    Heartbeat,
    MetricsReply,
    MetricsRequest,
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
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
IDLE_WAIT_MS = 250


class SchedulerService:
    """Turns the scheduler's loop over the channel until it is told to shut down."""

    def __init__(self, scheduler: Scheduler, channel: SchedulerChannel) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._last_heartbeat = 0.0
        self._stopping = False

    def run(self) -> None:
        """Receive, step, report; waits for messages only when there is nothing to do."""
        while not self._stopping:
            for message in self._channel.receive_all(0 if self._scheduler.has_work else IDLE_WAIT_MS):
                self._handle(message)
            if self._scheduler.has_work:
                self._scheduler.step()
            self._report()

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
            case Shutdown():
                self._stopping = True

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat < HEARTBEAT_SECONDS:
            return
        self._last_heartbeat = now
        state = self._scheduler.state()
        self._channel.send(
            Heartbeat(
                num_steps=int(state["num_steps"]),
                num_running_reqs=int(state["num_running_reqs"]),
                num_queue_reqs=int(state["num_queue_reqs"]),
                num_used_tokens=int(state["num_used_tokens"]),
            )
        )


def prepare_profiling(scheduler: Scheduler, ready: SchedulerReady) -> SchedulerReady:
    """Turns on what the environment asks for, and says so in the log and in /server_info."""
    components, simulated = envs.record_components(), envs.simulated_accept_length()
    if components:
        scheduler.keep_records(components, simulated)
        logger.info("a record of every decode step is kept for /server_info (%s)", ", ".join(components))
    if simulated is not None:
        scheduler.accept_no_drafts()
        logger.warning(
            "%s=%g: no draft is accepted, each step commits one token per request. This is for measuring step "
            "times: serve without it",
            envs.SIMULATE_ACC_LEN.name,
            simulated,
        )
    profiling = {
        "verify_request_buckets": scheduler.verify_request_buckets,
        "dspark_record_components": list(components),
        "simulate_acc_len": simulated,
    }
    return msgspec.structs.replace(ready, info={**ready.info, **profiling})


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
        except ValueError as error:  # a folder, draft or limit that cannot be served: the message says it all
            logger.debug("building the scheduler failed", exc_info=True)
            channel.send(SchedulerFailed(str(error)))
            return 1
        channel.send(ready)
        SchedulerService(scheduler, channel).run()
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
