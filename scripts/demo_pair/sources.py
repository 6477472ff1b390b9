"""Fetch the reviewed packages as wheels, check their licences and read the Python files worth learning from."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from .packages import PERMISSIVE, reviewed_packages

# Directories and files that hold tests, generated tables, translations or somebody else's code.
_SKIP_PATH = re.compile(
    r"(^|/)(tests?|testing|idle_test|benchmarks?|asv_bench|examples?/data|locale|encodings|pydoc_data|unidata|pgen2"
    r"|_?vendor(ed)?|_?third_?party|_?extern(al|als)?|_vendored|compat/vendor|packages/vendor|typeshed|lexers"
    r"|generated|_generated|site-packages|dist-packages|ensurepip|turtledemo|_antlr|antlr"
    r"|test_[^/]*\.py|[^/]*_tests?\.py|conftest\.py|[^/]*_pb2(_grpc)?\.py|_version\.py|version\.py)(/|$)"
)
_COPYLEFT = re.compile(
    r"\b[AL]?GPL|General Public Licen[sc]e|Mozilla Public|\bMPL\b|CC[- ]BY|Creative Commons|CeCILL|EUPL", re.I
)
_FORBIDDEN_METADATA = re.compile(
    r"\b[AL]?GPL|General Public|Mozilla|\bMPL\b|proprietary|Other/Proprietary|EUPL|CeCILL", re.I
)
_EXPECT = {
    "MIT": re.compile(r"\bMIT\b|Permission is hereby granted", re.I),
    "BSD-3-Clause": re.compile(r"BSD|Redistribution and use", re.I),
    "BSD-2-Clause": re.compile(r"BSD|Redistribution and use", re.I),
    "Apache-2.0": re.compile(r"Apache", re.I),
}
_MIN_BYTES, _MAX_BYTES = 150, 120_000


@dataclass(frozen=True)
class Source:
    """One licensed origin of files: the standard library or a wheel."""

    name: str
    version: str
    licence: str
    declared: str
    archive: str
    sha256: str
    cap_bytes: int


class LicenceMismatch(RuntimeError):
    """The package's own metadata does not confirm the licence that was reviewed."""


def download_wheels(folder: Path, pins: dict[str, str], workers: int = 3) -> dict[str, Path | None]:
    """Download one wheel per reviewed package (exact version where `pins` has one); None where pip found none."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(reviewed_packages())
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return dict(zip(names, pool.map(lambda n: _download(folder, n, pins.get(n)), names), strict=True))


def _download(folder: Path, name: str, version: str | None) -> Path | None:
    own = folder / name
    found = sorted(own.glob("*.whl"))
    if found:
        return found[-1]
    spec = f"{name}=={version}" if version else name
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(own),
        spec,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(own.glob("*.whl"))
    print(f"{spec}: {found[-1].name if found else 'no wheel: ' + result.stderr.strip()[-160:]}", flush=True)
    return found[-1] if found else None


def describe_wheel(name: str, wheel: Path) -> Source:
    """Read name, version and licence from a wheel; raise LicenceMismatch unless they confirm the reviewed licence."""
    licence, cap_mb = reviewed_packages()[name]
    if licence not in PERMISSIVE:
        raise LicenceMismatch(f"{name}: {licence} is not on the list of permissive licences")
    with zipfile.ZipFile(wheel) as archive:
        members = archive.namelist()
        metadata = next(m for m in members if m.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode("utf8", "replace"))
        texts = [
            m
            for m in members
            if ".dist-info/" in m and re.search(r"licen[sc]e|copying", m.rsplit("/", 1)[-1], re.I)
        ]
        full_text = "\n".join(archive.read(m).decode("utf8", "replace")[:3000] for m in texts[:1])
    declared = [
        headers.get("License-Expression") or (headers.get("License") or "").strip().split("\n")[0][:80]
    ]
    declared += [c for c in headers.get_all("Classifier") or [] if c.startswith("License")]
    summary = " | ".join(d for d in declared if d)
    if _FORBIDDEN_METADATA.search(summary):
        raise LicenceMismatch(f"{name}: declares {summary!r}")
    if not _EXPECT[licence].search(summary + "\n" + full_text):
        raise LicenceMismatch(f"{name}: reviewed as {licence}, declares {summary!r}")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Source(name, headers["Version"], licence, summary, wheel.name, digest, int(cap_mb * 1e6))


def standard_library() -> Source:
    """CPython's own library, as installed beside the running interpreter."""
    version = platform.python_version()
    return Source(
        "cpython",
        version,
        "PSF-2.0",
        "Python Software Foundation License",
        f"cpython-{version}",
        "",
        14_000_000,
    )


def _wanted(path: str, size: int) -> bool:
    return path.endswith(".py") and _MIN_BYTES <= size <= _MAX_BYTES and not _SKIP_PATH.search(path)


def permitted_text(raw: bytes) -> str | None:
    """Decode a file; None where it is not UTF-8 or speaks of a licence that is not permissive."""
    try:
        text = raw.decode("utf8")
    except UnicodeDecodeError:
        return None
    return None if _COPYLEFT.search(text) else text


def iter_library_files() -> Iterator[tuple[str, str]]:
    """(path, text) of the standard library's files, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(root):
        subfolders.sort()
        for file in sorted(files):
            full = Path(folder) / file
            path = full.relative_to(root).as_posix()
            if _wanted(path, full.stat().st_size) and (text := permitted_text(full.read_bytes())) is not None:
                yield path, text


def iter_wheel_files(wheel: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of a wheel's files in an order that does not depend on names (so that a cap takes a fair sample)."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [e for e in archive.infolist() if _wanted(e.filename, e.file_size)]
        entries.sort(key=lambda e: hashlib.sha256(e.filename.encode()).digest())
        for entry in entries:
            text = permitted_text(archive.read(entry))
            if text is not None:
                yield entry.filename, text
