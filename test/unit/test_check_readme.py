"""scripts/check_readme.py: how it reads a README, and that ours names what .ci/run needs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("check_readme", ROOT / "scripts" / "check_readme.py")
assert spec is not None
assert spec.loader is not None
check_readme = importlib.util.module_from_spec(spec)
sys.modules["check_readme"] = check_readme
spec.loader.exec_module(check_readme)

PAGE = """# Title
```bash
echo one
```
<!-- check: run --exit -->
```bash
bash demo.sh
```
```json
{"not": "run"}
```
<!-- check: server -->
```bash
serve
```
<!-- check: skip -->
```python
print("needs a GPU")
```
"""


def test_blocks_and_their_comments() -> None:
    blocks = [(b.line, b.kind, b.language, b.code) for b in check_readme.parse_blocks(PAGE)]
    assert blocks == [
        (2, "run", "bash", "echo one"),
        (6, "run", "bash", "bash demo.sh --exit"),
        (13, "server", "bash", "serve"),
        (17, "skip", "python", 'print("needs a GPU")'),
    ]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(check_readme.CheckError, match=r"README.md:2: unknown kind 'later'"):
        check_readme.parse_blocks("<!-- check: later -->\n```bash\nls\n```\n")


def test_blocks_run_in_order_and_the_first_failure_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSPARK_VENV", sys.prefix)
    page = (
        "```bash\ntouch a\n```\n```python\nopen('b', 'w')\n```\n```bash\nfalse\n```\n```bash\ntouch c\n```\n"
    )
    with pytest.raises(check_readme.CheckError, match=r"README.md:7: exit code 1"):
        check_readme.run_blocks(check_readme.parse_blocks(page), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_our_readme_starts_with_the_two_commands() -> None:
    blocks = check_readme.parse_blocks((ROOT / "README.md").read_text())
    assert [block.code for block in blocks[:2]] == ["bash scripts/demo.sh --exit", "bash scripts/test.sh"]
    assert [block.code for block in blocks if block.kind == "tests"] == ["bash scripts/test.sh"]
