"""Clients that cost a server much and say little. What becomes of each is told in docs/faults.md."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from e2e.server import Server, generate_body, poll, send, speculative

NUM_IDLE = 1000


@pytest.fixture(scope="module")
def small(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One request at a time, so that whoever holds its row keeps everybody out. It starts with few descriptors."""
    log = tmp_path_factory.mktemp("small") / "log"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    server = Server(*speculative(*tiny_pair), "--max-running-requests", "1", log=log)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield server.wait_healthy()
        server.stop()
    finally:
        server.kill()
        print(server.log)


def num_files(server: Server) -> int:
    return psutil.Process(server.process.pid).num_fds()


def answered(server: Server) -> bool:
    return len(server.generate("others", max_new_tokens=8, ignore_eos=True)["output_ids"]) == 8


def test_a_client_that_reads_a_byte_a_second(small: Server) -> None:
    """Its answer waits for it, not the engine: the row is free as soon as the last token is made."""
    before, files = small.wait_idle(), num_files(small)
    body = generate_body("slow reader", max_new_tokens=600, ignore_eos=True, stream=True)
    connection = send(small, "/generate", body)  # frames are cumulative: megabytes
    gone = threading.Event()
    read: list[bytes] = []

    def reader() -> None:
        while not gone.wait(1):
            read.append(connection.recv(1))

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        after = small.wait_idle(120)
        assert after["finished"] == before["finished"] + 1
        assert after["output_tokens"] == before["output_tokens"] + 600
        assert answered(small)
        poll("a byte", lambda: read)
        assert b"HTTP/1.1 200 OK".startswith(b"".join(read)[:15])
        assert num_files(small) > files
    finally:
        gone.set()
        thread.join()
        connection.close()
    poll("its connection is closed", lambda: num_files(small) <= files)


def test_1000_idle_connections(small: Server) -> None:
    """They cost a descriptor each, of which the server asks for enough; everybody else is served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * NUM_IDLE:
        pytest.skip(f"this system gives {hard} descriptors")
    files = num_files(small)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * NUM_IDLE), hard))
    idle = [socket.create_connection(("127.0.0.1", small.port), timeout=30) for _ in range(NUM_IDLE)]
    try:
        poll("all are accepted", lambda: num_files(small) >= files + NUM_IDLE)
        assert answered(small)
        assert small.health() == 200
        # Each of them may still ask.
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle[-1].recv(100).startswith(b"HTTP/1.1 200")
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    poll("all are closed", lambda: num_files(small) <= files + 2)


@pytest.mark.parametrize(
    "head", [b"X-Long: " + b"x" * 1_000_000, b"\r\n".join(b"X-%d: y" % i for i in range(50_000))]
)
def test_headers_beyond_their_limit(small: Server, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=30) as connection:
        answer = b""
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
            answer = connection.recv(100)
        except OSError:  # closed while we were sending
            pass
        assert answer in {b""} or answer.startswith(b"HTTP/1.1 4")
    assert small.health() == 200


def test_half_a_request_waits_for_the_rest(small: Server) -> None:
    """Whoever is slow to ask holds a connection and nothing else."""
    body = generate_body("asked slowly", max_new_tokens=4, ignore_eos=True)
    half = send(small, "/generate", body, num_bytes=120)
    assert answered(small)
    whole = send(small, "/generate", body)
    assert whole.recv(20).startswith(b"HTTP/1.1 200")
    whole.close()
    half.close()
    small.wait_idle()
