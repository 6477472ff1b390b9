"""Servers behind `sglang-router`, as it is on the package index: it finds what it asks for, and covers for one gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from e2e.router import ROUTER_VERSION, num_healthy, running_router
from e2e.server import ROOT, frames, free_port, generate_body, openai_client, poll, speculative
from fake_server import FakeServer
from real_clients import had, router
from tiny_models import write_tokenizer

ASKED = {"/health", "/server_info", "/model_info", "/get_load"}


def requests_of(log: str) -> Counter[tuple[str, int]]:
    """Paths and statuses in a server's access log."""
    lines = re.findall(r'"[A-Z]+ (/[^ ?"]*)[^"]*" (\d{3})', log)
    return Counter((path, int(status)) for path, status in lines)


def check_what_was_asked(log: Callable[[], str]) -> None:
    """Waits until the router has asked for everything once, and looks at what it was told."""
    poll("all that a router asks for", lambda: {path for path, _ in requests_of(log())} >= ASKED)
    seen = requests_of(log())
    assert {path for path, status in seen if status == 200} >= ASKED, seen
    assert not [path for path, status in seen if status in {401, 404, 405}], seen


@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", ["the-key", pytest.param(None, marks=pytest.mark.full)])
def test_a_router_in_short(tmp_path: Path, key: str | None) -> None:
    keys = ["--api-key", key] if key else []
    draft = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "none"]
    flags = ["--served-model-name", "fake", *draft, *keys]
    model, prompt = write_tokenizer(tmp_path / "model"), "abcdefgh"
    with (
        FakeServer(model, *flags, wait=False) as one,
        FakeServer(model, *flags, wait=False) as other,
        running_router([one.url, other.url], tmp_path / "log", *keys) as http,
    ):
        http.headers["authorization"] = f"Bearer {key}"
        client = openai_client(str(http.base_url), key or "none")
        body: dict[str, Any] = {"text": prompt, "sampling_params": {"max_new_tokens": 8, "n": 2}}
        answers = http.post("/generate", json=body).json()
        assert [answer["text"] for answer in answers] == [prompt, prompt]
        streamed = frames(http.post("/generate", json=body | {"stream": True}).content)
        assert {frame["index"]: frame["text"] for frame in streamed} == {0: prompt, 1: prompt}
        assert client.completions.create(model="fake", prompt=prompt, max_tokens=4).choices[0].text == "abcd"
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        chat = client.chat.completions.create(model="fake", messages=messages, max_tokens=5)
        assert chat.usage is not None and chat.usage.completion_tokens == 5
        chunks = client.chat.completions.create(model="fake", messages=messages, max_tokens=5, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == chat.choices[0].message.content
        assert [card.id for card in client.models.list()] == ["fake"]
        with pytest.raises(openai.BadRequestError, match="exceed the context") as refused:
            client.completions.create(model="fake", prompt=prompt, max_tokens=4000)
        assert refused.value.code == "context_length_exceeded"
        assert http.post("/flush_cache").status_code == 200
        assert http.get("/get_model_info").json()["served_model_name"] == "fake"
        # The router passes on the fields that it knows; ours are not among them.
        unheard = http.post("/generate", json=body | {"speculation": {"mode": "off"}}).json()
        assert [answer["meta_info"]["speculation"]["mode"] for answer in unheard] == ["static"] * 2
        for server in (one, other):
            check_what_was_asked(lambda server=server: server.log)
        one.process.kill()
        one.wait_exit()
        results = [http.post("/generate", json=body).status_code for _ in range(12)]
        assert results == [200] * 12


class Group:
    """`scripts/scale_out.py` with two demo servers."""

    def __init__(self, tmp_path: Path, router_python: Path) -> None:
        self.logs, self.port = tmp_path / "logs", first_of_four_free_ports()
        self._said = tmp_path / "said"
        command = [sys.executable, str(ROOT / "scripts" / "scale_out.py"), "--servers", "2"]
        command += ["--router-python", str(router_python), "--port", str(self.port)]
        command += ["--log-dir", str(self.logs), "--", *speculative("demo", "demo-dflash2")]
        path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
        with self._said.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--served-model-name", "demo", "--max-running-requests", "8"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120, trust_env=False)

    @property
    def said(self) -> str:
        """All that the script has written."""
        return self._said.read_text()

    def wait_said(self, pattern: str, times: int = 1, timeout_s: float = 90) -> list[str]:
        """What the script has written of a kind, at least so many times."""

        def found() -> list[str] | None:
            matches = re.findall(pattern, self.said)
            assert self.process.poll() is None, self.said
            return matches if len(matches) >= times else None

        matches = poll(f"{times} x {pattern!r}", found, timeout_s)
        assert matches is not None
        return matches

    def pid(self, number: int) -> int:
        """Of a server's API process, the one that runs now."""
        return int(re.findall(rf"server {number}: pid (\d+)", self.said)[-1])

    def num_finished(self, number: int) -> int:
        """Requests that a server has finished since it was started."""
        response = httpx.get(f"http://127.0.0.1:{self.port + number}/server_info", trust_env=False)
        return response.json()["internal_states"][0].get("finished", 0) if response.status_code == 200 else 0

    def replace(self, number: int, how: signal.Signals, code: int) -> None:
        """Ends a server under load, and waits until its successor has answered enough to be trusted again."""
        os.kill(self.pid(number), how)
        self.wait_said(rf"server {number}: ended with code {code}\b")
        self.wait_said(rf"server {number}: healthy", times=2)
        poll(f"answers of server {number}", lambda: self.num_finished(number) >= 8, 60, 0.1)


def first_of_four_free_ports() -> int:
    """Four ports in a row that nobody listens on begin here."""
    for _ in range(50):
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + 4):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    pytest.fail("no four free ports in a row")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    started = Group(tmp_path, had(router, ROUTER_VERSION).python)
    try:
        started.wait_said(r"server \d: healthy", times=2)
        poll("a router with two servers", lambda: num_healthy(started.http) == 2, 60, 0.1)
        yield started
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(120) == 0
        for number in (1, 2):
            assert not psutil.pid_exists(started.pid(number))
    except BaseException:
        print(started.said, *(path.read_text()[-3000:] for path in started.logs.glob("*.log")), sep="\n")
        raise
    finally:
        started.process.send_signal(signal.SIGTERM)
        started.process.wait(120)


