"""`sglang-router` over servers of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.server import free_port, poll
from real_clients import had, router
from scale_out import ROUTER_FLAGS

ROUTER_VERSION = "0.3.2"
TRIES = 5  # a free port may be gone when the router comes for it


def num_healthy(http: httpx.Client) -> int:
    """Workers that the router sends requests to."""
    with contextlib.suppress(httpx.TransportError):
        response = http.get("/readiness")
        if response.status_code == 200:
            return response.json()["healthy_workers"]
    return 0


@contextlib.contextmanager
def running_router(urls: list[str], log: Path, *flags: str) -> Iterator[httpx.Client]:
    """A router that knows all servers at `urls`, and a client of it."""
    client = had(router, ROUTER_VERSION)
    for _ in range(TRIES):
        port, metrics_port = free_port(), free_port()
        where = ["--host", "127.0.0.1", "--port", str(port)]
        where += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command = ["-m", "sglang_router.launch_router", "--worker-urls", *urls, *where, *ROUTER_FLAGS, *flags]
        with log.open("w") as out:
            process = client.start(*command, stdout=out, stderr=out)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as http:
                poll(
                    "a router that is ready or gone",
                    lambda: process.poll() is not None or num_healthy(http) == len(urls),  # noqa: B023
                    timeout_s=60,
                    interval_s=0.05,
                )
                if process.poll() is None:
                    yield http
                    return
        finally:
            process.kill()
            process.wait()
    pytest.fail(f"no router after {TRIES} tries:\n{log.read_text()}")
