"""The same model served twice, without and with speculation, streamed into the terminal and compared.

Run through `bash scripts/demo.sh`, which makes the environment first. Everything it starts, it stops:
on success with --exit, on Ctrl-C, on SIGTERM and on failure.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"
TARGET = "demo"
DRAFT = "demo-dflash2"
PROMPTS = (
    'def read_config(path):\n    """Read a JSON file and return its contents as a dictionary."""\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "import unittest\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n",
)
INTERACTIVE = sys.stdout.isatty()


class DemoError(Exception):
    """Something the user should read instead of a traceback."""


@dataclass
class Run:
    """What one server did with all prompts. `decode` counts exclude each answer's first frame."""

    texts: list[str] = field(default_factory=list)
    num_decode_tokens: int = 0
    decode_s: float = 0.0
    num_tokens: int = 0
    num_verify_steps: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def accept_length(self) -> float | None:
        return self.num_tokens / self.num_verify_steps if self.num_verify_steps else None


class Server:
    """A launch_server process with its log in a file, in a process group of its own."""

    def __init__(self, port: int, log_path: Path, extra_args: tuple[str, ...] = ()) -> None:
        self.port = port
        self.log_path = log_path
        command = [sys.executable, "-m", "flashspark.launch_server", "--model-path", TARGET]
        command += ["--host", HOST, "--port", str(port), *extra_args]
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def failure(self, what: str) -> DemoError:
        """An error that ends with the last lines of this server's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-20:]
        return DemoError("\n".join([f"{what}; the end of its log:", "", *lines]))

    def check_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise self.failure(f"the server stopped with exit code {code}")

    def wait_ready(self, timeout_s: float) -> None:
        """Shows one moving line (a plain one where the output is no terminal) until /health answers 200."""
        start = time.monotonic()
        spinner = "|/-\\"
        tick = 0
        while not self._healthy():
            self.check_alive()
            elapsed_s = time.monotonic() - start
            if elapsed_s > timeout_s:
                raise self.failure(f"the server was not ready after {timeout_s:.0f} s")
            if INTERACTIVE:
                print(f"\r  {spinner[tick % 4]} loading the model, {elapsed_s:.0f} s ", end="", flush=True)
            elif tick == 0:
                print("  loading the model ...", flush=True)
            tick += 1
            time.sleep(0.2)
        clear = "\r\033[K" if INTERACTIVE else ""
        print(f"{clear}  ready after {time.monotonic() - start:.1f} s", flush=True)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """SIGTERM to the server, and SIGKILL to its whole group if that was not enough."""
        try:
            if self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=20)
        finally:  # a second Ctrl-C cuts the wait short
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def stream_generate(port: int, prompt: str, max_tokens: int) -> Iterator[dict]:
    """Frames of a streamed greedy `/generate`; each holds the whole text so far."""
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
        "stream": True,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise DemoError(
                f"/generate answered {response.status}: {response.read().decode(errors='replace')}"
            )
        while line := response.readline():
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if data:
                frame = json.loads(data)
                if "error" in frame:
                    raise DemoError(f"/generate failed: {frame['error'].get('message', frame['error'])}")
                yield frame
        raise DemoError("/generate ended its stream without [DONE]")
    finally:
        connection.close()


def show_completion(port: int, prompt: str, max_tokens: int, run: Run) -> None:
    """Streams one completion into the terminal and adds its figures to `run`."""
    print(
        "\033[2m" if INTERACTIVE else "", prompt, "\033[0m" if INTERACTIVE else "", sep="", end="", flush=True
    )
    shown = ""
    first: tuple[float, int] | None = None
    meta: dict = {}
    now = 0.0
    for frame in stream_generate(port, prompt, max_tokens):
        now = time.perf_counter()
        meta = frame["meta_info"]
        if first is None:
            first = (now, meta["completion_tokens"])
        print(frame["text"][len(shown) :], end="", flush=True)
        shown = frame["text"]
    print("\n", flush=True)
    if first is None:
        raise DemoError("/generate answered without a single token")
    run.texts.append(shown)
    run.num_decode_tokens += meta["completion_tokens"] - first[1]
    run.decode_s += now - first[0]
    run.num_tokens += meta["completion_tokens"]
    run.num_verify_steps += meta.get("spec_verify_ct", 0)


def measure(title: str, server: Server, prompts: tuple[str, ...], args: argparse.Namespace) -> Run:
    """Waits for the server, then streams every prompt's completion from it."""
    print(f"\n== {title}", flush=True)
    server.wait_ready(args.timeout)
    run = Run()
    try:
        for _ in stream_generate(server.port, prompts[0], 8):
            pass  # the first request pays for what is set up lazily
        for prompt in prompts:
            show_completion(server.port, prompt, args.max_tokens, run)
    except (OSError, http.client.HTTPException) as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(timeout=2)
        server.check_alive()
        raise server.failure(f"lost the server ({error})") from None
    print(f"  {run.tokens_per_s:.1f} decode tokens/s", flush=True)
    return run


def print_comparison(plain: Run, spec: Run) -> None:
    print("\n== comparison (one request at a time, greedy)")
    print(f"  without a draft   {plain.tokens_per_s:8.1f} decode tokens/s")
    ratio = f"   {spec.tokens_per_s / plain.tokens_per_s:.2f}x" if plain.tokens_per_s else ""
    print(f"  with {DRAFT} {spec.tokens_per_s:8.1f} decode tokens/s{ratio}")
    if spec.accept_length is not None:
        print(f"  acceptance length {spec.accept_length:8.2f} tokens per verify step")
    same = plain.texts == spec.texts
    print(
        f"  same text         {'yes' if same else 'no (two tokens were nearly tied, see README)':>8}",
        flush=True,
    )


def print_snippets(port: int) -> None:
    url = f"http://{HOST}:{port}"
    print(
        f"""
== the speculative server is running at {url}

curl {url}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "demo", "prompt": "def add(a, b):", "max_tokens": 48, "temperature": 0}}'

from openai import OpenAI  # pip install openai
client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.completions.create(model="demo", prompt="def add(a, b):", max_tokens=48, temperature=0)
print(answer.choices[0].text)

Ctrl-C stops it.""",
        flush=True,
    )


def check_port_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise DemoError(
                f"port {port} cannot be used ({error.strerror}). Stop what listens there, "
                f"or choose another: bash scripts/demo.sh --port {port + 1}"
            ) from None


def demo(args: argparse.Namespace) -> None:
    prompts = tuple(args.prompt or PROMPTS)
    check_port_free(args.port)
    with tempfile.TemporaryDirectory(prefix="flashspark-demo-") as folder, contextlib.ExitStack() as started:
        server = Server(args.port, Path(folder) / "plain.log")
        started.callback(server.stop)
        plain = measure("without a draft", server, prompts, args)
        server.stop()
        check_port_free(args.port)
        draft_args = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", DRAFT)
        server = Server(args.port, Path(folder) / "speculative.log", draft_args)
        started.callback(server.stop)
        spec = measure(f"with speculation ({DRAFT})", server, prompts, args)
        print_comparison(plain, spec)
        if args.exit:
            return
        print_snippets(args.port)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                server.check_alive()
                time.sleep(0.5)
        print("\nstopping the server", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exit", action="store_true", help="stop after the comparison")
    parser.add_argument("--port", type=int, default=30000, help="port of both servers, one after the other")
    parser.add_argument(
        "--prompt", action="append", help="complete this instead (may be given several times)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per completion")
    parser.add_argument("--timeout", type=float, default=180, help="seconds a server may take to load")
    return parser.parse_args()


def interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        demo(parse_args())
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
