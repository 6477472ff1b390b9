"""scripts/demo.py against a stand-in server: what it prints, how it fails, that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKE_SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

speculative = "--speculative-algorithm" in sys.argv
with open(os.environ["FAKE_PIDS"], "a") as pids:
    print(os.getpid(), file=pids)
if os.environ.get("FAKE_FAIL") == ("speculative" if speculative else "plain"):
    sys.exit("the model folder is half-written")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        width = 3 if speculative else 1
        limit = body["sampling_params"]["max_new_tokens"]
        if os.environ.get("FAKE_FAIL") == "mid-stream" and limit > 8:
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        count = 0
        while count < limit:
            time.sleep(0.002)
            count = min(limit, count + (width if count else 1))
            meta = {"completion_tokens": count}
            if speculative and count == limit:
                meta["spec_verify_ct"] = -(-(limit - 1) // width)
            looping = "loop" in body["text"] and count > 5
            ids = list(range(5)) + [7] * (count - 5) if looping else list(range(count))
            frame = {"text": " tok" * count, "output_ids": ids, "meta_info": meta}
            self.wfile.write(b"data: " + json.dumps(frame).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *args):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Demo:
    def __init__(self, folder: Path, port: int) -> None:
        package = folder / "flashspark"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(FAKE_SERVER)
        self.pids = folder / "pids"
        self.pids.touch()
        self.env = {**os.environ, "PYTHONPATH": str(folder), "FAKE_PIDS": str(self.pids)}
        self.port = port
        self.folder = folder

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "scripts/demo.py"), "--port", str(self.port)]
        return subprocess.Popen(
            [*command, "--max-tokens", "13", "--prompt", "one", "--prompt", "two", *args],
            env={**self.env, **env},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A test run in the background of a shell has SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *args: str, **env: str) -> tuple[int, str]:
        process = self.start(*args, **env)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def num_servers_left(self) -> int:
        return sum(is_running(int(pid)) for pid in self.pids.read_text().split())

    def num_servers_started(self) -> int:
        return len(self.pids.read_text().split())


@pytest.fixture
def demo(tmp_path: Path, port: int) -> Demo:
    return Demo(tmp_path, port)


def test_compares_both_servers_twice_in_a_row(demo: Demo) -> None:
    for _ in range(2):
        code, output = demo.run("--exit")
        assert code == 0, output
        assert output.count("one" + " tok" * 13) == 2
        assert "acceptance length     3.25 tokens per verify step" in output
        assert "same text              yes" in output
        assert "curl" not in output
        assert demo.num_servers_left() == 0
    assert demo.num_servers_started() == 4


def test_a_loop_ends_the_count_of_both_servers(demo: Demo) -> None:
    code, output = demo.run("--exit", "--prompt", "loop")
    assert code == 0, output
    assert output.count("loop" + " tok" * 8 + "\n") == 2
    assert "same text              yes" in output


def test_leaves_the_speculative_server_running_until_ctrl_c(demo: Demo) -> None:
    process = demo.start()
    assert process.stdout is not None
    output = ""
    while "Ctrl-C stops it." not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    assert f"curl http://127.0.0.1:{demo.port}/v1/completions" in output
    assert f'base_url="http://127.0.0.1:{demo.port}/v1"' in output
    assert demo.num_servers_left() == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert demo.num_servers_left() == 0


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_loading_leaves_nothing(demo: Demo, sig: signal.Signals) -> None:
    process = demo.start("--max-tokens", "100000")
    while not demo.num_servers_started():
        time.sleep(0.05)
    process.send_signal(sig)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert demo.num_servers_left() == 0


def test_port_taken_is_said_clearly(demo: Demo) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", demo.port))
        taken.listen()
        code, output = demo.run("--exit")
    assert code == 1
    assert f"port {demo.port} cannot be used" in output
    assert f"--port {demo.port + 1}" in output
    assert demo.num_servers_started() == 0


@pytest.mark.parametrize("which", ["plain", "speculative"])
def test_a_server_that_fails_shows_its_log(demo: Demo, which: str) -> None:
    code, output = demo.run("--exit", FAKE_FAIL=which)
    assert code == 1
    assert "the model folder is half-written" in output
    assert "Traceback" not in output
    assert demo.num_servers_left() == 0


def test_a_server_that_dies_mid_stream(demo: Demo) -> None:
    code, output = demo.run("--exit", FAKE_FAIL="mid-stream")
    assert code == 1
    assert "exit code 3" in output
    assert demo.num_servers_left() == 0
