"""docs/architecture.md names files, classes and functions; every one of them must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BASES = (ROOT, ROOT / "python" / "flashspark")  # `scheduler/loop.py` is short for the second
REFERENCE = re.compile(r"`([\w./-]+\.(?:py|sh|md|toml))(?::([A-Za-z_][\w.]*))?`")
MIN_FUNCTIONS_PER_PATH = 8


def resolve(name: str) -> Path | None:
    return next((base / name for base in BASES if (base / name).is_file()), None)


def find_name(body: list[ast.stmt], names: list[str]) -> bool:
    """Whether `Class.method` or `function` is defined in `body`, assignments at its top level included."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return len(names) == 1 or find_name(node.body, names[1:])
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if len(names) == 1 and any(isinstance(t, ast.Name) and t.id == names[0] for t in targets):
            return True
    return False


def broken_references(page: str) -> list[str]:
    broken = []
    for name, qualified in REFERENCE.findall(page):
        path = resolve(name)
        if path is None:
            broken.append(f"{name}: no such file")
        elif qualified and not find_name(ast.parse(path.read_text()).body, qualified.split(".")):
            broken.append(f"{name}:{qualified}: no such name")
    return broken


def section(page: str, title: str) -> str:
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert match, f"docs/architecture.md has no section '{title}'"
    return match.group(1)


def test_every_reference_exists() -> None:
    broken = broken_references(PAGE.read_text())
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("title", ["One request, from socket to socket", "One decode step"])
def test_both_paths_are_told_function_by_function(title: str) -> None:
    named = [name for name, qualified in REFERENCE.findall(section(PAGE.read_text(), title)) if qualified]
    assert len(named) >= MIN_FUNCTIONS_PER_PATH, named


def test_every_room_is_described() -> None:
    rooms = {
        path.name
        for path in (ROOT / "python" / "flashspark").iterdir()
        if (path.is_dir() and path.name != "__pycache__") or path.suffix == ".py"
    }
    table = section(PAGE.read_text(), "The rooms")
    missing = sorted(room for room in rooms - {"__init__.py"} if f"`{room}" not in table)
    assert not missing, missing


def test_a_newcomer_finds_the_decode_step_in_two_hops() -> None:
    assert "(docs/architecture.md#one-decode-step)" in (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(\.\./([\w/.]+)\)", section(PAGE.read_text(), "One decode step"))
    files = [ROOT / link for link in links]
    assert any(find_name(ast.parse(file.read_text()).body, ["SpeculativeWorker", "decode"]) for file in files)


def test_every_dependency_is_explained_and_used() -> None:
    """Runtime dependencies only; those of the extras are told in one sentence."""
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert listed
    names = re.findall(r'^ *"([\w-]+)', listed.group(1), re.M)
    explained = re.findall(r"^\| ([\w, -]+) \|", section(PAGE.read_text(), "Dependencies"), re.M)
    assert sorted(names) == sorted(", ".join(explained[1:]).split(", "))
    code = "\n".join(
        path.read_text()
        for folder in ("python/flashspark", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    )
    modules = {"pyzmq": "zmq", "pyyaml": "yaml", "prometheus-client": "prometheus_client"}
    unused = [
        name
        for name in names
        if not re.search(rf"^ *(?:from|import) {modules.get(name, name)}\b", code, re.M)
    ]
    assert not unused


def test_broken_references_are_noticed() -> None:
    page = (
        "`test/unit/test_architecture_map.py:resolve` `nowhere.py` `test/unit/test_architecture_map.py:gone`"
    )
    assert broken_references(page) == [
        "nowhere.py: no such file",
        "test/unit/test_architecture_map.py:gone: no such name",
    ]
