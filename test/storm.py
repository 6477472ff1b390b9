"""Many clients at once, most of them unpleasant: random settings, aborts, disconnects, duplicate ids, bad input.

    result = asyncio.run(storm(url, num_requests=500, seed=1, vocab_size=260, max_new_tokens=40))

Every request has to end with tokens and a reason, or with an error and a reason; `storm` fails on anything
else. What the caller checks afterwards is the server: its counters and its health.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx

WORDS = ["def", " x", "(", ")", ":\n", "    return", " é", "日", "🎉", " 1", "+", "#", "\n\n"]


def random_request(rng: random.Random, vocab_size: int, max_new_tokens: int) -> tuple[str, dict[str, Any]]:
    """A path and a body that is usually good."""
    sampling: dict[str, Any] = {"ignore_eos": rng.random() < 0.5, "temperature": rng.choice([0, 0.7, 1, 1.3])}
    options: dict[str, Any] = {
        "top_k": rng.choice([-1, 1, 5]),
        "top_p": rng.choice([1, 0.9, 0.1]),
        "min_p": rng.choice([0, 0.1]),
        "repetition_penalty": rng.choice([1, 1.2]),
        "frequency_penalty": rng.choice([0, 0.5, -0.5]),
        "presence_penalty": rng.choice([0, 1]),
        "logit_bias": {str(rng.randrange(vocab_size)): rng.choice([-100, 2])},
        "stop": rng.choice([["\n\n"], "x", ["é", "(x"]]),
        "stop_token_ids": [rng.randrange(vocab_size)],
        "n": rng.choice([1, 2, 3]),
        "skip_special_tokens": False,
    }
    for name in rng.sample(sorted(options), rng.randrange(4)):
        sampling[name] = options[name]
    num_new = rng.randint(1, max_new_tokens)
    speculation = rng.choice([None, None, None, {"mode": "off"}, {"mode": "static", "max_verify_len": 1}])
    text = "".join(rng.choices(WORDS, k=rng.randint(1, 30)))
    common = {"stream": rng.random() < 0.5, "speculation": speculation}
    asks, start = num_new % 3 == 0, -(num_new % 2)  # some want log-probabilities, of the prompt too
    native = {"return_logprob": asks, "logprob_start_len": start, "top_logprobs_num": 2 * asks}
    counted = {"logprobs": num_new % 4 if asks else None}
    match rng.choice(["generate", "ids", "completions", "chat"]):
        case "generate":
            text_or_batch = text if rng.random() < 0.7 else [text, text[::-1]]
            return "/generate", {
                "text": text_or_batch,
                "sampling_params": sampling
                | {"max_new_tokens": num_new, "min_new_tokens": rng.choice([0, num_new // 2])},
                **common,
                **native,
            }
        case "ids":
            ids = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))]
            seeded = {"sampling_seed": rng.randrange(1000)}
            return "/generate", {
                "input_ids": ids,
                "sampling_params": sampling | seeded | {"max_new_tokens": num_new},
                **common,
                **native,
            }
        case "completions":
            return "/v1/completions", {"prompt": text, "max_tokens": num_new, **sampling, **common, **counted}
        case _:
            messages = [{"role": "user", "content": text}]
            chat = {"messages": messages, "max_tokens": num_new, "logprobs": asks}
            return "/v1/chat/completions", {**chat, **sampling, **common}


def spoil(rng: random.Random, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body with one thing wrong."""
    wrong: dict[str, Any] = rng.choice(
        [
            {"no_such_field": 1},
            {"stream": "yes"},
            {"speculation": {"mode": "x"}},
            {"logprobs": 3, "return_logprob": 1},
        ]
    )
    return body | wrong


def _check_answer(path: str, response: httpx.Response) -> None:
    answers = response.json()
    if path == "/generate":
        for answer in answers if isinstance(answers, list) else [answers]:
            assert answer["meta_info"]["finish_reason"]["type"] in {"stop", "length", "abort"}, answer
            ids = [entry[1] for entry in answer["meta_info"].get("output_token_logprobs", [])]
            assert ids in ([], answer["output_ids"])
    else:
        assert all(choice["finish_reason"] for choice in answers["choices"]), answers
        assert answers["usage"]["completion_tokens"] >= 0


def _check_stream(path: str, content: bytes) -> str:
    *events, done, rest = content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    bodies = [json.loads(event.removeprefix(b"data: ")) for event in events]
    if any("error" in body for body in bodies):
        assert bodies[-1]["error"]["message"]
        return "error frame"
    if path == "/generate":
        assert bodies[-1]["meta_info"]["finish_reason"]
    else:
        assert any(choice["finish_reason"] for body in bodies for choice in body["choices"])
    return "streamed"


async def _one(client: httpx.AsyncClient, rng: random.Random, vocab_size: int, max_new_tokens: int) -> str:
    path, body = random_request(rng, vocab_size, max_new_tokens)
    fate = rng.choices(["stay", "leave", "abort", "spoil", "duplicate"], [70, 12, 8, 6, 4])[0]
    rid = f"storm-{rng.randrange(10**9)}" if fate != "duplicate" else "storm-same"
    if fate != "stay":
        body["rid"] = rid
    if fate == "spoil":
        body = spoil(rng, path, body)
    if fate == "leave":
        try:
            await client.post(path, json=body, timeout=rng.uniform(0.001, 0.1))
        except httpx.TimeoutException:
            return "left"
        return "answered before it left"
    if fate == "abort":
        request = asyncio.ensure_future(client.post(path, json=body))
        await asyncio.sleep(rng.uniform(0, 0.1))
        assert (await client.post("/abort_request", json={"rid": rid})).status_code == 200
        response = await request
    else:
        response = await client.post(path, json=body)
    if response.status_code == 200:
        assert fate != "spoil", body
        if body["stream"]:
            return _check_stream(path, response.content)
        _check_answer(path, response)
        return "aborted" if "abort" in response.text[:4000] and fate == "abort" else "answered"
    assert response.status_code in {400, 503}, (response.status_code, response.text, body)
    assert response.json().get("error") or response.json().get("message")
    return f"refused {response.status_code}"


async def storm(
    url: str,
    *,
    num_requests: int,
    seed: int,
    vocab_size: int,
    max_new_tokens: int,
    concurrency: int = 48,
    timeout_s: float = 120,
) -> Counter[str]:
    """How many requests ended in which way."""
    rng = random.Random(seed)
    ways: Counter[str] = Counter()
    slots = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=2 * concurrency)

    async def run(own_seed: int) -> None:
        async with slots:
            ways[await _one(client, random.Random(own_seed), vocab_size, max_new_tokens)] += 1

    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        await asyncio.gather(*(run(rng.randrange(2**32)) for _ in range(num_requests)))
    return ways
