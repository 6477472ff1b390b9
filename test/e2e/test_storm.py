"""A storm of requests of every kind over a KV pool that is too small for them: nothing is lost, everything ends."""

from __future__ import annotations

import dataclasses
import json
import random
import re
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
POOL_TOKENS, CONTEXT = 384, 320
SHORT_OUTPUT, LONG_OUTPUT = 24, 120
PROBE = "the same before and after"
FIRST_ID, END_ID = 4, 260  # of the tokens that a prompt is made of
PREFIXES = [[FIRST_ID + (seed * (7 + i)) % 250 for i in range(16 * seed)] for seed in (1, 2, 3, 5)]
SPECULATIONS: list[dict[str, Any]] = [
    {"mode": "off"},
    {"mode": "static"},
    {"mode": "adaptive"},
    {"mode": "static", "max_verify_len": 2},
    {"mode": "adaptive", "max_verify_len": 4},
]
# Some come to an end by themselves, some go on.
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(yes|no|maybe)( (yes|no)){2,4}!"},
    {"regex": "[ -~]{1,40}"},
    {"regex": "[a-z ]*"},
    {"json_schema": json.dumps({"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 5})},
    {"json_schema": json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}})},
    {"ebnf": 'root ::= "<" item ("," item)* ">"\nitem ::= [a-f] [a-f]'},
    {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
]
GRAMMAR_FIELDS = sorted({name for grammar in GRAMMARS for name in grammar})
BAD_GRAMMARS: list[dict[str, Any]] = [{"regex": "(a"}, {"ebnf": "root ::= other"}]
TOKENS_PER_TIE = 10_000


KINDS = {
    "compact, overlapped": ["--ragged-verify-mode", "compact", "--enable-overlap-schedule"],
    "compact": ["--ragged-verify-mode", "compact"],
    "static": ["--ragged-verify-mode", "static"],
}


