"""`python -m flashspark.launch_server`: the port, the scheduler process, the HTTP server, and their end."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":  # the imports below take a second, and there is nothing to drain yet
    for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(_number) != signal.SIG_IGN:  # nohup
            signal.signal(_number, lambda *_: sys.exit(0))

import asyncio
import contextlib
import json
import logging
import resource
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from flashspark import envs
from flashspark.api.admin import probe
from flashspark.api.app import StartupGate, create_app
from flashspark.api.context import ServerContext, StartupError, load_tokenizer
from flashspark.api.engine_client import EngineClient, EngineDead
from flashspark.api.errors import RequestError
from flashspark.args import ArgumentError, ServerArgs, configure_logging, parse_args
from flashspark.heap import freeze_heap
from flashspark.ipc import ApiChannel

logger = logging.getLogger("flashspark")
T = TypeVar("T")

SCHEDULER_COMMAND = (sys.executable, "-m", "flashspark.scheduler.process")
_LEAVE_SECONDS = 5.0  # what a scheduler gets to leave by itself, and open responses to be written
_ABORT_SECONDS = 3.0  # what it gets, when draining has taken too long, to end what still runs
_WATCH_SECONDS = 1.0  # between two looks at the scheduler
_MAX_HEADER_BYTES = 64 << 10  # request line and headers
_MAX_OPEN_FILES = 65536
_MAX_IPC_PATH = 90  # a socket's path may have 107 bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Process entry; the exit code is 2 for flags that cannot be honoured, 1 for a failed server."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    configure_logging(args.log_level)
    for name in envs.unavailable_settings():
        print(f"{name} is set and not available yet: unset it", file=sys.stderr)
        return 2
    try:
        envs.simulated_accept_length()
        envs.record_components()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return run(args, f"python -m flashspark.launch_server {_shown(argv)}")


def _shown(argv: Sequence[str]) -> str:
    """The command line without keys."""
    shown, hide_next = [], False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = name.startswith("--a") and any(
            flag.startswith(name) for flag in ("--api-key", "--admin-api-key")
        )
        shown.append("***" if hide_next else f"{name}=***" if secret and equals else word)
        hide_next = secret and not equals
    return shlex.join(shown)


def run(args: ServerArgs, command: str, scheduler_command: Sequence[str] = SCHEDULER_COMMAND) -> int:
    """Runs a server to its end and returns the exit code. Tests name another scheduler."""
    for line in args.warnings():
        logger.warning("%s", line)
    _raise_file_limit()
    folder: str | None = None
    try:
        listener = _listen(args.host, args.port)
        folder = _socket_folder()
        server = _Server(args, command, listener, folder, scheduler_command)
        return _run_loop(server.run())
    except (StartupError, ArgumentError) as error:
        logger.error("%s", error)
        return 1
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _raise_file_limit() -> None:
    """Each connection takes a file descriptor, and many systems give 1,024 to whoever does not ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system may have limits of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run_loop(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.run(work)
    return uvloop.run(work)


def _listen(host: str, port: int) -> socket.socket:
    """Binds before anything is loaded: a port in use is known at once, and nobody can take it meanwhile."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may bind one port as long as neither listens.
        listener.listen(2048)
    except (OSError, ValueError) as error:  # ValueError: a name that no host can have
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(
            f"cannot listen on {host}:{port} ({reason}): choose a free port with --port, "
            "an address of this machine with --host"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _socket_folder() -> str:
    """A private folder for the sockets between the processes."""
    folder = tempfile.mkdtemp(prefix="flashspark-")
    if len(folder) > _MAX_IPC_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="flashspark-", dir="/tmp")
    return folder


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: signals drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_config(args: ServerArgs, app: StartupGate) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level=args.log_level_http or args.log_level,
        lifespan="off",
        ws="none",
        server_header=False,
        http="h11",  # also where another parser is installed: the limit is one of this one
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_keep_alive=envs.KEEP_ALIVE_TIMEOUT_S.get(),
        timeout_graceful_shutdown=int(_LEAVE_SECONDS),
    )


class _Server:
    """One server's life: start the scheduler, serve, drain, stop."""

    def __init__(
        self,
        args: ServerArgs,
        command: str,
        listener: socket.socket,
        folder: str,
        scheduler_command: Sequence[str],
    ) -> None:
        self._args = args
        self._command = command
        self._listener = listener
        self._folder = folder
        self._scheduler_command = scheduler_command
        self._started_s = time.monotonic()
        self._signalled = asyncio.Event()
        self._num_signals = 0
        self._stopping = False
        self._exit_code = 0
        self._scheduler: asyncio.subprocess.Process | None = None
        self._gate = StartupGate()
        self._http = _HttpServer(_http_config(args, self._gate))
        self._context: ServerContext | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Serves until a signal or a failure."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal, number)
        if not Path(self._args.model_path).is_dir():
            raise StartupError(f"--model-path {self._args.model_path}: no such folder (shipped models: demo)")
        tokenizer = load_tokenizer(self._args)
        addresses = [f"ipc://{self._folder}/{name}" for name in ("requests", "outputs")]
        channel = ApiChannel(*addresses)
        engine = EngineClient(channel)
        engine.start()
        try:
            await self._start_scheduler(addresses)
            self._spawn(self._watch_scheduler(engine))
            serving = asyncio.ensure_future(self._serve())
            try:
                if await self._wait_ready(engine):
                    self._open(ServerContext(self._args, tokenizer, engine, self._command))
                    await serving
            finally:
                self._http.should_exit = True
                await serving
        finally:
            await self._stop(engine)
        # A signal may come between an engine's last words and its end.
        return self._exit_code or int(self._context is not None and engine.failure is not None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            logger.error("second signal: leaving at once")
            if self._scheduler is not None and self._scheduler.returncode is None:
                self._scheduler.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(128 + number)
        logger.info("%s: shutting down", signal.Signals(number).name)
        self._signalled.set()

    async def _start_scheduler(self, addresses: Sequence[str]) -> None:
        # A session of its own: signals to our process group reach only us, and we drain before it leaves.
        self._scheduler = await asyncio.create_subprocess_exec(
            *self._scheduler_command,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
        start = {
            "args": self._args.to_dict(),
            "requests_address": addresses[0],
            "outputs_address": addresses[1],
        }
        stdin = self._scheduler.stdin
        assert stdin is not None
        # The pipe stays open: its end tells the scheduler that we are gone, however we went. A scheduler that is dead
        # already shows as a broken pipe or, to uvloop, as a closed handle; `_watch_scheduler` says how it ended.
        with contextlib.suppress(ConnectionError, RuntimeError):
            stdin.write(json.dumps(start).encode() + b"\n")
            await stdin.drain()

    async def _watch_scheduler(self, engine: EngineClient) -> None:
        """A dead or silent scheduler ends the server, with a reason."""
        assert self._scheduler is not None
        exited = asyncio.ensure_future(self._scheduler.wait())
        while not exited.done():
            asked_s = time.monotonic()
            await asyncio.wait({exited}, timeout=_WATCH_SECONDS)
            if time.monotonic() - asked_s > 1.5 * _WATCH_SECONDS:
                continue  # this process was stopped or busy: what the scheduler sent meanwhile is not read yet
            if (
                engine.failure is not None and not exited.done()
            ):  # it said so itself: it leaves, or is made to
                await asyncio.wait({exited}, timeout=_LEAVE_SECONDS)
                if not exited.done():
                    self._scheduler.kill()
                continue
            age_s = engine.heartbeat_age_s
            if self._context is not None and age_s > self._args.watchdog_timeout and not exited.done():
                reason = f"the scheduler has been silent for {age_s:.0f} s (--watchdog-timeout)"
                self._fail(engine, reason)
                self._scheduler.kill()
        if self._stopping:
            return
        await asyncio.sleep(0.3)  # its last message may still be on the way
        code = exited.result()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._fail(engine, f"the scheduler process {how}")

    def _fail(self, engine: EngineClient, reason: str) -> None:
        engine.fail(reason)  # keeps the first reason: what the scheduler itself said
        if self._exit_code == 0 and self._context is not None:  # before, it is a failure to start
            logger.error("the engine failed: %s", engine.failure)
        self._exit_code = 1
        if self._context is not None:
            self._context.status = "failed"
        self._http.should_exit = True

    async def _wait_ready(self, engine: EngineClient) -> bool:
        """Whether the engine is ready; False when a signal came first."""
        ready = asyncio.ensure_future(engine.wait_ready())
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait({ready, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not ready.done():
            ready.cancel()
            return False
        try:
            ready.result()
        except EngineDead as error:
            raise StartupError(f"the engine failed to start: {error}") from None
        return True

    async def _serve(self) -> None:
        await self._http.serve(sockets=[self._listener])

    def _open(self, context: ServerContext) -> None:
        """From here on requests reach the routes."""
        self._context = context
        self._gate.app = create_app(context)
        self._spawn(self._warm_up(context))
        self._spawn(self._drain_on_signal(context))

    async def _warm_up(self, context: ServerContext) -> None:
        """One request through the engine before the server calls itself ready."""
        if not self._args.skip_server_warmup:
            try:
                await probe(context)
            except (RequestError, TimeoutError, asyncio.TimeoutError) as error:
                self._fail(context.engine, f"the warm-up request failed: {error or 'no answer'}")
                return
        freeze_heap()
        context.startup_seconds = time.monotonic() - self._started_s
        if context.status == "starting":
            context.status = "ready"
            logger.info("Listening on %s", _url(self._listener))
            logger.info("The server is fired up and ready to roll!")  # what scripts wait for

    async def _drain_on_signal(self, context: ServerContext) -> None:
        """Lets running requests finish until the deadline, then ends them with a reason."""
        await self._signalled.wait()
        if not context.failed:
            context.status = "draining"
        engine = context.engine
        deadline_s = time.monotonic() + self._args.shutdown_timeout
        while engine.num_in_flight and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        if engine.num_in_flight:
            seconds = f"{self._args.shutdown_timeout:g}"
            logger.warning("ending %d requests after %s s of draining", engine.num_in_flight, seconds)
            message = f"the server is shutting down and ended this request after {seconds} s"
            engine.abort(engine.in_flight_ids(), message, status=503)
            grace_s = time.monotonic() + _ABORT_SECONDS
            while engine.num_in_flight and time.monotonic() < grace_s:
                await asyncio.sleep(0.05)
        if engine.num_in_flight:  # nobody else would tell their clients
            self._fail(engine, "the server is shutting down, and the scheduler does not answer")
            if self._scheduler is not None and self._scheduler.returncode is None:
                self._scheduler.kill()
        self._http.should_exit = True

    async def _stop(self, engine: EngineClient) -> None:
        """Ends the scheduler, politely first."""
        self._stopping = True
        process = self._scheduler
        if process is not None and process.returncode is None:
            if self._context is None:  # still loading: it would not listen, and has nothing to lose
                process.kill()
            engine.shut_down()
            try:
                await asyncio.wait_for(process.wait(), _LEAVE_SECONDS)
            except (TimeoutError, asyncio.TimeoutError):
                logger.warning("the scheduler did not leave; killing it")
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
