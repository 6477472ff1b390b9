"""A real server process for tests: start it with flags, talk to it, look at its pools, stop it by signal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import psutil
import pytest

CONTEXT = 4096  # of the tiny pair
LONG = 3500  # output tokens that take the tiny pair many seconds
ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0
STOP_SECONDS = 60.0
MARK = "FLASHSPARK_E2E_MARK"
T = TypeVar("T")


def poll(what: str, check: Callable[[], T], timeout_s: float = 30.0, interval_s: float = 0.02) -> T:
    """The first true value of `check`; fails with `what` and the last value when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what} (last: {value!r})"
        time.sleep(interval_s)


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def speculative(target: Path | str, draft: Path | str) -> list[str]:
    """The flags of a server with a draft."""
    return [
        *("--model-path", str(target), "--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(draft)),
    ]


class Server:
    """One server process. Its log goes to a file that is shown when something fails."""

    def __init__(self, *flags: str, log: Path, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._mark = uuid.uuid4().hex  # in the environment of everything the server starts
        path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "flashspark.launch_server", *flags]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, MARK: self._mark},
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    @property
    def log(self) -> str:
        """Everything the two processes have written so far."""
        return self._log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether the API process runs."""
        return self.process.poll() is None

    def wait_healthy(self, timeout_s: float = START_SECONDS) -> Server:
        """Returns once `/health` is 200; fails with the log if the process ends first."""

        def healthy() -> bool:
            assert self.alive, f"the server ended with code {self.process.returncode}:\n{self.log}"
            return self.health() == 200

        poll(f"a healthy server\n{self.log}", healthy, timeout_s, 0.1)
        return self

    def health(self) -> int | None:
        """Status of `/health`; None where nobody answers."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code
        return None

    def scheduler(self) -> psutil.Process:
        """The scheduler process."""

        def find() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "flashspark.scheduler.process" in child.cmdline():
                        return child
            return None

        found = poll("a scheduler process", find)
        assert found is not None
        return found

    def openai(self) -> openai.OpenAI:
        """The official client of this server."""
        return openai_client(self.url)

    def generate(self, text: str | list[int], **body: Any) -> dict[str, Any]:
        """One greedy `/generate` of text or ids, 200 asserted. Keywords not of the body are sampling's."""
        response = self.http.post("/generate", json=generate_body(text, **body))
        assert response.status_code == 200, response.text
        return response.json()

    def state(self) -> dict[str, Any]:
        """`/server_info`'s internal state of the only rank."""
        response = self.http.get("/server_info")
        assert response.status_code == 200, response.text
        (state,) = response.json()["internal_states"]
        return state

    def wait_idle(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Waits until nobody runs or queues, then asserts that nobody holds a row or a page."""

        def idle() -> dict[str, Any] | None:
            info = self.http.get("/server_info").json()
            (state,) = info["internal_states"]
            busy = info["num_requests_in_flight"] + state["num_running_reqs"] + state["num_queue_reqs"]
            return None if busy else state

        state = poll("an idle engine", idle, timeout_s)
        assert state is not None
        assert state["num_free_rows"] == state["max_running_requests"]
        assert state["num_free_pages"] + state["num_evictable_pages"] == state["num_pages"]
        assert state["num_cached_pages"] == state["num_evictable_pages"]
        assert state["num_sampling_rows"] == 0
        assert state["num_used_tokens"] == 0
        return state

    def wait_running(self, running: int, queued: int = 0) -> dict[str, Any]:
        """Waits until so many requests hold a row and so many wait."""

        def reached() -> dict[str, Any] | None:
            state = self.state()
            return (
                state if (state["num_running_reqs"], state["num_queue_reqs"]) == (running, queued) else None
            )

        state = poll(f"{running} running, {queued} queued", reached)
        assert state is not None
        return state

    def leftovers(self) -> list[str]:
        """Command lines of the processes that came from this server and still run, orphans included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    found.append(" ".join(process.cmdline()))
        return found

    def signal(self, number: int) -> None:
        """Sends a signal to the API process alone."""
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float) -> int:
        """The exit code; fails with the log when the process is still there."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {timeout_s:g} s:\n{self.log}") from None

    def stop(self) -> None:
        """SIGTERM, exit code 0, nobody left behind."""
        self.signal(signal.SIGTERM)
        assert self.wait_exit(STOP_SECONDS) == 0, self.log
        # What forks for grammars ends when the scheduler's end of its socket does, so a little later.
        poll("nobody is left behind", lambda: not self.leftovers())
        assert "Traceback" not in self.log, self.log

    def kill(self) -> None:
        """Ends whatever is left of it; for cleaning up."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    process.kill()
        self.process.wait()
        self.http.close()


