"""How servers end: by signal with a drain, by a second signal at once, and by the death of either process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import LONG, Server, frames, generate_body, poll, running_server, speculative

Start = Callable[..., Server]


@pytest.fixture
def start(tiny_pair: tuple[Path, Path], tmp_path: Path) -> Iterator[Start]:
    """Starts servers on the tiny pair, healthy; kills what is left of them, and shows the logs."""
    servers: list[Server] = []

    def begin(*flags: str, healthy: bool = True) -> Server:
        server = Server(*speculative(*tiny_pair), *flags, log=tmp_path / f"log{len(servers)}")
        servers.append(server)
        return server.wait_healthy() if healthy else server

    yield begin
    for server in servers:
        server.kill()
        print(server.log)


class Call:
    """One request in a thread: its whole answer, however it ends."""

    def __init__(self, server: Server, path: str = "/generate", **body: Any) -> None:
        self.raw = b""
        self.status: int | None = None
        self.error: httpx.TransportError | None = None
        self._request = (server.url + path, body)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        url, body = self._request
        try:
            with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
                self.status = response.status_code
                for chunk in response.iter_raw():
                    self.raw += chunk
        except httpx.TransportError as error:
            self.error = error

    def end(self, timeout_s: float = 60) -> Call:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the client still waits"
        return self


def long_call(server: Server, num_tokens: int = LONG, stream: bool = True) -> Call:
    body = generate_body("long", max_new_tokens=num_tokens, ignore_eos=True, stream=stream)
    call = Call(server, **body)
    if stream:
        poll("a first frame", lambda: call.raw)
    return call


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_running_requests_finish(start: Start, number: int) -> None:
    server = start("--shutdown-timeout", "120")
    calls = [long_call(server, 300), long_call(server, 300, stream=False)]
    server.wait_running(2)
    server.signal(number)
    poll("refusal of new requests", lambda: server.health() == 503)
    late = server.http.post("/v1/completions", json={"prompt": "late"})
    assert late.status_code == 503
    assert "shutting down" in late.json()["message"]
    assert server.wait_exit(60) == 0
    streamed, whole = (call.end() for call in calls)
    last = frames(streamed.raw)[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    assert whole.status == 200 and b'"completion_tokens":300' in whole.raw
    assert server.leftovers() == []
    assert "Traceback" not in server.log


def test_shutdown_timeout_ends_them_with_a_reason(start: Start) -> None:
    server = start("--shutdown-timeout", "1", "--max-running-requests", "2")
    native, whole = long_call(server), long_call(server, stream=False)
    server.wait_running(2)
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    queued = Call(server, "/v1/chat/completions", **chat)
    server.wait_running(2, 1)
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait_exit(30) == 0
    assert time.monotonic() - began >= 1
    *_, error = frames(native.end().raw)
    assert error["error"]["code"] == 503
    assert "shutting down" in error["error"]["message"] and "1 s" in error["error"]["message"]
    for call in (whole, queued):
        assert call.end().status == 503
        assert b"shutting down" in call.raw
    assert server.leftovers() == []


def test_idle_server_leaves_at_once_and_leaves_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the time for draining nor connections that are kept open delay it; its sockets' folder goes too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start("--shutdown-timeout", "600")
    clients = [httpx.Client(base_url=server.url, trust_env=False) for _ in range(5)]
    assert [client.get("/health").status_code for client in clients] == [200] * 5
    assert [path.name[:11] for path in tmp_path.iterdir() if path.is_dir()] == ["flashspark-"]
    server.stop()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    for client in clients:
        client.close()


def test_signal_while_starting(start: Start) -> None:
    server = start(healthy=False)
    server.scheduler()
    server.signal(signal.SIGTERM)
    assert server.wait_exit(30) == 0
    assert server.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_second_signal_leaves_at_once(start: Start, number: int) -> None:
    server = start("--shutdown-timeout", "600")
    call = long_call(server)
    server.signal(signal.SIGTERM)
    poll("the drain", lambda: server.health() == 503)
    server.signal(number)
    assert server.wait_exit(10) == 128 + number
    call.end()
    assert call.error is not None or not call.raw.endswith(b"[DONE]\n\n")
    poll("nobody left", lambda: server.leftovers() == [], 10)


def test_death_of_the_scheduler_ends_the_server(start: Start) -> None:
    server = start()
    calls = [long_call(server), long_call(server, stream=False)]
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": LONG}
    calls.append(Call(server, "/v1/chat/completions", **chat, ignore_eos=True))
    server.wait_running(3)
    poll("a first frame", lambda: calls[2].raw)
    server.scheduler().kill()
    assert server.wait_exit(10) not in (0, None)
    reason = "the scheduler process was killed by signal 9"
    assert reason in server.log
    native, whole, chat_stream = (call.end() for call in calls)
    assert reason in frames(native.raw)[-1]["error"]["message"]
    assert frames(native.raw)[-1]["error"]["code"] == 500
    assert (whole.status, reason.encode() in whole.raw) == (500, True)
    assert reason in frames(chat_stream.raw)[-1]["error"]["message"]
    assert server.leftovers() == []


def test_death_of_the_scheduler_while_loading(start: Start) -> None:
    server = start(healthy=False)
    server.scheduler().kill()
    assert server.wait_exit(10) == 1
    assert "killed by signal 9" in server.log
    assert server.leftovers() == []


def test_death_of_the_api_process_leaves_no_scheduler(start: Start) -> None:
    server = start()
    call = long_call(server)
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait_exit(10)
    call.end()
    poll("nobody left", lambda: server.leftovers() == [], 10)


def test_death_of_the_api_process_while_loading(start: Start) -> None:
    server = start(healthy=False)
    server.scheduler()
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait_exit(10)
    poll("nobody left", lambda: server.leftovers() == [], 30)


@pytest.mark.full
def test_silent_scheduler_is_ended_by_the_watchdog(start: Start) -> None:
    server = start("--watchdog-timeout", "5")
    call = long_call(server)
    scheduler = server.scheduler()
    scheduler.suspend()
    assert server.wait_exit(15 + 5) == 1
    assert "--watchdog-timeout" in server.log
    assert b"silent" in call.end().raw
    assert server.leftovers() == []


@pytest.mark.full
def test_signals_to_the_scheduler_are_the_api_processs_business(start: Start) -> None:
    """Ctrl-C reaches every process of a terminal; the scheduler must outlive it to drain."""
    server = start()
    scheduler = server.scheduler()
    for number in (signal.SIGINT, signal.SIGTERM):
        scheduler.send_signal(number)
    assert len(server.generate("still here", max_new_tokens=5, ignore_eos=True)["output_ids"]) == 5
    assert scheduler.is_running()
    server.stop()


def test_two_servers_side_by_side(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = str(tiny_pair[0])
    with running_server(*speculative(*tiny_pair), log=tmp_path / "one") as one:
        with running_server("--model-path", target, log=tmp_path / "two") as two:
            assert one.port != two.port
            first = one.generate("both", max_new_tokens=30, ignore_eos=True)
            second = two.generate("both", max_new_tokens=30, ignore_eos=True)
            assert first["output_ids"] == second["output_ids"]
            assert second["meta_info"]["speculation"] == {"mode": "off"}
            response = two.http.post("/generate", json=generate_body("x", speculation={"mode": "static"}))
            assert response.status_code == 400
            assert "--speculative-algorithm" in response.text
            third = Server("--model-path", target, log=tmp_path / "three", port=one.port)
            assert third.wait_exit(30) == 1
            assert f":{one.port}" in third.log and "--port" in third.log
            third.kill()
        assert one.generate("both", max_new_tokens=30, ignore_eos=True)["output_ids"] == first["output_ids"]


@pytest.mark.full
def test_a_second_life_on_the_same_port(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A port is free again at once, even where connections of the first server linger."""
    with running_server(*speculative(*tiny_pair), log=tmp_path / "one") as one:
        seeded = one.generate("again", max_new_tokens=20, temperature=1, sampling_seed=4)["output_ids"]
    second = Server(*speculative(*tiny_pair), log=tmp_path / "two", port=one.port)
    try:
        second.wait_healthy()
        assert (
            second.generate("again", max_new_tokens=20, temperature=1, sampling_seed=4)["output_ids"]
            == seeded
        )
        second.stop()
    finally:
        second.kill()
