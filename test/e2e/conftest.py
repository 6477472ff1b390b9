"""Servers for whole modules: a start costs seconds, so tests of one module share one and leave it idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("e2e.server")

from e2e.server import CONTEXT, Server, running_server, speculative  # noqa: E402 - after the line above
from tiny_models import write_dflash2, write_target  # noqa: E402


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target and a random draft, W = 6."""
    folder = tmp_path_factory.mktemp("tiny")
    target = write_target(folder / "target", max_position_embeddings=CONTEXT)
    return target, write_dflash2(folder / "draft", target)


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny pair with room for 16 requests."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--max-running-requests", "16", "--served-model-name", "tiny"]
    with running_server(*speculative(*tiny_pair), *flags, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped pair: real text, drafts that are accepted."""
    log = tmp_path_factory.mktemp("demo") / "log"
    flags = ["--max-running-requests", "16"]
    with running_server(*speculative("demo", "demo-dflash2"), *flags, log=log) as running:
        yield running
