"""Start, drain and death of a server: exit codes, reasons, and nobody left waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from fake_server import FakeServer
from tiny_models import write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def socket_root(monkeypatch):
    """Where these servers make their socket folders: a short path, since sockets have a limit."""
    with tempfile.TemporaryDirectory(prefix="fs-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def slow(step_ms: int, num_tokens: int, stream: bool, path: str = "/generate") -> dict:
    if path == "/generate":
        sampling = {"max_new_tokens": num_tokens, "sampling_seed": -step_ms}
        return {"text": "ab", "sampling_params": sampling, "stream": stream}
    return {"prompt": "ab", "max_tokens": num_tokens, "seed": -step_ms, "stream": stream}


class Background:
    """A request on its way, begun for certain."""

    def __init__(self, server: FakeServer, path: str, body: dict) -> None:
        self.response = None
        self._thread = threading.Thread(target=self._post, args=(server, path, body))
        before = server.client.get("/server_info").json()["num_requests_in_flight"]
        self._thread.start()
        while server.client.get("/server_info").json()["num_requests_in_flight"] == before:
            time.sleep(0.01)

    def _post(self, server, path, body):
        self.response = server.client.post(path, json=body)

    def wait(self):
        self._thread.join(15)
        assert self.response is not None
        return self.response


def slow_ones_of_every_kind(server: FakeServer) -> list[Background]:
    """Twenty seconds of work each, on both routes, streamed and not."""
    return [
        Background(server, path, slow(100, 200, stream, path))
        for path in ("/generate", "/v1/completions")
        for stream in (False, True)
    ]


def scheduler_of(server: FakeServer) -> psutil.Process:
    (child,) = psutil.Process(server.process.pid).children()
    return child


def last_frame(response) -> dict:
    *_, last, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return json.loads(last.removeprefix(b"data: "))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_drain(folder, socket_root, number):
    with FakeServer(folder) as server:
        assert list(socket_root.glob("flashspark-*"))
        whole = Background(server, "/generate", slow(20, 40, False))
        streamed = Background(server, "/v1/completions", slow(20, 40, True, "/v1/completions"))
        server.signal(number)
        time.sleep(0.1)
        # The server still answers, and sends new work elsewhere.
        assert server.client.get("/health").status_code == 503
        refused = server.client.post("/generate", json=slow(1, 2, False))
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert "shutting down" in refused.text
        assert whole.wait().json()["meta_info"]["completion_tokens"] == 40
        assert last_frame(streamed.wait())["choices"][0]["finish_reason"] == "length"
        assert server.wait_exit() == 0
        assert not list(socket_root.glob("flashspark-*"))


def test_a_draining_server_ends_what_takes_too_long(folder):
    with FakeServer(folder, "--shutdown-timeout", "0.5") as server:
        running = slow_ones_of_every_kind(server)
        started = time.monotonic()
        server.signal()
        native, native_stream, text, text_stream = [request.wait() for request in running]
        assert server.wait_exit() == 0
        assert time.monotonic() - started < 15  # by themselves they would take 20 s
        for response in (native, text):
            assert response.status_code == 503
            assert "shutting down" in response.json()["message"]
        assert text.json()["error"]["code"] == "unavailable"
        for response in (native_stream, text_stream):
            error = last_frame(response)["error"]
            assert "shutting down" in error["message"]
            assert error["code"] == 503


def test_a_second_signal_leaves_at_once(folder, socket_root):
    with FakeServer(folder) as server:
        scheduler = scheduler_of(server)
        with server.client.stream("POST", "/generate", json=slow(100, 200, True)) as response:
            chunks = response.iter_bytes()
            next(chunks)
            server.signal()
            time.sleep(0.2)
            assert server.process.poll() is None
            server.signal()
            assert server.wait_exit(3) == 128 + signal.SIGTERM
        scheduler.wait(5)
        assert not list(socket_root.glob("flashspark-*"))


@pytest.mark.parametrize(
    ("seed", "reason"),
    [(-1001, "ended with exit code 7"), (-1002, "RuntimeError: told to fail"), (None, "killed by signal 9")],
)
def test_a_dead_scheduler_ends_the_server_with_a_reason(folder, seed, reason):
    with FakeServer(folder) as server:
        whole = Background(server, "/v1/completions", slow(100, 200, False, "/v1/completions"))
        streamed = Background(server, "/generate", slow(100, 200, True))
        if seed is None:
            scheduler_of(server).kill()
        else:
            body = {"text": "a", "sampling_params": {"sampling_seed": seed}}
            response = server.client.post("/generate", json=body)
            assert response.status_code == 500
            assert reason in response.json()["message"]
        response = whole.wait()
        assert response.status_code == 500
        assert reason in response.json()["error"]["message"]
        assert reason in last_frame(streamed.wait())["error"]["message"]
        assert server.wait_exit(10) == 1
        assert reason in server.log


def test_a_silent_scheduler_ends_the_server(folder):
    with FakeServer(folder, "--watchdog-timeout", "5", env={"SGLANG_HEALTH_CHECK_TIMEOUT": "0.5"}) as server:
        os.kill(scheduler_of(server).pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while server.client.get("/health").status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.wait_exit(15) == 1
        assert "--watchdog-timeout" in server.log


def test_a_hanging_scheduler_is_reported_to_every_client_of_a_draining_server(folder):
    with FakeServer(folder, "--shutdown-timeout", "0.5") as server:
        running = slow_ones_of_every_kind(server)
        time.sleep(0.3)  # both streams have begun
        os.kill(scheduler_of(server).pid, signal.SIGSTOP)
        started = time.monotonic()
        server.signal()
        native, native_stream, text, text_stream = [request.wait() for request in running]
        assert server.wait_exit() == 1
        assert time.monotonic() - started < 0.5 + 5 + 2
        assert "shutting down" in native.json()["message"]
        assert "shutting down" in text.json()["error"]["message"]
        for response in (native, text):
            assert response.status_code == 500
        for response in (native_stream, text_stream):
            assert "shutting down" in last_frame(response)["error"]["message"]
        assert "Traceback" not in server.log


def test_a_server_that_was_stopped_reads_what_came_before_it_judges(folder):
    with FakeServer(folder, "--watchdog-timeout", "2") as server:
        for _ in range(3):  # it may be stopped at any point of its turn
            server.signal(signal.SIGSTOP)
            time.sleep(2.6)
            server.signal(signal.SIGCONT)
            time.sleep(0.4)
        time.sleep(1.5)
        assert server.process.poll() is None, server.log
        assert server.client.get("/health").status_code == 200


def test_a_signal_after_the_engine_failed_leaves_the_exit_code(folder):
    with FakeServer(folder, env={"FAKE_LINGER_SECONDS": "3"}) as server:
        body = {"text": "a", "sampling_params": {"sampling_seed": -1002}}
        assert server.client.post("/generate", json=body).status_code == 500
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ping").status_code == 503
        refused = server.client.post("/generate", json={"text": "a"})
        assert refused.status_code == 503
        assert "the engine is down" in refused.text
        server.signal()
        assert server.wait_exit() == 1


def test_hangup_drains_unless_ignored(folder, socket_root):
    with FakeServer(folder) as server:
        running = Background(server, "/generate", slow(20, 40, False))
        server.signal(signal.SIGHUP)
        assert running.wait().json()["meta_info"]["completion_tokens"] == 40
        assert server.wait_exit() == 0
        assert not list(socket_root.glob("flashspark-*"))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with FakeServer(folder) as server:
            server.signal(signal.SIGHUP)
            time.sleep(0.2)
            assert server.client.get("/health").status_code == 200
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_importing(number):
    program = f"""
