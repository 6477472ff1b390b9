"""The surface under a fuzzer of its own and under schemathesis: refusals and answers, never a failure or a leak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from e2e.fuzz import Outcome, every_field, fuzz
from e2e.server import Server, poll, running_server, speculative
from tiny_models import CHAT_TEMPLATE

NEVER_ANSWERED = ["NamedFunction.name", "NamedTool.function", "NamedTool.type"]  # a call cannot be forced
EVERY = 1000  # requests between two looks at the server
LEAST_ANSWERED = 0.3
MAX_GROWTH_BYTES = 96 << 20  # of either process, once it has seen everything


@pytest.fixture(scope="module")
def fuzzed(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("fuzzed") / "log"
    flags = ["--max-running-requests", "12", "--served-model-name", "tiny", "--enable-metrics"]
    flags += ["--ragged-verify-mode", "compact", "--speculative-cost-table", "none"]
    flags += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3-thinking"]
    flags += [
        "--chat-template",
        CHAT_TEMPLATE + "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}",
    ]
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
    assert total.statuses.total() == num_requests
    assert total.statuses[200] >= LEAST_ANSWERED * num_requests
    assert sorted(every_field() - total.sent) == []
    # A field that is never answered needs an entry in e2e.fuzz.GRAMMAR: what its schema allows is refused.
    assert sorted(every_field() - total.answered) == NEVER_ANSWERED
    assert "Traceback" not in server.log
    return total


def test_2000_requests(fuzzed: Server) -> None:
    run(fuzzed, 2000, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_20000_requests(fuzzed: Server) -> None:
    run(fuzzed, 20_000, seed=2)
