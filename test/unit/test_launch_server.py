"""The launcher's own life, where a real race would be needed to see it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from flashspark import launch_server
from flashspark.args.command_line import parse_args


def test_a_scheduler_that_dies_before_it_hears_a_word(monkeypatch, caplog):
    """Its stdin is closed by the time the launcher writes: the exit is reported, not a traceback."""
    start = asyncio.create_subprocess_exec

    async def start_and_kill(*command, **options):
        process = await start(*command, **options)
        process.kill()
        await process.wait()
        await asyncio.sleep(0.1)  # the loop closes its end of the pipe
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_kill)
    args = parse_args(["--model-path", "demo", "--port", "0"])
    code = launch_server.run(args, "test", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert code == 1
    assert "was killed by signal 9" in caplog.text


@pytest.fixture(autouse=True)
def _plain_stderr(monkeypatch):
    """A file number for the scheduler's output, which pytest's capture does not always have."""
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
