"""The official `openai` client against a live server: every shape it parses, every count, every error it raises."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from e2e.server import CONTEXT, Server
from flashspark.text import TextTokenizer
from tiny_models import ENDOFTEXT_ID, IM_END_ID, VOCAB_SIZE

PROMPT = "def add(a, b):"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wer bist du? äöü €"},
]
NO_EOS = {str(ENDOFTEXT_ID): -10000, str(IM_END_ID): -10000}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.openai()


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: tuple[Path, Path]) -> TextTokenizer:
    return TextTokenizer.load(tiny_pair[0])


@pytest.fixture(autouse=True)
def nothing_left_behind(server: Server) -> Any:
    yield
    server.wait_idle()


def test_completion_counts_are_the_tokenizers(
    server: Server, client: openai.OpenAI, tokenizer: TextTokenizer
) -> None:
    native = server.generate(PROMPT, max_new_tokens=48, ignore_eos=True)
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=48, temperature=0, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert len(native["output_ids"]) == 48
    assert choice.text == tokenizer.decode(native["output_ids"]) == native["text"]
    assert choice.finish_reason == "length"
    assert (choice.index, answer.object, answer.model) == (0, "text_completion", "tiny")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == len(native["output_ids"])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 48


def test_completion_stream_is_the_same_text_and_usage(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    *content, last = chunks
    assert "".join(chunk.choices[0].text for chunk in content) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in content[:-1]] == [None] * (len(content) - 1)
    assert content[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in content)
    assert last.choices == []
    assert last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_no_usage_frame_unless_asked(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


def test_continuous_usage_counts_up_to_the_total(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        extra_body={"ignore_eos": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-2:] == [12, 12]  # the last content frame, then the frame of the whole call


def test_chat_counts_are_the_templates_tokens(
    server: Server, client: openai.OpenAI, tokenizer: TextTokenizer
) -> None:
    rendered = tokenizer.apply_chat_template(MESSAGES)
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    native = server.generate(ids, max_new_tokens=30)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == native["text"]
    assert choice.finish_reason == native["meta_info"]["finish_reason"]["type"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == len(native["output_ids"])


def test_chat_stream_order(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    first, *middle, end, used = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in middle)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in [first, *middle]] == [None] * (len(middle) + 1)
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason
    assert not end.choices[0].delta.content
    assert used.choices == [] and used.usage is not None and whole.usage is not None
    assert used.usage.total_tokens == whole.usage.total_tokens
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_max_completion_tokens_beats_max_tokens_and_none_runs_to_the_end(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "logit_bias": NO_EOS}
    short = client.chat.completions.create(**options, max_tokens=9, max_completion_tokens=3)
    assert short.usage is not None and short.usage.completion_tokens == 3
    long_turn = [{"role": "user", "content": "x" * (CONTEXT - 120)}]
    options["messages"] = long_turn
    rest = client.chat.completions.create(**options)
    assert rest.usage is not None and rest.usage.total_tokens == CONTEXT
    assert rest.choices[0].finish_reason == "length"


def test_default_is_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, logit_bias=NO_EOS)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_two_choices(server: Server, client: openai.OpenAI, stream: bool) -> None:
    native = server.generate(PROMPT, max_new_tokens=24, temperature=1, sampling_seed=7, n=2, ignore_eos=True)
    expected = [answer["text"] for answer in native]
    assert expected[0] != expected[1]
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 24,
        "seed": 7,
        "n": 2,
        "extra_body": {"ignore_eos": True},
    }
    texts, ends = ["", ""], {}
    if stream:
        used = None
        for chunk in client.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ):
            used = chunk.usage or used
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] = choice.finish_reason
    else:
        answer = client.completions.create(**options)
        used = answer.usage
        for choice in answer.choices:
            texts[choice.index] = choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == expected
    assert ends == {0: "length", 1: "length"}
    assert used is not None
    assert (used.prompt_tokens, used.completion_tokens) == (len(PROMPT), 48)


def test_list_of_prompts_and_ids(server: Server, client: openai.OpenAI, tokenizer: TextTokenizer) -> None:
    texts = ["one", "and two", "three, then"]
    ids = [tokenizer.encode(text) for text in texts]
    expected = [server.generate(text, max_new_tokens=10)["text"] for text in texts]
    counts = [server.generate(text, max_new_tokens=10)["meta_info"]["completion_tokens"] for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=10, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == sum(counts)
    one = client.completions.create(model="tiny", prompt=ids[1], max_tokens=10, temperature=0)
    assert [choice.text for choice in one.choices] == [expected[1]]


def test_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0)
    echoed = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, echo=True)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text


def test_seed_alone_and_among_eight_others(server: Server, client: openai.OpenAI) -> None:
    def ask(seed: int, stream: bool = False, prompt: str = PROMPT, max_tokens: int = 40) -> str:
        options: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": 1,
            "extra_body": {"ignore_eos": True},
        }
        if not stream:
            return client.completions.create(**options).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))

    alone = ask(1234)
    assert ask(1234) == alone
    assert ask(1234, stream=True) == alone
    assert ask(1235) != alone
    with ThreadPoolExecutor(10) as pool:
        others = [pool.submit(ask, i, i % 2 == 0, f"other {i}", 250) for i in range(8)]
        server.wait_running(8)
        batched = [pool.submit(ask, 1234, stream) for stream in (False, True)]
        assert [future.result() for future in batched] == [alone, alone]
        assert server.state()["num_running_reqs"] >= 1, "the others have to be there all the while"
        assert len({future.result() for future in others}) == 8


def test_logit_bias_and_stop_reasons(client: openai.OpenAI, tokenizer: TextTokenizer) -> None:
    (letter,) = tokenizer.encode("k")
    forced = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, logit_bias={str(letter): 10000}
    )
    assert forced.choices[0].text == "k" * 9
    ended = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, logit_bias={str(IM_END_ID): 10000}
    )
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert ended.usage is not None and ended.usage.completion_tokens == 1
    stopped = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=9,
        logit_bias={str(letter): 10000},
        extra_body={"stop_token_ids": [letter], "min_tokens": 0},
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert stopped.choices[0].model_extra == {"matched_stop": letter}


def test_stop_string_of_several_tokens(client: openai.OpenAI, tokenizer: TextTokenizer) -> None:
    (letter,) = tokenizer.encode("k")
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20}
    options["logit_bias"] = {str(letter): 10000}
    for stream in (False, True):
        answer = client.completions.create(**options, stop=["zz", "kkkkk"], stream=stream)
        text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
        assert text == "", "the first five letters are the stop string"


def test_penalties_reach_the_engine_and_do_not_depend_on_speculation(
    server: Server, client: openai.OpenAI, tokenizer: TextTokenizer
) -> None:
    letters = tokenizer.encode("abcd")
    bias = {str(letter): 5000 for letter in letters}

    def ask(mode: str, **penalties: float) -> str:
        answer = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=60,
            temperature=0,
            logit_bias=bias,
            extra_body={
                "speculation": {"mode": mode},
                "repetition_penalty": penalties.pop("repetition_penalty", 1),
            },
            **penalties,
        )
        return answer.choices[0].text

    plain = ask("static")
    even = ask("static", frequency_penalty=2)
    assert set(plain) <= set("abcd") and set(even) == set("abcd")
    spread = Counter(even)
    # Each use costs two units: counts differ by no more than the spread of the logits.
    assert max(spread.values()) - min(spread.values()) <= 6
    assert even != plain
    assert ask("off", frequency_penalty=2) == even
    assert ask("off", presence_penalty=2) == ask("static", presence_penalty=2)
    bias = {}
    free = ask("static")
    repeated = ask("static", repetition_penalty=1.9)
    assert ask("off", repetition_penalty=1.9) == repeated
    assert repeated != free


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert model.model_extra is not None and model.model_extra["max_model_len"] == CONTEXT
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "x" * CONTEXT}, "prompt", "context_length_exceeded"),
        ({"prompt": [VOCAB_SIZE]}, "prompt", "invalid_value"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "invalid_value"),
        ({"logprobs": 1000}, "logprobs", "invalid_value"),
        ({"suffix": "x"}, "suffix", "unsupported_value"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field", "unknown_field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_are_the_clients_exceptions(
    client: openai.OpenAI, options: dict[str, Any], param: str, code: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": "tiny", "prompt": PROMPT, "stream": stream, **options})
        assert (caught.value.param, caught.value.code) == (param, code)
        assert param in caught.value.message


def test_async_client(server: Server) -> None:
    async def ask() -> list[str]:
        http = httpx.AsyncClient(trust_env=False, timeout=60)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="x", http_client=http, max_retries=0
        ) as client:
            texts = [""] * 6

            async def one(i: int) -> None:
                stream = await client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": f"number {i}"}],
                    max_tokens=20,
                    temperature=0,
                    stream=True,
                )
                async for chunk in stream:
                    texts[i] += chunk.choices[0].delta.content or ""

            await asyncio.gather(*map(one, range(6)))
            return texts

    client = server.openai()
    for i, text in enumerate(asyncio.run(ask())):
        whole = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"number {i}"}],
            max_tokens=20,
            temperature=0,
        )
        assert text == whole.choices[0].message.content


def test_verify_statistics_in_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.model_extra is not None
    stats = answer.usage.model_extra["speculative"]
    assert stats["verify_steps"] + stats["accepted_tokens"] == 20
    assert stats["acceptance_length"] == pytest.approx(20 / stats["verify_steps"])
    assert stats["accepted_tokens"] <= stats["verified_tokens"] <= stats["drafted_tokens"]
    assert json.loads(json.dumps(stats)) == stats
