"""Requests around the size of the whole KV pool, and a queue that is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server import LONG, Server, generate_body, running_server, send, speculative

POOL = 512
CASES = ["/generate", "/v1/completions"]


@pytest.fixture(scope="module")
def pool(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("pool") / "log"
    flags = ["--max-total-tokens", str(POOL + 15), "--max-running-requests", "4"]
    with running_server(*speculative(*tiny_pair), *flags, log=log) as running:
        yield running


@pytest.mark.parametrize("route", CASES)
def test_bigger_than_the_whole_pool(pool: Server, route: str) -> None:
    assert pool.http.get("/server_info").json()["max_total_num_tokens"] == POOL
    ids, room = [70] * 300, POOL - 300 + 1  # the last token of a request takes no place
    native = route == "/generate"
    name = "sampling_params.max_new_tokens" if native else "max_tokens"

    def ask(prompt: list[int], max_tokens: int) -> tuple[int, str]:
        body = generate_body(prompt, max_new_tokens=max_tokens, ignore_eos=True)
        if not native:
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        response = pool.http.post(route, json=body)
        return response.status_code, response.text

    status, text = ask(ids, room + 1)
    assert status == 400
    assert name in text and str(POOL) in text and "--max-total-tokens" in text
    status, text = ask([70] * (POOL + 1), 1)
    assert status == 400
    assert str(POOL) in text and "--max-total-tokens" in text
    status, text = ask(ids, room)
    assert status == 200, text
    assert '"length"' in text
    status, _ = ask([70] * POOL, 1)
    assert status == 200
    pool.wait_idle()


def test_two_that_fit_alone_and_not_together(pool: Server) -> None:
    """The younger gives way, and both end with the text they have alone."""
    before = pool.wait_idle()
    prompts = [[70 + i] * 140 for i in range(4)]
    alone = [pool.generate(ids, max_new_tokens=60, ignore_eos=True)["output_ids"] for ids in prompts]
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True},
    }
    together = pool.http.post("/generate", json=body).json()
    assert [answer["output_ids"] for answer in together] == alone
    after = pool.wait_idle()
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in together)
    assert retractions > 0
    assert after["num_retractions"] - before["num_retractions"] == retractions
    assert together[0]["meta_info"]["num_retractions"] == 0, "the oldest never gives way"


@pytest.mark.parametrize(
    "flags", [["--max-queued-requests", "2", "--max-running-requests", "1"]], ids=["queue"]
)
def test_full_queue(tiny_pair: tuple[Path, Path], tmp_path: Path, flags: list[str]) -> None:
    with running_server(*speculative(*tiny_pair), *flags, log=tmp_path / "log") as server:
        long = generate_body("wait", max_new_tokens=LONG, ignore_eos=True)
        connections = [send(server, "/generate", long)]
        server.wait_running(1)
        connections += [send(server, "/generate", long) for _ in range(2)]
        server.wait_running(1, 2)
        response = server.http.post("/generate", json=generate_body("no room"))
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        for connection in connections:
            connection.close()
        server.wait_idle()
        assert len(server.generate("room", max_new_tokens=3, ignore_eos=True)["output_ids"]) == 3
