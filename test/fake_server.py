"""The real HTTP server over the fake scheduler, as a process of its own.

with FakeServer(model_folder, "--api-key", "k") as server:
    server.client.post("/generate", json=...)
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

TEST_DIR = Path(__file__).parent
PACKAGE_DIR = TEST_DIR.parent / "python"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class FakeServer:
    def __init__(
        self, model: Path, *flags: str, env: dict[str, str] | None = None, wait: bool = True
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=20)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        command = [sys.executable, __file__, "--model-path", str(model), "--port", str(self.port), *flags]
        environ = os.environ | (env or {})
        environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_DIR), environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(command, stderr=self._log, stdout=self._log, env=environ)
        if wait:
            self.wait_healthy()

    def wait_healthy(self, timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self.client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"the server did not come up:\n{self.log}")

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    @property
    def state(self) -> dict:
        """The scheduler's counters."""
        return self.client.get("/server_info").json()["internal_states"][0]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = 15) -> int:
        return self.process.wait(timeout_s)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._log.close()


if __name__ == "__main__":
    from flashspark.args import configure_logging, parse_args
    from flashspark.launch_server import run

    server_args = parse_args(sys.argv[1:])
    configure_logging(server_args.log_level)
    sys.exit(run(server_args, "a test", [sys.executable, str(TEST_DIR / "fake_scheduler.py")]))
