"""Runs the code blocks of the README (or of another page), in order, in a fresh clone of this repository.

    python scripts/check_readme.py                  clone HEAD and run every block but the test command
    python scripts/check_readme.py --with-tests     the test command too
    python scripts/check_readme.py --here           run in this checkout instead of a clone
    python scripts/check_readme.py --show tests     print the blocks of one kind and stop
    python scripts/check_readme.py --page docs/profiling.md

Every ```bash and ```python block counts. A comment in the line above a block says how to run it:

    <!-- check: run -->          run it and expect exit code 0 (what a block without a comment gets)
    <!-- check: run --exit -->   the same, with words added to its last line
    <!-- check: server -->       start it, wait for /health; it stays up until the next server block
    <!-- check: tests -->        the test command: run only with --with-tests
    <!-- check: skip -->         not for machines (it needs a GPU, a key, a reader)

Only the standard library is used: this also runs where nothing is installed yet.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:^<!-- check: (?P<kind>\w+) ?(?P<words>.*?) ?-->\n)?"
    r"^```(?P<language>bash|python)\n(?P<code>.*?)^```$",
    re.M | re.S,
)
KINDS = ("run", "server", "tests", "skip")
PORT = 30000


class CheckError(Exception):
    """A block did not do what the README promises."""


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, how to run it, and what it says."""

    line: int
    kind: str
    language: str
    code: str
    page: str = "README.md"

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def command(self) -> list[str]:
        return ["bash", "-euc", self.code] if self.language == "bash" else ["python", "-c", self.code]


def parse_blocks(readme: str, page: str = "README.md") -> list[Block]:
    """All bash and python blocks, with the words of their comment already added."""
    blocks = []
    for match in BLOCK.finditer(readme):
        kind, words, code = match["kind"] or "run", match["words"], match["code"].rstrip("\n")
        line = readme.count("\n", 0, match.start("language")) + 1
        if kind not in KINDS:
            raise CheckError(f"{page}:{line}: unknown kind '{kind}', one of {', '.join(KINDS)} is meant")
        blocks.append(Block(line, kind, match["language"], f"{code} {words}" if words else code, page))
    return blocks


def port_is_open() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) == 0


def is_healthy() -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def started(block: Block, folder: Path, env: dict[str, str], timeout_s: float = 300) -> Iterator[None]:
    """The server of `block`, healthy; stopped with its whole process group on the way out."""
    process = subprocess.Popen(block.command(), cwd=folder, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + timeout_s
        while not is_healthy():
            if process.poll() is not None:
                raise CheckError(f"{block.place}: the server left with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise CheckError(f"{block.place}: no healthy server after {timeout_s:.0f} s")
            time.sleep(0.3)
        yield
    finally:
        for sig, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sig)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience_s)


def run_blocks(blocks: list[Block], folder: Path) -> None:
    """Runs the blocks in order; a server lives until the next server block or the end."""
    bin_dir = Path(os.environ.get("FLASHSPARK_VENV", folder / ".venv")) / "bin"
    env = {**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
    with contextlib.ExitStack() as servers:
        for block in blocks:
            print(f"\n--- {block.place} ({block.kind})\n{block.code}\n---", flush=True)
            if block.kind == "server":
                servers.close()
                servers.enter_context(started(block, folder, env))
                continue
            start = time.monotonic()
            code = subprocess.run(block.command(), cwd=folder, env=env, check=False).returncode
            if code:
                raise CheckError(f"{block.place}: exit code {code}")
            print(f"--- ok, {time.monotonic() - start:.1f} s", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--with-tests", action="store_true", help="run the test command too")
    parser.add_argument("--here", action="store_true", help="run in this checkout, not in a clone of HEAD")
    parser.add_argument("--show", choices=KINDS, help="print the blocks of this kind and stop")
    parser.add_argument(
        "--page", default="README.md", help="the page whose blocks are meant (default README.md)"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    try:
        blocks = parse_blocks((ROOT / args.page).read_text(), args.page)
        if args.show:
            print("\n".join(block.code for block in blocks if block.kind == args.show))
            return 0
        if port_is_open():
            raise CheckError(f"port {PORT} is in use, and the page's servers need it")
        wanted = [b for b in blocks if b.kind in ("run", "server") or (b.kind == "tests" and args.with_tests)]
        with tempfile.TemporaryDirectory(prefix="flashspark-readme-") as folder:
            place = ROOT if args.here else Path(folder) / "flashspark"
            if not args.here:
                subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place)], check=True)
            run_blocks(wanted, place)
    except CheckError as error:
        print(f"\ncheck_readme: {error}", file=sys.stderr)
        return 1
    print(f"\ncheck_readme: {len(wanted)} blocks ran, all as {args.page} says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
