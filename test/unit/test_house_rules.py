"""The rules of the house, checked: sizes, import arrows, docstrings, and what must not be in the tree.

Every check returns the list of places that break it, so a failure names them all at once. The second half of
the file feeds each check something wrong and expects to hear about it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "flashspark"

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500

# Who may import whom. A room is a folder of python/flashspark or a single file beside them; importing a room
# means any of its files. This is the picture of docs/architecture.md, spelled out.
ARROWS: dict[str, set[str]] = {
    # leaves: nothing of the project
    "envs": set(),
    "heap": set(),
    "demo": set(),
    "text": set(),
    "ipc": set(),
    "kernels": set(),
    "upload": set(),
    # device side, bottom up
    "attention": {"kernels", "upload"},
    "distributed": {"args", "envs"},
    "layers": {"attention", "kernels", "distributed"},
    "models": {"layers", "attention", "kernels", "distributed"},
    "engine": {"models", "layers", "attention", "kernels", "upload", "distributed", "args", "envs", "demo"},
    "speculative": {
        *("engine", "models", "layers", "attention", "kernels", "upload", "distributed", "args", "envs"),
    },
    # host side
    "args": {"envs", "demo"},
    "scheduler": {
        *("speculative", "engine", "kernels", "upload", "distributed", "ipc", "text", "args", "envs", "heap"),
    },
    "api": {"ipc", "text", "args", "envs", "demo"},
    "launch_server": {"api", "scheduler", "ipc", "args", "envs", "heap", "demo"},
    # clients of a live server
    "benchmark": {
        "speculative",
        "args",
        "envs",
        "text",
        "demo",
    },  # tables are written by the code that reads them
}
ROOMS_WITHOUT_TORCH = {"api", "args", "demo", "envs", "heap", "ipc", "launch_server", "text"}
ROOMS_WITHOUT_HTTP = {"attention", "engine", "kernels", "layers", "models", "scheduler", "speculative"}
HTTP_MODULES = {"aiohttp", "fastapi", "http", "httpx", "requests", "starlette", "urllib", "uvicorn"}
ROOMS_WITH_DOCSTRINGS = {"engine", "kernels", "scheduler", "speculative"}

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b")
PICKLE = re.compile(
    r"\b(?:(?:import|from) (?:cloud)?pickle|(?:send|recv)_pyobj|broadcast_object_list"
    r"|torch[.]load\((?!.*weights_only=True)|(?:multiprocessing|mp)[.](?:Queue|Pipe)\()"
)
HOME_PATH = re.compile(r"(?<![\w.])/(?:root|home/[a-z_][\w-]*|Users/[A-Za-z][\w-]*)/")
THIS_CHECKOUT = re.compile(re.escape(str(ROOT)) + r"\b")
REGISTRY = re.compile(r"pypi[.]org|pythonhosted[.]org|download[.]pytorch|registry[.]npmjs")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def package_rooms() -> Iterator[tuple[Path, str, ast.Module]]:
    for path in sources("python/flashspark"):
        if path != PACKAGE / "__init__.py":
            yield path, room_of(path), ast.parse(path.read_text())


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a file of `package` imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def long_functions(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{node.lineno}: {node.name} has {num_lines} lines")
    return found


def broken_arrows(tree: ast.AST, room: str, package: str) -> list[str]:
    found = []
    for line, name in imported_modules(tree, package):
        top, *rest = name.split(".")
        if top == "flashspark" and rest and rest[0] in ARROWS:
            if rest[0] != room and rest[0] not in ARROWS[room]:
                found.append(f"{line}: {room} imports {rest[0]}")
        elif top == "torch" and room in ROOMS_WITHOUT_TORCH:
            found.append(f"{line}: {room} imports torch")
        elif top in HTTP_MODULES and room in ROOMS_WITHOUT_HTTP:
            found.append(f"{line}: {room} imports {top}")
    return found


def undocumented(tree: ast.Module) -> list[str]:
    found = [] if ast.get_docstring(tree) else ["1: the module"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            not node.name.startswith("_") and not ast.get_docstring(node)
        ):
            found.append(f"{node.lineno}: {node.name}")
    return found


def matches(text: str, *patterns: re.Pattern[str]) -> list[str]:
    return [
        f"{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in patterns
        if (match := pattern.search(line))
    ]


def report(path: Path, found: list[str]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{entry}" for entry in found]


def committed_texts() -> Iterator[tuple[Path, str]]:
    folders = ("python/flashspark", "scripts", "benchmark", "test", "docs", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths += [path for path in ROOT.iterdir() if path.is_file()]
    for path in sorted(paths):
        if path != Path(__file__) and "__pycache__" not in path.parts and path.stat().st_size < 2**20:
            try:
                yield path, path.read_text()
            except UnicodeDecodeError:
                continue


def test_every_room_is_on_the_map() -> None:
    assert {room for _, room, _ in package_rooms()} <= set(ARROWS)


def test_arrows_have_no_cycle() -> None:
    left = dict(ARROWS)
    while left:
        free = [room for room, targets in left.items() if not targets & left.keys()]
        assert free, f"these rooms import each other in a circle: {sorted(left)}"
        for room in free:
            del left[room]


def test_imports_follow_the_arrows() -> None:
    found = []
    for path, room, tree in package_rooms():
        package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
        found += report(path, broken_arrows(tree, room, package))
    assert not found, "\n".join(found)


def test_the_scheduler_knows_no_cuda() -> None:
    found = []
    for path, room, _ in package_rooms():
        if room == "scheduler":
            found += report(path, matches(path.read_text(), re.compile(r"torch\.cuda|\.cuda\(|['\"]cuda")))
    assert not found, "\n".join(found)


def test_functions_and_files_stay_small() -> None:
    found = []
    for path in sources("python/flashspark", "scripts", "benchmark"):
        text = path.read_text()
        found += report(path, long_functions(ast.parse(text)))
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES and not path.name.startswith("protocol"):
            found += report(path, [f"{num_lines}: lines in one file"])
    assert not found, "\n".join(found)


def test_public_names_have_docstrings() -> None:
    found = []
    for path, room, tree in package_rooms():
        if room in ROOMS_WITH_DOCSTRINGS:
            found += report(path, undocumented(tree))
    assert not found, "\n".join(found)


def test_nothing_is_left_unfinished_and_nothing_pickled() -> None:
    found = []
    for path in sources("python/flashspark", "scripts", "benchmark"):
        found += report(path, matches(path.read_text(), UNFINISHED))
    for path in sources("python/flashspark"):
        found += report(path, matches(path.read_text(), PICKLE))
    assert not found, "\n".join(found)


def test_no_home_paths_and_no_registry_hosts() -> None:
    found = []
    for path, text in committed_texts():
        found += report(path, matches(text, HOME_PATH, THIS_CHECKOUT, REGISTRY))
    assert not found, "\n".join(found)


# The checks themselves, each shown something wrong.


def test_long_function_is_noticed() -> None:
    body = "    pass\n"
    assert not long_functions(ast.parse("def f():\n" + body * 79))
    assert long_functions(ast.parse("def f():\n" + body * 80)) == ["1: f has 81 lines"]
    assert long_functions(ast.parse("class C:\n  async def f():\n" + "   x\n" * 80))


@pytest.mark.parametrize(
    ("room", "statement", "message"),
    [
        ("api", "import flashspark.scheduler.loop", "api imports scheduler"),
        ("api", "def f():\n    from flashspark import engine", "api imports engine"),
        ("api", "from torch import nn", "api imports torch"),
        ("kernels", "from ..args import ServerArgs", "kernels imports args"),
        ("kernels", "from .. import layers", "kernels imports layers"),
        ("models", "from flashspark.speculative import worker", "models imports speculative"),
        ("speculative", "import fastapi", "speculative imports fastapi"),
        ("speculative", "from urllib import request", "speculative imports urllib"),
    ],
)
def test_broken_arrow_is_noticed(room: str, statement: str, message: str) -> None:
    found = broken_arrows(ast.parse(statement), room, f"flashspark.{room}")
    assert [entry.split(": ", 1)[1] for entry in found] == [message]


@pytest.mark.parametrize(
    ("room", "statement"),
    [
        ("api", "from flashspark.ipc import GenerateRequest"),
        ("kernels", "from . import sampling\nfrom .sampling import draw\nfrom flashspark import __version__"),
        ("scheduler", "from ..speculative.worker import Worker"),
    ],
)
def test_allowed_arrow_passes(room: str, statement: str) -> None:
    assert not broken_arrows(ast.parse(statement), room, f"flashspark.{room}")


def test_missing_docstring_is_noticed() -> None:
    found = undocumented(ast.parse("def f(): ...\ndef _g(): ...\nclass C: ...\n"))
    assert found == ["1: the module", "1: f", "3: C"]


def test_unwanted_text_is_noticed() -> None:
    wrong = {
        UNFINISHED: ["# TODO: later", "raise NotImplementedError"],
        PICKLE: ["import pickle", "socket.send_pyobj(x)", "torch.load(path)", "queue = mp.Queue()"],
        HOME_PATH: ["cd /root/x", "see /home/ann/x", "(/Users/Ann/x)"],
        THIS_CHECKOUT: [f"cd {ROOT}/docs"],
        REGISTRY: ["https://" + ".".join(("pypi", "org")) + "/simple"],
    }
    for pattern, lines in wrong.items():
        for line in lines:
            assert matches(line, pattern), line
    assert not matches("benchmark/home/x, docs/root/", HOME_PATH)
    assert not matches("torch.load(path, weights_only=True)", PICKLE)
