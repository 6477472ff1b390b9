"""The API under a storm: whatever clients do, every request ends and nothing stays behind."""

from __future__ import annotations

import asyncio
import time

from fake_server import FakeServer
from storm import storm
from tiny_models import VOCAB_SIZE, write_tokenizer

DRAFT = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "none")


def test_storm_leaves_nothing_behind(tmp_path):
    with FakeServer(write_tokenizer(tmp_path), *DRAFT, "--max-running-requests", "16") as server:
        ways = asyncio.run(
            storm(server.url, num_requests=250, seed=11, vocab_size=VOCAB_SIZE, max_new_tokens=60)
        )
        assert sum(ways.values()) == 250
        assert ways["answered"] > 40
        assert ways["streamed"] > 40
        assert ways["refused 400"] > 5
        assert ways["left"] > 3
        deadline = time.monotonic() + 3
        while server.client.get("/server_info").json()["num_requests_in_flight"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.state["num_running_reqs"] == 0
        assert server.client.get("/health_generate").status_code == 200
        assert "Traceback" not in server.log
