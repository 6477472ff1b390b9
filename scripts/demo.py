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
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"
TARGET = "demo"
DRAFT = "demo-dflash2"
PROMPTS = (
    'import socket\n\n\ndef find_free_port(host="127.0.0.1"):\n    """Return a port that nobody listens on."""\n',
    'class LRUCache:\n    """A mapping that forgets the least recently used item."""\n\n'
    "    def __init__(self, maxsize=128):\n",
    "class Vector:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def __add__(self, other):\n",
)
MAX_PERIOD, MAX_REPEATS = (
    40,
    3,
)  # where a small model begins to repeat itself it is cut: loops are easy to draft
INTERACTIVE = sys.stdout.isatty()


class DemoError(Exception):
    """Something the user should read instead of a traceback."""


@dataclass
class Run:
    """What one server did with all prompts. `decode` counts exclude each answer's first frame."""

    cut_loops: bool
    texts: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens of each text
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
        command += ["--host", HOST, "--port", str(port), "--log-level-http", "warning", *extra_args]
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


def stream_generate(port: int, prompt: str, max_tokens: int) -> Generator[dict, None, None]:
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


def dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if INTERACTIVE else text


def repeats_itself(ids: list[int]) -> bool:
    """Whether the ids end with the same short run of them, several times in a row."""
    return any(
        ids[-period * (MAX_REPEATS - 1) :] == ids[-period * MAX_REPEATS : -period]
        for period in range(1, min(MAX_PERIOD, len(ids) // MAX_REPEATS) + 1)
    )


def show_completion(port: int, prompt: str, max_tokens: int, run: Run) -> None:
    """Streams one completion into the terminal and adds its figures to `run`."""
    print("\n" + dim(prompt), end="", flush=True)
    shown = ""
    first: tuple[float, int] | None = None
    meta: dict = {}
    now = 0.0
    with contextlib.closing(stream_generate(port, prompt, max_tokens)) as frames:
        for frame in frames:
            now = time.perf_counter()
            meta = frame["meta_info"]
            if first is None:
                first = (now, meta["completion_tokens"])
            print(frame["text"][len(shown) :], end="", flush=True)
            shown = frame["text"]
            if run.cut_loops and repeats_itself(frame["output_ids"]):
                break
    if first is None:
        raise DemoError("/generate answered without a single token")
    num_tokens, decode_s = meta["completion_tokens"], now - first[0]
    run.texts.append(shown)
    run.lengths.append(num_tokens)
    run.num_decode_tokens += num_tokens - first[1]
    run.decode_s += decode_s
    figures = f"{num_tokens} tokens"
    if decode_s > 0:
        figures += f", {(num_tokens - first[1]) / decode_s:.0f} per second"
    if "spec_verify_ct" in meta:
        run.num_tokens += num_tokens
        run.num_verify_steps += meta["spec_verify_ct"]
        figures += f", {num_tokens / meta['spec_verify_ct']:.1f} per verify step"
    print(f"\n{dim('-- ' + figures)}", flush=True)


def measure(
    title: str, server: Server, prompts: tuple[str, ...], limits: list[int], timeout_s: float, cut_loops: bool
) -> Run:
    """Waits for the server, then streams every prompt's completion, of at most `limits` tokens, from it."""
    print(f"\n== {title}", flush=True)
    server.wait_ready(timeout_s)
    run = Run(cut_loops)
    try:
        for _ in stream_generate(server.port, prompts[0], 8):
            pass  # the first request pays for what is set up lazily
        for prompt, limit in zip(prompts, limits, strict=True):
            show_completion(server.port, prompt, limit, run)
    except (OSError, http.client.HTTPException) as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(timeout=2)
        server.check_alive()
        raise server.failure(f"lost the server ({error})") from None
    return run


def print_comparison(plain: Run, spec: Run) -> None:
    print("\n== comparison (one request at a time, greedy)")
    print(f"  without a draft   {plain.tokens_per_s:8.1f} decode tokens/s")
    ratio = f"   {spec.tokens_per_s / plain.tokens_per_s:.2f}x" if plain.tokens_per_s else ""
    print(f"  with {DRAFT} {spec.tokens_per_s:8.1f} decode tokens/s{ratio}")
    if spec.accept_length is not None:
        print(f"  acceptance length {spec.accept_length:8.2f} tokens per verify step")
    same = plain.texts == spec.texts
    print(f"  same text         {'yes' if same else 'no (two tokens were nearly tied, see README)':>8}")
    print("\nThese are easy prompts. What the pair does on 64 held-out ones: docs/demo-pair.md", flush=True)


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
        limits = [args.max_tokens] * len(prompts)
        plain = measure("without a draft: one token per step", server, prompts, limits, args.timeout, True)
        server.stop()
        check_port_free(args.port)
        draft_args = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", DRAFT)
        server = Server(args.port, Path(folder) / "speculative.log", draft_args)
        started.callback(server.stop)
        title = f"with {DRAFT}: a block of drafts per step"
        spec = measure(title, server, prompts, plain.lengths, args.timeout, False)
        print_comparison(plain, spec)
        if args.exit:
            return
        with contextlib.suppress(KeyboardInterrupt):
            print_snippets(args.port)
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
    parser.add_argument("--max-tokens", type=int, default=112, help="tokens per completion")
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
