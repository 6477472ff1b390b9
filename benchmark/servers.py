"""What benchmarks share: a server of their own, and what a result says of where it comes from."""

from __future__ import annotations

import contextlib
import http.client
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serve(
    flags: Sequence[str], environment: Mapping[str, str] | None = None, start_seconds: float = 180
) -> Iterator[int]:
    """A server with `flags`, from when it is healthy until the block ends; yields its port.

    Raises:
        RuntimeError: it did not start; the message ends with its log.
    """
    port = free_port()
    command = [sys.executable, "-m", "flashspark.launch_server", "--port", str(port), *flags]
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stderr=log, stdout=log, env=env)
        try:
            deadline = time.monotonic() + start_seconds
            while not _is_healthy(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{' '.join(command)} did not start:\n{log.read()[-4000:]}")
                time.sleep(0.2)
            yield port
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def provenance() -> dict[str, Any]:
    """The command, the commit and the machine, for a result's file."""
    machine = {"processor": _processor(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    torch = sys.modules.get("torch")  # of a benchmark that runs models itself
    if torch is not None and torch.cuda.is_available():
        machine |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {"command": "python " + " ".join(sys.argv), "commit": _commit(), "machine": machine}


def _commit() -> str:
    """Of this checkout; empty where that is not known, in a copy of the files alone."""
    with contextlib.suppress(OSError):
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
