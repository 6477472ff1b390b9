"""The surface under a fuzzer of its own and under schemathesis: refusals and answers, never a failure or a leak."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from e2e.fuzz import ALONE, Outcome, case, every_field, fuzz
from e2e.server import Server, poll, running_server, speculative
from tiny_models import CHAT_TEMPLATE

EVERY = 1000  # requests between two looks at the server
LEAST_ANSWERED = 0.3
MAX_GROWTH_BYTES = 96 << 20  # of either process, once it has seen everything


@pytest.fixture(scope="module")
def fuzzed(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzzed")
    log = folder / "log"
    flags = ["--max-running-requests", "12", "--served-model-name", "tiny", "--enable-metrics"]
    flags += ["--ragged-verify-mode", "compact", "--speculative-cost-table", "none"]
    flags += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3-thinking"]
    flags += [
        "--chat-template",
        CHAT_TEMPLATE + "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TORCH_PROFILER_DIR", str(folder))
        with running_server(*speculative(*tiny_pair), *flags, log=log) as running:
            yield running


def memory(server: Server) -> int:
    """Resident bytes of both processes."""
    processes = (psutil.Process(server.process.pid), server.scheduler())
    return sum(process.memory_info().rss for process in processes)


def num_files(server: Server) -> int:
    """Open files and sockets of the API process."""
    return psutil.Process(server.process.pid).num_fds()


def look(server: Server) -> None:
    """Nothing of the requests is left, and a good one is answered as ever."""
    server.wait_idle()
    assert len(server.generate("still here", max_new_tokens=4, ignore_eos=True)["output_ids"]) == 4
    assert server.health() == 200


def run(server: Server, num_requests: int, seed: int) -> Outcome:
    """Fuzzes in portions, and looks at the server after each."""
    total = Outcome()
    look(server)
    files, before = num_files(server), 0
    for first in range(0, num_requests, EVERY):
        total.merge(fuzz(server.port, min(EVERY, num_requests - first), seed, first))
        assert not total.failures, "\n".join(total.failures[:10])
        look(server)
        before = before or memory(server)
    assert memory(server) - before < MAX_GROWTH_BYTES
    poll("no connection is left open", lambda: num_files(server) <= files + 2)
    print(f"{dict(total.statuses)}; valid ones that were refused: {total.refused_valid.most_common(5)}")
    assert total.statuses.total() >= num_requests
    assert total.statuses[200] >= LEAST_ANSWERED * num_requests
    assert sorted(every_field() - total.sent) == []
    # A field that is never answered needs an entry in e2e.fuzz.GRAMMAR: what its schema allows is refused.
    assert sorted(every_field() - total.answered) == []
    assert "Traceback" not in server.log
    assert not any(word in server.log for word in ("🎉", "日本"))  # what clients say stays out of it
    return total


def test_a_request_is_always_the_same_one() -> None:
    there = [case(3, i) for i in range(300)]
    back = [case(3, i) for i in reversed(range(300))]
    assert there == back[::-1]


@pytest.mark.timeout(900)
def test_2000_requests(fuzzed: Server) -> None:
    run(fuzzed, 2000, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_20000_requests(fuzzed: Server) -> None:
    run(fuzzed, 20_000, seed=2)


def schemathesis(server: Server, phases: str, most_per_operation: int) -> None:
    """Its own idea of good and bad requests, from the OpenAPI document; nothing may be answered by 5xx."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    alone = "|".join([*ALONE, *ALONE.values()])
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--phases", phases, "--no-shrink"]
    command += ["--max-examples", str(most_per_operation), "--generation-deterministic"]
    command += ["--exclude-path-regex", f"^({alone})$", "--no-color"]
    command += ["--request-timeout", "120", "--suppress-health-check", "all", "--continue-on-failure"]
    with tempfile.TemporaryDirectory() as folder:  # it leaves a cache where it runs
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=folder)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    look(server)
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def short(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A context of 64 tokens: whoever asks for as many as there are is soon done."""
    log = tmp_path_factory.mktemp("short") / "log"
    flags = ["--max-running-requests", "12", "--served-model-name", "tiny", "--context-length", "64"]
    with running_server(*speculative(*tiny_pair), *flags, log=log) as running:
        yield running


@pytest.mark.timeout(900)
def test_schemathesis(short: Server) -> None:
    schemathesis(short, "fuzzing", 10)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_schemathesis_longer(short: Server) -> None:
    schemathesis(short, "examples,coverage,fuzzing", 300)
