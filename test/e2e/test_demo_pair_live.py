"""The shipped pair, live: blocks of several accepted tokens, and stop strings that begin and end inside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.server import Server, check_statistics, frames, generate_body
from flashspark.demo import DEMO_MODELS
from flashspark.text import TextTokenizer

PROMPT = "def read_lines(path):\n    "
NUM_TOKENS = 160


@dataclass
class Known:
    """A greedy output and where its verify steps began."""

    ids: list[int]
    text: str
    starts: list[int]  # character offset at which each token's text begins, then the length
    blocks: list[tuple[int, int]]  # token ranges of the verify steps


@pytest.fixture(scope="module")
def known(demo: Server) -> Known:
    tokenizer = TextTokenizer.load(Path(DEMO_MODELS["demo"]))
    body = generate_body(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, stream=True)
    got = frames(demo.http.post("/generate", json=body).content)
    ends = [len(frame["output_ids"]) for frame in got]
    ids, text = got[-1]["output_ids"], got[-1]["text"]
    starts = [len(tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
    assert text == tokenizer.decode(ids)
    assert text.isascii(), "offsets of tokens are offsets of characters only without split characters"
    return Known(ids, text, starts, list(zip([0, *ends], ends, strict=False)))


def straddling(known: Known, kind: str) -> str:
    """A stop string that begins and ends in the middle of neighbouring tokens: of one block, or of two."""
    for (a, b), (c, _) in zip(known.blocks, known.blocks[1:], strict=False):
        # The token before the border and the one behind it; inside a block any two neighbours.
        borders = [b] if kind == "two blocks" else list(range(a + 1, b))
        for border in borders:
            assert kind != "two blocks" or c == b
            before, after = known.starts[border - 1], known.starts[border + 1]
            start, end = max(before, known.starts[border] - 2), min(after, known.starts[border] + 2)
            stop = known.text[start:end]
            if border > 8 and end - start >= 3 and known.text.find(stop) == start and stop.strip():
                return stop
    raise AssertionError(f"no stop string for {kind} in {known.text!r}")


def expectation(known: Known, stop: str) -> tuple[str, int]:
    """The text before the stop string, and how many tokens it takes to complete it."""
    start = known.text.index(stop)
    return known.text[:start], next(i for i, offset in enumerate(known.starts) if offset >= start + len(stop))


@pytest.fixture(autouse=True)
def nothing_left_behind(demo: Server) -> Iterator[None]:
    yield
    demo.wait_idle()


def test_blocks_are_accepted(demo: Server) -> None:
    answer = demo.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    meta = answer["meta_info"]
    check_statistics(meta, NUM_TOKENS)
    assert meta["spec_accept_length"] > 1.5
    assert len(meta["spec_correct_drafts_histogram"]) == 8
    plain = demo.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, speculation={"mode": "off"})
    assert plain["output_ids"] == answer["output_ids"]
    check_statistics(plain["meta_info"], NUM_TOKENS)


@pytest.mark.parametrize("kind", ["one block", "two blocks"])
@pytest.mark.parametrize("mode", ["static", "off"])
def test_stop_string_straddles(demo: Server, known: Known, kind: str, mode: str) -> None:
    stop = straddling(known, kind)
    text, num_tokens = expectation(known, stop)
    options: dict[str, Any] = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stop": [stop, "\x00 never"],
        "extra_body": {"ignore_eos": True, "speculation": {"mode": mode}},
    }
    client = demo.openai()
    whole = client.completions.create(**options)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "stop")
    assert whole.choices[0].model_extra == {"matched_stop": stop}
    assert whole.usage is not None and whole.usage.completion_tokens == num_tokens
    shown, used = "", None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        shown += "".join(choice.text for choice in chunk.choices)
        assert text.startswith(shown), "part of the stop string was shown"
        used = chunk.usage or used
    assert shown == text
    assert used is not None and used.completion_tokens == num_tokens
    body = generate_body(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, stream=True, stop=stop)
    native = frames(demo.http.post("/generate", json=body | {"speculation": {"mode": mode}}).content)
    assert all(text.startswith(frame["text"]) for frame in native)
    assert native[-1]["text"] == text
    assert native[-1]["output_ids"] == known.ids[:num_tokens]
    assert native[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    check_statistics(native[-1]["meta_info"], num_tokens)


def test_a_beginning_of_a_stop_string_is_held_and_then_shown(demo: Server, known: Known) -> None:
    """A stop string that is begun and never completed costs nothing but a delay."""
    begun = known.text[40:44] + "\x00"
    body = generate_body(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, stream=True, stop=begun)
    got = frames(demo.http.post("/generate", json=body).content)
    assert got[-1]["text"] == known.text
    assert got[-1]["output_ids"] == known.ids


def test_min_new_tokens_lets_a_stop_pass(demo: Server, known: Known) -> None:
    stop = straddling(known, "one block")
    _, num_tokens = expectation(known, stop)
    answer = demo.generate(
        PROMPT, max_new_tokens=num_tokens + 8, min_new_tokens=num_tokens + 1, stop=stop, ignore_eos=True
    )
    assert answer["output_ids"][:num_tokens] == known.ids[:num_tokens]
    assert len(answer["output_ids"]) > num_tokens


def test_chat_with_the_official_client(demo: Server) -> None:
    tokenizer = TextTokenizer.load(Path(DEMO_MODELS["demo"]))
    messages: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    native = demo.generate(ids, max_new_tokens=60)
    client: openai.OpenAI = demo.openai()
    options: dict[str, Any] = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == native["text"]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.usage.completion_tokens == len(native["output_ids"])
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == native["text"]


def test_two_streamed_choices_follow_their_seed(demo: Server) -> None:
    client = demo.openai()
    options: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "seed": 5, "n": 2}
    whole = client.completions.create(**options)
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]


def test_seed_alone_and_among_eight_others(demo: Server) -> None:
    """Sampled, with blocks that are accepted in part: draws depend on the request alone."""
    options = {"max_new_tokens": 48, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
    alone = demo.generate(PROMPT, sampling_seed=77, **options)
    assert alone["meta_info"]["spec_num_correct_drafts"] > 0
    assert demo.generate(PROMPT, sampling_seed=77, **options)["output_ids"] == alone["output_ids"]
    assert demo.generate(PROMPT, sampling_seed=78, **options)["output_ids"] != alone["output_ids"]
    texts = [f"# file {i}\nimport os\n" for i in range(8)]
    samplings = [{**options, "max_new_tokens": 64, "sampling_seed": i} for i in range(8)]
    body = {"text": [*texts, PROMPT], "sampling_params": [*samplings, {**options, "sampling_seed": 77}]}
    response = demo.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    batched = response.json()
    assert batched[8]["output_ids"] == alone["output_ids"]
    assert batched[8]["meta_info"]["spec_verify_ct"] == alone["meta_info"]["spec_verify_ct"]
    streamed = frames(demo.http.post("/generate", json=body | {"stream": True}).content)
    last = [frame for frame in streamed if frame["index"] == 8][-1]
    assert last["output_ids"] == alone["output_ids"]
