"""A client that goes away, wherever its request is: the engine gets the row and the pages back, others go on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import LONG, Server, generate_body, poll, running_server, send, speculative

OPENAI_BODY = {"model": "m", "max_tokens": LONG, "ignore_eos": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/generate": ("/generate", generate_body("left alone", max_new_tokens=LONG, ignore_eos=True)),
    "completions": ("/v1/completions", {**OPENAI_BODY, "prompt": "left alone"}),
    "chat": ("/v1/chat/completions", {**OPENAI_BODY, "messages": [{"role": "user", "content": "left"}]}),
}
every_route = pytest.mark.parametrize("route", BODIES)
streamed_or_not = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@pytest.fixture(scope="module")
def narrow(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for two requests; the others queue."""
    log = tmp_path_factory.mktemp("narrow") / "log"
    flags = ["--max-running-requests", "2", "--max-total-tokens", "8192"]
    with running_server(*speculative(*tiny_pair), *flags, log=log) as running:
        yield running


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        chunk = connection.recv(65536)
        assert chunk, f"closed after {data!r}"
        data += chunk
    return data


@every_route
@streamed_or_not
def test_running(narrow: Server, route: str, stream: bool) -> None:
    path, body = BODIES[route]
    before = narrow.wait_idle()
    connection = send(narrow, path, body | {"stream": stream})
    if stream:
        assert b" 200 " in read_until(connection, b"data: ")
    narrow.wait_running(1)
    connection.close()
    after = narrow.wait_idle()
    assert after["aborted"] == before["aborted"] + 1
    assert after["finished"] == before["finished"]
    assert after["output_tokens"] - before["output_tokens"] < LONG, "it was stopped, it did not end"


@every_route
@streamed_or_not
def test_queued(narrow: Server, route: str, stream: bool) -> None:
    path, body = BODIES[route]
    before = narrow.wait_idle()
    running = [send(narrow, *BODIES["/generate"]) for _ in range(2)]
    narrow.wait_running(2)
    queued = send(narrow, path, body | {"stream": stream})
    narrow.wait_running(2, 1)
    queued.close()
    state = narrow.wait_running(2, 0)
    assert state["aborted"] == before["aborted"] + 1
    for connection in running:
        connection.close()
    assert narrow.wait_idle()["aborted"] == before["aborted"] + 3


def test_the_next_in_the_queue_takes_the_place(narrow: Server) -> None:
    running = [send(narrow, *BODIES["/generate"]) for _ in range(2)]
    narrow.wait_running(2)
    waiting = send(narrow, "/generate", generate_body("next", max_new_tokens=4, ignore_eos=True))
    narrow.wait_running(2, 1)
    running[0].close()
    assert b'"completion_tokens":4' in read_until(waiting, b'"e2e_latency"')
    running[1].close()
    waiting.close()
    narrow.wait_idle()


def test_a_batch_with_choices_goes_as_a_whole(narrow: Server) -> None:
    before = narrow.wait_idle()
    body = {"text": ["a", "b", "c"], "stream": True}
    body["sampling_params"] = {"max_new_tokens": LONG, "ignore_eos": True, "n": 2}
    connection = send(narrow, "/generate", body)
    read_until(connection, b"data: ")
    narrow.wait_running(2, 4)
    connection.close()
    assert narrow.wait_idle()["aborted"] == before["aborted"] + 6


def test_half_a_request_is_nothing(narrow: Server) -> None:
    before = narrow.wait_idle()
    for num_bytes in (10, 60, 150):
        send(narrow, *BODIES["/generate"], num_bytes=num_bytes).close()
    after = narrow.wait_idle()
    assert (after["finished"], after["aborted"]) == (before["finished"], before["aborted"])
    assert narrow.health() == 200


def test_a_client_that_does_not_read_stops_nobody(narrow: Server) -> None:
    path, body = BODIES["/generate"]
    deaf = send(narrow, path, body | {"stream": True})
    narrow.wait_running(1)
    assert len(narrow.generate("others go on", max_new_tokens=30, ignore_eos=True)["output_ids"]) == 30
    deaf.close()
    narrow.wait_idle()


def test_half_closed_sockets_of_many_clients(narrow: Server) -> None:
    """Thirty come and go at once, most of them while queued."""
    before = narrow.wait_idle()
    connections = [send(narrow, *BODIES[route]) for _ in range(10) for route in BODIES]
    narrow.wait_running(2, 28)
    for connection in connections:
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    after = narrow.wait_idle()
    assert after["aborted"] - before["aborted"] == 30
    poll("health", lambda: narrow.health() == 200)