def openai_client(url: str, key: str = "unused") -> openai.OpenAI:
    """The official client of the server or router at `url`; it never tries again by itself."""
    client = httpx.Client(timeout=120, trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=client, timeout=120)


def generate_body(text: str | list[int], **body: Any) -> dict[str, Any]:
    """A `/generate` body, greedy unless told otherwise. Keywords that are not the body's are sampling's."""
    top = {"stream", "rid", "speculation", "return_prompt_token_ids"}
    given = {name: body.pop(name) for name in list(body) if name in top}
    key = "text" if isinstance(text, str) else "input_ids"
    return {key: text, "sampling_params": {"temperature": 0, **body}, **given}


@contextlib.contextmanager
def running_server(*flags: str, log: Path) -> Iterator[Server]:
    """A healthy server, stopped by SIGTERM at the end; its log is printed when the block fails."""
    server = Server(*flags, log=log)
    try:
        yield server.wait_healthy()
        server.stop()
    except BaseException:
        print(server.log)
        raise
    finally:
        server.kill()


def frames(raw: bytes) -> list[Any]:
    """The JSON of every frame of a finished event stream, `[DONE]` checked and taken off; framing is asserted."""
    assert raw.endswith(b"\n\n"), raw[-80:]
    parts = raw[:-2].split(b"\n\n")
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts), raw[:400]
    assert parts[-1] == b"data: [DONE]"
    return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-1]]


def send(server: Server, path: str, body: dict[str, Any], num_bytes: int | None = None) -> socket.socket:
    """Sends a request (or only its first bytes) on a socket of its own and returns the open socket."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall((head.encode() + content)[:num_bytes])
    return connection


def check_statistics(meta: dict[str, Any], num_tokens: int) -> None:
    """Every relation that holds between the verify numbers of one finished answer; none without speculation."""
    assert meta["completion_tokens"] == num_tokens
    if meta["speculation"]["mode"] == "off":
        assert not [name for name in meta if name.startswith("spec_")]
        return
    steps, histogram = meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]
    accepted = meta["spec_num_correct_drafts"]
    assert sum(histogram) == steps
    assert sum(i * count for i, count in enumerate(histogram)) == accepted
    # Each step gives its accepted drafts and one token more; only a stop inside the last block saves that one.
    stopped = meta["finish_reason"]["type"] == "stop"
    assert num_tokens - accepted in ({steps, steps - 1} if stopped else {steps})
    assert accepted <= meta["spec_num_verified_drafts"] <= meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_length"] == pytest.approx(num_tokens / steps)
    assert meta["spec_accepted_drafts"] == accepted
    assert meta["spec_proposed_drafts"] == meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_histogram"] == histogram
    proposed = meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_rate"] == pytest.approx(accepted / proposed if proposed else 0.0)
    if "spec_cap_length" in meta:
        lengths = meta["spec_cap_lens_histogram"]
        assert sum(lengths) == steps
        assert (
            sum((length - 1) * count for length, count in enumerate(lengths))
            == meta["spec_num_verified_drafts"]
        )
        assert meta["spec_cap_length"] == pytest.approx(1 + meta["spec_num_verified_drafts"] / steps)
