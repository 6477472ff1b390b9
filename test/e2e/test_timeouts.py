"""Requests that take longer than the environment allows: 503 with the reason, streamed or not, and a free engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.server import LONG, frames, generate_body, running_server, send, speculative

WAITED, RAN = "it may wait for a row 0.3 s", "it may run 1 s"


def test_requests_that_take_too_long(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "0.3")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "1")
    flags = ["--max-running-requests", "1", "--skip-server-warmup"]  # a warm-up could be too slow, too
    with running_server(*speculative(*tiny_pair), *flags, log=tmp_path / "log") as server:
        state = server.state()
        assert (state["req_waiting_timeout"], state["req_running_timeout"]) == (0.3, 1.0)
        body = generate_body("long", max_new_tokens=LONG, ignore_eos=True)
        blocker = send(server, "/generate", body | {"stream": True})
        server.wait_running(1)
        queued = server.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": LONG, "ignore_eos": True}
        )
        assert queued.status_code == 503
        # Where this client was slow to ask, it found the row free again, and was too long for that.
        assert WAITED in queued.json()["message"] or RAN in queued.json()["message"]
        assert queued.headers["retry-after"] == "1"
        raw = b""
        while b"[DONE]" not in raw:
            raw += blocker.recv(1 << 16)
        assert RAN.encode() in raw
        whole = server.http.post("/generate", json=body)
        assert (whole.status_code, whole.json()["code"]) == (503, 503)
        assert RAN in whole.json()["message"]
        streamed = server.http.post("/generate", json=body | {"stream": True})
        assert streamed.status_code == 200
        *_, last = frames(streamed.content)
        assert last["error"]["code"] == 503 and RAN in last["error"]["message"]
        blocker.close()
        assert server.wait_idle()["aborted"] == 4
        assert server.generate("short", max_new_tokens=3, ignore_eos=True)["output_ids"]