@pytest.fixture(
    scope="module",
    params=[
        kind if kind == "compact, overlapped" else pytest.param(kind, marks=pytest.mark.full)
        for kind in KINDS
    ],
)
def small_pool(
    request: pytest.FixtureRequest, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("storm") / "log"
    flags = ["--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "16"]
    flags += ["--context-length", str(CONTEXT), *KINDS[request.param]]
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
    constrained: int = 0  # of those finished, with a grammar
    retractions: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    decided: list[tuple[dict[str, Any], list[list[int]]]] = field(default_factory=list)  # bodies, outputs

    def __add__(self, other: Tally) -> Tally:
        names = [item.name for item in dataclasses.fields(Tally)]
        return Tally(*(getattr(self, name) + getattr(other, name) for name in names))


def random_ids(draw: random.Random) -> list[int]:
    """A prompt, in three of four cases with a beginning that others have too."""
    tail = [draw.randrange(FIRST_ID, END_ID) for _ in range(draw.randint(1, 40))]
    return draw.choice(PREFIXES) + tail if draw.random() < 0.75 else tail


def random_sampling(draw: random.Random, num_prompt_tokens: int) -> dict[str, Any]:
    """Every sampling setting, in random company. Some requests go to the very end of the context."""
    most = draw.choice([SHORT_OUTPUT, LONG_OUTPUT])
    num_tokens = CONTEXT - num_prompt_tokens if draw.random() < 0.03 else draw.randint(1, most)
    options: dict[str, Any] = {"max_new_tokens": num_tokens}
    options["temperature"] = draw.choice([0, 0, 0.7, 1.0, 1.5])
    choices: dict[str, Any] = {
        "top_p": draw.choice([0.3, 0.9]),
        "top_k": draw.choice([1, 5, 40]),
        "min_p": 0.05,
        "frequency_penalty": draw.choice([-0.5, 1.5]),
        "presence_penalty": draw.choice([-1.0, 1.0]),
        "repetition_penalty": draw.choice([0.8, 1.3]),
        "min_new_tokens": min(10, options["max_new_tokens"]),
        "logit_bias": {str(draw.randrange(FIRST_ID, END_ID)): draw.choice([-100.0, 3.0])},
        "stop": draw.choice(["e", ["ab", "\n"], "zzzz"]),
        "stop_token_ids": [draw.randrange(FIRST_ID, END_ID)],
        "ignore_eos": True,
        "sampling_seed": draw.randrange(2**40),
        "n": 2,
        "skip_special_tokens": False,
    }
    for name in draw.sample(sorted(choices), draw.randint(0, 6)):
        options[name] = choices[name]
    if draw.random() < 0.2:
        options |= draw.choice(GRAMMARS)
        options.pop("min_new_tokens", None)  # a grammar may allow fewer, and that is an error
    return options


def check_answer(answer: dict[str, Any], sampling: dict[str, Any], tally: Tally) -> None:
    """One ended answer, against what was asked."""
    meta, num_tokens = answer["meta_info"], len(answer["output_ids"])
    reason = meta["finish_reason"]
    tally.retractions += meta["num_retractions"]
    if reason["type"] == "abort":
        tally.aborted += 1
        return
    tally.constrained += any(name in sampling for name in GRAMMAR_FIELDS)
    if "regex" in sampling and reason == {"type": "stop", "matched": None}:
        assert re.fullmatch(sampling["regex"], answer["text"])
    tally.finished += 1
    check_statistics(meta, num_tokens)
    if "output_token_logprobs" in meta:
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
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
        is_static = server.state()["ragged_verify_mode"] == "static"  # such a server plans for nobody
        self._speculations = [one for one in SPECULATIONS if not is_static or one["mode"] != "adaptive"]
        self._http = httpx.Client(base_url=server.url, timeout=240, trust_env=False)
        self.tally = Tally()

    def run(self, num_calls: int) -> Tally:
        for i in range(num_calls):
            self._call(f"storm-{self._number}-{i}")
        self._http.close()
        return self.tally

    def _call(self, rid: str) -> None:
        draw = self._draw
        ids = random_ids(draw)
        sampling = random_sampling(draw, len(ids))
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "rid": rid}
        if draw.random() < 0.4:
            body["speculation"] = draw.choice(self._speculations)
        if draw.random() < 0.15:
            body |= {"return_logprob": True, "top_logprobs_num": draw.randint(0, 5)}
        weights = {"whole": 6, "stream": 6, "chat": 3, "abort": 3, "leave": 3, "vanish": 2, "refused": 2}
        weights["twin"] = 1
        kind = draw.choices(list(weights), list(weights.values()))[0]
        self.tally.kinds[kind] += 1
        getattr(self, f"_{kind}")(body, sampling)

    def _keep(self, body: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        """Remembers what has to come out again when the request is alone."""
        sampling = body["sampling_params"]
        is_decided = sampling["temperature"] == 0 or "sampling_seed" in sampling
        if is_decided and all(a["meta_info"]["finish_reason"]["type"] != "abort" for a in answers):
            self.tally.decided.append((body, [answer["output_ids"] for answer in answers]))

    def _whole(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        response = self._http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        answers = as_list(response.json())
        for answer in answers:
            check_answer(answer, sampling, self.tally)
        self._keep(body, answers)

    def _stream(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        response = self._http.post("/generate", json=body | {"stream": True})
        assert response.status_code == 200, response.text
        self._check_frames(response.content, body)

    def _check_frames(self, raw: bytes, body: dict[str, Any]) -> None:
        last = {frame.get("index", 0): frame for frame in frames(raw)}
        sampling = body["sampling_params"]
        assert sorted(last) == list(range(sampling.get("n", 1)))
        for answer in last.values():
            check_answer(answer, sampling, self.tally)
        self._keep(body, [last[i] for i in sorted(last)])

    def _twin(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        """A second request of the same id, while the first is most likely in flight: that one must not notice."""
        raw, second = b"", None
        with self._http.stream("POST", "/generate", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            for chunk in response.iter_raw():
                raw += chunk
                if second is None:
                    second = self._http.post("/generate", json=body)
        self._check_frames(raw, body)
        assert second is not None
        if second.status_code == 400:
            assert "rid" in second.text
            self.tally.kinds["twin refused"] += 1
        else:
            for answer in as_list(second.json()):
                check_answer(answer, sampling, self.tally)

    def _chat(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        chat = {
            "messages": [{"role": "user", "content": f"{body['rid']}: what comes next?"}],
            "temperature": sampling["temperature"],
            "max_tokens": min(sampling["max_new_tokens"], LONG_OUTPUT),
            "rid": body["rid"],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: sampling[name] for name in GRAMMAR_FIELDS if name in sampling},
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
        for answer in as_list(response.json()):
            check_answer(answer, sampling, self.tally)

    def _refused(self, body: dict[str, Any], sampling: dict[str, Any]) -> None:
        too_long = CONTEXT - len(body["input_ids"]) + 1
        bad = [{"temperature": -1}, {"max_new_tokens": too_long}, {"n": 1000}, *BAD_GRAMMARS]
        wrong = self._draw.choice(bad)
        settings = {key: value for key, value in sampling.items() if key not in GRAMMAR_FIELDS}
        if wrong in BAD_GRAMMARS:  # found where it is compiled, when the request has been taken
            self.tally.aborted += sampling.get("n", 1)
        response = self._http.post("/generate", json=body | {"sampling_params": settings | wrong})
        assert response.status_code == 400, response.text
        assert next(iter(wrong)) in response.text
        self.tally.refused += 1


def as_list(answers: Any) -> list[dict[str, Any]]:
    """One answer, or several."""
    return answers if isinstance(answers, list) else [answers]


def check_alone(server: Server, decided: list[tuple[dict[str, Any], list[list[int]]]]) -> None:
    """The same requests one at a time: the same tokens, up to one near-tie in ten thousand.

    Over a server of penalties and seeds there is no plain run whose two best logits could be looked at.
    """
    num_tokens = num_different = 0
    for body, outputs in decided:
        again = [answer["output_ids"] for answer in as_list(server.http.post("/generate", json=body).json())]
        num_tokens += sum(map(len, outputs))
        num_different += again != outputs
    print(f"alone: {len(decided)} requests, {num_tokens} tokens, {num_different} different")
    assert num_different <= 1 + num_tokens // TOKENS_PER_TIE


def storm(server: Server, num_requests: int, seed: int, num_again: int) -> None:
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
    assert seen.kinds.total() - seen.kinds["twin refused"] == num_requests
    assert all(
        seen.kinds[kind] > 0 for kind in ("whole", "stream", "chat", "abort", "leave", "vanish", "refused")
    )
    grown = {name: after[name] - before[name] for name in ("finished", "aborted", "num_retractions")}
    # Every request that was taken has ended exactly once, one way or the other.
    certain = seen.finished + seen.aborted + seen.unknown
    assert certain <= grown["finished"] + grown["aborted"] <= certain + seen.maybe_unsent
    assert seen.finished <= grown["finished"] <= seen.finished + seen.unknown + seen.maybe_unsent
    assert seen.aborted <= grown["aborted"] <= seen.aborted + seen.unknown + seen.maybe_unsent
    assert seen.aborted > 0 and seen.constrained > num_requests // 20
    assert after["aborted_mid_block"] > before["aborted_mid_block"]
    assert grown["num_retractions"] > 0, "the pool was not small enough for this test"
    assert 0 < seen.retractions <= grown["num_retractions"]
    assert server.health() == 200
    assert server.http.get("/health_generate").status_code == 200
    assert server.http.post("/generate", json=probe).json()["output_ids"] == before_text
    print(f"{dataclasses.replace(seen, decided=[])} grown {grown}")
    draw = random.Random(seed)
    check_alone(server, draw.sample(seen.decided, min(num_again, len(seen.decided))))
    server.wait_idle()


def test_storm_of_500(small_pool: Server) -> None:
    storm(small_pool, 500, seed=1, num_again=40)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_storm_of_5000(small_pool: Server) -> None:
    storm(small_pool, 5000, seed=2, num_again=400)
