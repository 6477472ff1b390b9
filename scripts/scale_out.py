"""Several servers on this machine behind sglang-router, until Ctrl-C.

    python scripts/scale_out.py --servers 2 --router-python .venv-router/bin/python -- --model-path demo ...

What follows `--` goes to every server. The router listens on --port, the servers on the ports behind it, the router's
metrics on the one after those. A server that ends is started again on its port, while the router sends its requests to
the others; one that ends before it was ever healthy stops everything, as the router's end does. docs/scale-out.md
says what the router is told, and why.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOST = "127.0.0.1"
ROUTER_FLAGS = (
    *("--policy", "power_of_two"),
    *("--health-check-interval-secs", "2", "--worker-startup-check-interval", "1"),
    # With fewer failures than attempts, even a lone request ends up at a server that lives.
    *("--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "2", "--retry-max-retries", "5"),
)
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0


class ScaleOutError(Exception):
    """Something the user should read instead of a traceback."""


class Process:
    """A child in a process group of its own, with its log in a file."""

    def __init__(self, name: str, command: list[str], port: int, log_path: Path, env: dict[str, str]) -> None:
        self.name, self.port, self.log_path = name, port, log_path
        self._command, self._env = command, env
        self.start()

    def start(self) -> None:
        """Starts it, for the first time or again; the log goes on."""
        self.was_healthy = False
        with self.log_path.open("ab") as log:
            self.child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        say(f"{self.name}: pid {self.child.pid}, http://{HOST}:{self.port}, log {self.log_path}")

    def look(self) -> int | None:
        """Its exit code, None while it runs; says when it has become healthy."""
        code = self.child.poll()
        if code is None and not self.was_healthy and answers_health(self.port):
            self.was_healthy = True
            say(f"{self.name}: healthy")
        return code

    def failure(self) -> ScaleOutError:
        """An error with the end of its log."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-20:]
        text = f"{self.name} ended with code {self.child.returncode}; the end of its log:"
        return ScaleOutError("\n".join([text, "", *lines]))

    def stop(self, number: signal.Signals) -> None:
        """Signals it, and kills its whole group if that was not enough."""
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


def say(line: str) -> None:
    print(f"scale_out: {line}", flush=True)


def answers_health(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def start_server(number: int, args: argparse.Namespace, log_dir: Path) -> Process:
    """Server `number`, from 1."""
    port = args.port + number
    command = [sys.executable, "-m", "flashspark.launch_server", *args.server_flags]
    env = dict(os.environ)
    if args.one_gpu_each:
        env["CUDA_VISIBLE_DEVICES"] = str(number - 1)
    log_path = log_dir / f"server-{number}.log"
    return Process(f"server {number}", [*command, "--host", HOST, "--port", str(port)], port, log_path, env)


def start_router(servers: list[Process], args: argparse.Namespace, log_dir: Path) -> Process:
    """The router over them; it waits for servers that still load."""
    command = [args.router_python, "-m", "sglang_router.launch_router", *ROUTER_FLAGS]
    command += ["--worker-urls", *(f"http://{HOST}:{server.port}" for server in servers)]
    command += ["--host", args.host, "--port", str(args.port)]
    command += ["--prometheus-host", HOST, "--prometheus-port", str(args.port + len(servers) + 1)]
    # The servers' packages are not the router's.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return Process("router", command, args.port, log_dir / "router.log", env)


def watch(servers: list[Process], router: Process) -> None:
    """Starts again what ends, until something cannot go on."""
    while True:
        time.sleep(POLL_SECONDS)
        if router.look() is not None:
            raise router.failure()
        for server in servers:
            code = server.look()
            if code is None:
                continue
            if not server.was_healthy:
                raise server.failure()
            say(f"{server.name}: ended with code {code}, starting it again")
            server.start()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, default=2, help="how many")
    parser.add_argument("--router-python", required=True, help="a Python that has sglang-router")
    parser.add_argument("--host", default=HOST, help="the router's address")
    parser.add_argument("--port", type=int, default=30000, help="the router's port, the first of several")
    parser.add_argument("--log-dir", type=Path, help="where logs go (default: a new temporary folder)")
    parser.add_argument("--one-gpu-each", action="store_true", help="server N sees GPU N - 1 alone")
    parser.add_argument("server_flags", nargs=argparse.REMAINDER, help="-- and flags of every server")
    args = parser.parse_args()
    args.server_flags = args.server_flags[args.server_flags[:1] == ["--"] :]
    if args.servers < 1:
        parser.error("--servers must be at least 1")
    return args


def interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="flashspark-scale-out-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as started:
        try:
            servers = []
            for number in range(1, args.servers + 1):
                servers.append(start_server(number, args, log_dir))
                started.callback(servers[-1].stop, signal.SIGTERM)
            router = start_router(servers, args, log_dir)
            # Not SIGTERM: nobody is behind it any more, and it would wait for clients that keep connections open.
            started.callback(router.stop, signal.SIGKILL)
            watch(servers, router)
        except ScaleOutError as error:
            print(f"\nscale_out: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            say("stopping")
    return 0


if __name__ == "__main__":
    sys.exit(main())