import os, runpy, sys

class Killer:
    def find_spec(self, name, *_):
        if name == "uvicorn":
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Killer())
runpy.run_module("flashspark.launch_server", run_name="__main__")
"""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "python")}

    def heed_signals():  # a shell's background jobs are started deaf to SIGINT
        signal.signal(number, signal.SIG_DFL)

    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, preexec_fn=heed_signals)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_scheduler_leaves_with_the_server(folder):
    with FakeServer(folder) as server:
        scheduler = scheduler_of(server)
        server.process.kill()
        scheduler.wait(5)


def test_port_in_use(folder):
    with FakeServer(folder) as server:
        with FakeServer(folder, "--port", str(server.port), wait=False) as second:
            assert second.wait_exit() == 1
            assert f"127.0.0.1:{server.port}" in second.log
            assert "--port" in second.log
            assert "Traceback" not in second.log
        assert server.client.get("/health").status_code == 200


def test_start_failures_say_why(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    binary = tmp_path / "binary.jinja"
    binary.write_bytes(b"\xff\xfe{{ messages }}")
    latin = write_tokenizer(tmp_path / "latin")
    (latin / "chat_template.jinja").write_bytes(b"\xe9{{ messages }}")
    for model, flags, reason in (
        (folder, ("--load-format", "dummy"), "ValueError: told not to load"),
        (tmp_path / "empty", (), "tokenizer.json"),
        (tmp_path / "absent", (), "--model-path"),
        (folder, ("--host", "203.0.113.1"), "--host"),
        (folder, ("--host", "a" * 70), "--host"),
        (folder, ("--chat-template", str(binary)), "--chat-template"),
        (latin, (), "chat_template.jinja"),
        (folder, ("--preferred-sampling-params", '{"n": 0}'), "--preferred-sampling-params"),
    ):
        with FakeServer(model, *flags, wait=False) as server:
            assert server.wait_exit() == 1
            assert reason in server.log
            assert "Traceback" not in server.log


def test_a_signal_while_loading(folder):
    with FakeServer(folder, env={"FAKE_LOAD_SECONDS": "30"}, wait=False) as server:
        deadline = time.monotonic() + 15
        while not server.log:  # signals are handled before HTTP answers, and before anything is logged
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert server.client.get("/health").status_code == 503
        refused = server.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "starting" in refused.json()["error"]["message"]
        server.signal()
        assert server.wait_exit(15) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("SGLANG_SIMULATE_ACC_LEN", "0.5"), ("SGLANG_DSPARK_DEBUG_DUMP", "core,step_gpu_time")],
)
def test_unavailable_environment_is_refused(folder, monkeypatch, capsys, name, value):
    from flashspark.launch_server import main

    monkeypatch.setenv(name, value)
    assert main(["--model-path", str(folder)]) == 2
    assert name in capsys.readouterr().err


def test_keys_stay_out_of_the_launch_command():
    from flashspark.launch_server import _shown

    words = ["--model", "m", "--api-key", "s1", "--admin-api-key=s2", "--api", "s3", "--port", "1"]
    assert _shown(["--admin", "b", "--adm=b", "--port", "1"]) == "--admin '***' '--adm=***' --port 1"
    assert _shown(words) == "--model m --api-key '***' '--admin-api-key=***' --api '***' --port 1"


def test_the_api_process_imports_no_torch():
    program = "import sys, flashspark.launch_server; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ)
    assert output.stdout.strip() == "[]", output.stderr


def test_requests_log_and_defaults(folder):
    flags = (
        "--log-requests",
        "--log-requests-level",
        "1",
        "--preferred-sampling-params",
        '{"max_new_tokens": 3}',
    )
    with FakeServer(folder, *flags) as server:
        body = {"text": "secret", "rid": "r7\nforged"}
        answer = server.client.post("/generate", json=body, headers={"x-request-id": "proxy-1"}).json()
        assert answer["meta_info"]["completion_tokens"] == 3
        server.signal()
        assert server.wait_exit() == 0
        line = next(line for line in server.log.splitlines() if "r7" in line)
        assert "proxy-1" in line
        assert not any(line.startswith("forged") for line in server.log.splitlines())
        assert "secret" not in server.log
