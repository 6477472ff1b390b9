"""docs/invariants.md: every invariant has a test, every lesson a test or a reason; the tests that it and docs/faults.md
name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text()
TEST = re.compile(r"`(test/[\w/]+\.py)::(\w+)`")


def missing_tests(page: str) -> list[str]:
    missing = []
    for name, function in TEST.findall(page):
        path = ROOT / name
        body = ast.parse(path.read_text()).body if path.is_file() else []
        if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in body):
            missing.append(f"{name}::{function}")
    return missing


@pytest.mark.parametrize("name", ["invariants.md", "faults.md"])
def test_every_test_named_exists(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    assert not missing_tests(page)
    assert len(TEST.findall(page)) == page.count("::")  # none in a spelling that is not looked at


def test_a_missing_test_is_noticed() -> None:
    assert missing_tests("`test/unit/test_invariants_page.py::gone`, `test/gone.py::test_x`") == [
        "test/unit/test_invariants_page.py::gone",
        "test/gone.py::test_x",
    ]


def test_every_invariant_has_a_test() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*)$", PAGE, re.M))
    assert list(map(int, rows)) == list(range(1, 41))
    assert all(TEST.search(row) for row in rows.values())


@pytest.mark.parametrize("project", ["sglang", "vllm", "TensorRT-LLM"])
def test_every_lesson_has_a_test_or_a_reason(project: str) -> None:
    lessons = re.findall(r"^- (.*(?:\n  .*)*)", PAGE.split("## Lessons of other engines")[1], re.M)
    mine = [lesson for lesson in lessons if lesson.startswith(project)]
    assert mine
    assert not [lesson for lesson in mine if not TEST.search(lesson) and "cannot" not in lesson]
