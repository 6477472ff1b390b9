"""Clients that nobody here wrote, as the package index has them, each in an environment of its own.

    bench = bench_clients("0.5.23")                  # prepared once, then found again
    bench.run("-m", "sglang.bench_serving", "--help")

Environments and wheels lie in a cache folder outside the repository. SGLang's clients are part of a package that needs
gigabytes of server to install, and use a handful of its small modules. So its wheel is fetched without what it depends
on, and the clients' files are laid into an overlay, byte for byte. Of the two modules that would import the server,
only the few definitions that the clients use are laid beside them, cut out of the wheel's own text. A package that
cannot be had raises `CannotBeHad`; a test is then skipped by its name, never given an imitation.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PREPARE_SECONDS = 240.0  # for one package; then it is not to be had
# What importing the bench and the profiler takes; versions that were run.
BENCH_PACKAGES = (
    *("aiohttp==3.14.5", "datasets==5.2.0", "msgspec==0.23.0", "numpy==2.4.6", "orjson==3.13.0"),
    *("pillow==13.0.0", "psutil==7.2.2", "pybase64==1.5.1", "pyzmq==27.3.0", "requests==2.34.2"),
    *("tqdm==4.70.1", "transformers==5.24.0"),
)
_BENCH_FILES = ("sglang/bench_serving.py", "sglang/benchmark/")
_SMALL_MODULES = (
    *("sglang/srt/environ.py", "sglang/srt/debug_utils/cuda_coredump.py", "sglang/srt/utils/network.py"),
    "sglang/srt/speculative/dspark_components/dspark_sps.py",
    *("sglang/srt/rust_extensions/__init__.py", "sglang/srt/rust_extensions/loader.py"),
    "sglang/srt/rust_extensions/_bench.",
)
# Modules that would import the server, and how the names begin that the clients take from them.
_STAND_INS = (
    ("sglang/srt/disaggregation/utils.py", "FAKE_BOOTSTRAP_HOST"),
    ("sglang/benchmark/one_batch_server.py", "DEFAULT_TIMEOUT", "should_skip_due_to_"),
)


class CannotBeHad(Exception):
    """A package could not be fetched; the message names it."""


@dataclass(frozen=True)
class RealClient:
    """An interpreter with a client's packages, and what its import path holds besides."""

    python: Path
    overlay: Path | None = None

    def command(self, *arguments: str) -> list[str]:
        """The command line of this interpreter."""
        return [str(self.python), *arguments]

    def environment(self) -> dict[str, str]:
        """This process's environment without this project's imports, hubs or proxies in it."""
        dropped = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "OPENAI_API_KEY", "API_KEY"}
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
        kept |= {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return kept if self.overlay is None else kept | {"PYTHONPATH": str(self.overlay)}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Starts the client in a session of its own."""
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Runs the client to its end; its whole group is ended when that takes too long."""
        process = self.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            out, errors = process.communicate()
            print(out, errors)
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def had(prepare: Callable[[str], RealClient], version: str) -> RealClient:
    """The client, or a skip that names the package which cannot be had."""
    try:
        return prepare(version)
    except CannotBeHad as error:
        pytest.skip(f"cannot be had: {error}")


def cache_folder() -> Path:
    """Where environments and wheels are kept from one run to the next."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flashspark-test-clients"


def bench_clients(version: str) -> RealClient:
    """`sglang.bench_serving` and the DSPARK profiler of one version of SGLang."""
    overlay = sglang_overlay(version)
    return RealClient(_environment("bench", BENCH_PACKAGES), overlay)


def rust_bench_client(version: str) -> RealClient:
    """The Rust bench client: compiled, and in need of no package at all."""
    return RealClient(_environment("bare", ()), sglang_overlay(version))


def router(version: str) -> RealClient:
    """`sglang-router`, installed as any user would."""
    return RealClient(_environment("router", (f"sglang-router=={version}",)))


def sglang_overlay(version: str) -> Path:
    """A folder for `PYTHONPATH` with the clients of one version."""
    what_is_in_it = f"{sys.version} {_BENCH_FILES} {_SMALL_MODULES} {_STAND_INS}"
    folder = cache_folder() / f"overlay-{version}-{_digest(what_is_in_it)}"
    with _making(folder) as missing:
        if missing:
            with tempfile.TemporaryDirectory() as downloads:
                what = f"sglang=={version}"
                _pip("download", "--no-deps", "--only-binary", ":all:", "-d", downloads, what, name=what)
                (wheel,) = Path(downloads).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    _lay_overlay(archive, folder)
    return folder


def _lay_overlay(wheel: zipfile.ZipFile, folder: Path) -> None:
    wanted = [name for name in wheel.namelist() if name.startswith((*_BENCH_FILES, *_SMALL_MODULES))]
    wheel.extractall(folder, wanted)
    for name, *used in _STAND_INS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_only(wheel.read(name).decode(), tuple(used)))
    for path in [*folder.rglob("*.py")]:
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()


def _only(source: str, names: tuple[str, ...]) -> str:
    """Assignments and functions whose names begin like one of `names`."""
    kept = []
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                if name.startswith(names):
                    kept.append(ast.get_source_segment(source, node) or "")
    return "\n\n".join(kept) + "\n"


def _environment(name: str, packages: tuple[str, ...]) -> Path:
    """The interpreter of a virtual environment with these packages."""
    key = _digest(f"{sys.version} {sys.base_prefix} {packages}")
    folder = cache_folder() / f"venv-{name}-{key}"
    python = folder / "bin" / "python"
    with _making(folder) as missing:
        if missing:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
            if packages:
                _pip("--python", str(python), "install", "--quiet", *packages, name=", ".join(packages))
    return python


@contextlib.contextmanager
def _making(folder: Path) -> Iterator[bool]:
    """Whether `folder` is to be made, with nobody else at it; it counts as made when the block ends well."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    done = folder.with_name(folder.name + ".done")
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not done.exists()
        if missing:
            shutil.rmtree(folder, ignore_errors=True)
        yield missing
        done.touch()


_refused: dict[str, str] = {}  # a package is asked for once in a session


def _pip(*arguments: str, name: str) -> None:
    """Runs pip; `CannotBeHad` with the end of its words when it fails or does not end."""
    if name in _refused:
        raise CannotBeHad(_refused[name])
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["--timeout", "20", "--retries", "2", *arguments]
    command += shlex.split(os.environ.get("FLASHSPARK_PIP_ARGS", ""))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PREPARE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        why = f"nothing within {PREPARE_SECONDS:g} s"
    else:
        if done.returncode == 0:
            return
        lines = (done.stderr or done.stdout).strip().splitlines()
        why = " ".join(line for line in lines if line.startswith("ERROR"))[-300:] or "pip failed"
    _refused[name] = f"{name}: {why}"
    raise CannotBeHad(_refused[name])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
