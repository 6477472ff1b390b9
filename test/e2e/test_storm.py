"""A storm of requests of every kind over a KV pool that is too small for them: nothing is lost, everything ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import Server, check_statistics, frames, generate_body, running_server, speculative

NUM_CLIENTS = 32
POOL_TOKENS = 768
MAX_PROMPT, MAX_OUTPUT = 120, 160
PROBE = "the same before and after"


@pytest.fixture(scope="module")
def small_pool(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("storm") / "log"
    flags = ["--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "12"]
    flags += ["--chunked-prefill-size", "64", "--decode-log-interval", "1000"]
    with running_server(*speculative(*tiny_pair), *flags, log=log) as running:
        yield running


@dataclass
class Tally:
    """What one client saw, in numbers of engine requests (a call with n = 2 is two)."""

    finished: int = 0
    aborted: int = 0
    unknown: int = 0  # gone away in the middle: may have ended by itself just before
    maybe_unsent: int = 0  # gone away before the server can have seen the whole request
    refused: int = 0
    retractions: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.finished + other.finished,
            self.aborted + other.aborted,
            self.unknown + other.unknown,
            self.maybe_unsent + other.maybe_unsent,
            self.refused + other.refused,
            self.retractions + other.retractions,
            self.kinds + other.kinds,
        )


def random_sampling(draw: random.Random) -> dict[str, Any]:
    """Every sampling setting, in random company."""
    options: dict[str, Any] = {"max_new_tokens": draw.randint(1, MAX_OUTPUT)}
    options["temperature"] = draw.choice([0, 0, 0.7, 1.0, 1.5])
    choices: dict[str, Any] = {
        "top_p": draw.choice([0.3, 0.9]),
        "top_k": draw.choice([1, 5, 40]),
        "min_p": 0.05,
        "frequency_penalty": draw.choice([-0.5, 1.5]),
        "presence_penalty": draw.choice([-1.0, 1.0]),
        "repetition_penalty": draw.choice([0.8, 1.3]),
        "min_new_tokens": min(10, options["max_new_tokens"]),
        "logit_bias": {str(draw.randrange(4, 260)): draw.choice([-100.0, 3.0])},
        "stop": draw.choice(["e", ["ab", "\n"], "zzzz"]),
        "stop_token_ids": [draw.randrange(4, 260)],
        "ignore_eos": True,
        "sampling_seed": draw.randrange(2**40),
        "n": 2,
        "skip_special_tokens": False,
    }
    for name in draw.sample(sorted(choices), draw.randint(0, 6)):
        options[name] = choices[name]
    return options


def check_answer(answer: dict[str, Any], sampling: dict[str, Any], tally: Tally) -> None:
    """One ended answer, against what was asked."""
    meta, num_tokens = answer["meta_info"], len(answer["output_ids"])
    reason = meta["finish_reason"]
    tally.retractions += meta["num_retractions"]
    if reason["type"] == "abort":
        tally.aborted += 1
        return
    tally.finished += 1
    check_statistics(meta, num_tokens)
    if reason["type"] == "length":
        assert num_tokens == sampling["max_new_tokens"]
    else:
        assert max(sampling.get("min_new_tokens", 0), 1) <= num_tokens <= sampling["max_new_tokens"]
        if isinstance(reason["matched"], int):
            assert answer["output_ids"][-1] == reason["matched"]


class Client:
    """One request after another, each of a random kind."""

    def __init__(self, server: Server, number: int, seed: int) -> None:
        self._draw = random.Random(seed * 1000 + number)
        self._number = number
        self._http = httpx.Client(base_url=server.url, timeout=240, trust_env=False)
        self.tally = Tally()

    def run(self, num_calls: int) -> Tally:
        for i in range(num_calls):
            self._call(f"storm-{self._number}-{i}")
        self._http.close()
        return self.tally

    def _call(self, rid: str) -> None:
        draw = self._draw
        sampling = random_sampling(draw)
        text = "".join(chr(draw.randrange(32, 127)) for _ in range(draw.randint(1, MAX_PROMPT)))
        body: dict[str, Any] = {"text": text, "sampling_params": sampling, "rid": rid}
        if draw.random() < 0.3:
            body["speculation"] = {"mode": "off"}
        weights = {"whole": 5, "stream": 5, "chat": 3, "abort": 3, "leave": 3, "vanish": 2, "refused": 2}
        kind = draw.choices(list(weights), list(weights.values()))[0]
        self.tally.kinds[kind] += 1
        getattr(self, f"_{kind}")(body, sampling)

    def _whole(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        response = self._http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        answers = response.json()
        for answer in answers if isinstance(answers, list) else [answers]:
            check_answer(answer, sampling, self.tally)

    def _stream(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        response = self._http.post("/generate", json=body | {"stream": True})
        assert response.status_code == 200, response.text
        last = {frame.get("index", 0): frame for frame in frames(response.content)}
        assert len(last) == sampling.get("n", 1)
        for answer in last.values():
            check_answer(answer, sampling, self.tally)

    def _chat(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        chat = {
            "messages": [{"role": "user", "content": body["text"]}],
            "temperature": sampling["temperature"],
            "max_tokens": sampling["max_new_tokens"],
            "rid": body["rid"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = self._http.post("/v1/chat/completions", json=chat)
        assert response.status_code == 200, response.text
        *_, end, last = frames(response.content)
        num_tokens = last["usage"]["completion_tokens"]
        assert 1 <= num_tokens <= chat["max_tokens"]
        assert end["choices"][0]["finish_reason"] == "stop" or num_tokens == chat["max_tokens"]
        self.tally.finished += 1

    def _abort(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        raw = b""
        with self._http.stream("POST", "/generate", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            for chunk in response.iter_raw():
                if not raw:
                    order = {"rid": body["rid"] + "_" if "n" in sampling else body["rid"]}
                    assert self._http.post("/abort_request", json=order).status_code == 200
                raw += chunk
        last = {frame.get("index", 0): frame for frame in frames(raw)}
        for answer in last.values():
            check_answer(answer, sampling, self.tally)

    def _leave(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        """Goes away after the first frame: the request certainly was in the engine."""
        with self._http.stream("POST", "/generate", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            next(response.iter_raw())
        self.tally.unknown += sampling.get("n", 1)

    def _vanish(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        """Hangs up soon after sending."""
        self.tally.maybe_unsent += sampling.get("n", 1)
        try:
            response = self._http.post("/generate", json=body, timeout=self._draw.uniform(0.005, 0.3))
        except httpx.TimeoutException:
            return
        self.tally.maybe_unsent -= sampling.get("n", 1)
        answers = response.json()
        for answer in answers if isinstance(answers, list) else [answers]:
            check_answer(answer, sampling, self.tally)

    def _refused(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        wrong = self._draw.choice([{"temperature": -1}, {"max_new_tokens": POOL_TOKENS}, {"n": 1000}])
        response = self._http.post("/generate", json=body | {"sampling_params": {**sampling, **wrong}})
        assert response.status_code == 400, response.text
        assert next(iter(wrong)) in response.text
        self.tally.refused += 1


def storm(server: Server, num_requests: int, seed: int) -> None:
    """Lets the storm pass over the server and looks at what is left."""
    probe = generate_body(PROBE, max_new_tokens=60, ignore_eos=True)
    before_text = server.http.post("/generate", json=probe).json()["output_ids"]
    before = server.wait_idle()
    shares = [num_requests // NUM_CLIENTS + (i < num_requests % NUM_CLIENTS) for i in range(NUM_CLIENTS)]
    clients = [Client(server, i, seed) for i in range(NUM_CLIENTS)]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        tallies = list(pool.map(Client.run, clients, shares))
    seen = sum(tallies, Tally())
    after = server.wait_idle(120)
    assert sum(seen.kinds.values()) == num_requests
    assert all(
        seen.kinds[kind] > 0 for kind in ("whole", "stream", "chat", "abort", "leave", "vanish", "refused")
    )
    grown = {name: after[name] - before[name] for name in ("finished", "aborted", "num_retractions")}
    # Every request that was taken has ended exactly once, one way or the other.
    certain = seen.finished + seen.aborted + seen.unknown
    assert certain <= grown["finished"] + grown["aborted"] <= certain + seen.maybe_unsent
    assert seen.finished <= grown["finished"] <= seen.finished + seen.unknown + seen.maybe_unsent
    assert seen.aborted <= grown["aborted"] <= seen.aborted + seen.unknown + seen.maybe_unsent
    assert seen.aborted > 0
    assert after["aborted_mid_block"] > before["aborted_mid_block"]
    assert grown["num_retractions"] > 0, "the pool was not small enough for this test"
    assert 0 < seen.retractions <= grown["num_retractions"]
    assert server.health() == 200
    assert server.http.get("/health_generate").status_code == 200
    assert server.http.post("/generate", json=probe).json()["output_ids"] == before_text
    print(f"{seen} grown {grown}")


def test_storm_of_80(small_pool: Server) -> None:
    storm(small_pool, 80, seed=1)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_storm_of_500(small_pool: Server) -> None:
    storm(small_pool, 500, seed=2)