class Load:
    """Clients that ask again and again until they are told to stop, and keep what they got."""

    NUM_CLIENTS, MOST_CALLS, NUM_TOKENS = 6, 1000, 24

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, int]] = []  # status (0: none), tokens
        self._url, self._stop = url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(self.NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        tokens = {"max_tokens": self.NUM_TOKENS, "ignore_eos": True, "temperature": 0, "model": "demo"}
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as http:
            for i in range(self.MOST_CALLS):
                if self._stop.is_set():
                    return
                text = f"def f_{number}_{i}(x):"
                calls: list[tuple[str, dict[str, Any]]] = [
                    ("/generate", generate_body(text, max_new_tokens=self.NUM_TOKENS, ignore_eos=True)),
                    ("/v1/completions", {"prompt": text, **tokens}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **tokens}),
                ]
                try:
                    response = http.post(calls[i % 3][0], json=calls[i % 3][1])
                except httpx.TransportError:
                    self.answers.append((0, 0))
                    continue
                answer, num_tokens = response.json(), 0
                if response.status_code == 200:
                    num_tokens = answer.get("usage", answer.get("meta_info"))["completion_tokens"]
                self.answers.append((response.status_code, num_tokens))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_servers_are_killed_and_replaced_and_no_client_notices(group: Group) -> None:
    with Load(str(group.http.base_url)) as load:
        poll("both servers busy", lambda: min(group.num_finished(n) for n in (1, 2)) >= 8, 60, 0.1)
        group.replace(1, signal.SIGKILL, -9)
        group.replace(2, signal.SIGTERM, 0)  # drains
    print(f"{len(load.answers)} answers: {Counter(load.answers)}")
    assert set(load.answers) == {(200, Load.NUM_TOKENS)}
    for number in (1, 2):
        log = group.logs / f"server-{number}.log"
        check_what_was_asked(log.read_text)
