"""Log-probabilities over HTTP: shapes, alignment with text and ids, streamed as whole, and what is refused."""

from __future__ import annotations

import json
import math

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_server import FakeServer
from flashspark.api.generation import Choice, Prompt
from flashspark.api.wire import json_response
from flashspark.ipc import FinishReason, LogprobParams, RequestOutput, SamplingParams, TokenLogprobs
from flashspark.text import TextTokenizer
from tiny_models import IM_END_ID, VOCAB_SIZE, write_tokenizer
from unit.test_api_native import DRAFT, frames, generate

MESSAGES = [{"role": "user", "content": "hé"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder):
    with FakeServer(folder, *DRAFT) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(folder):
    return TextTokenizer.load(folder)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def triples(ids, first_position, text=None):
    """What the fake engine says of `ids` at positions from `first_position` on."""
    texts = text if text is not None else [None] * len(ids)
    return [[-(first_position + i) / 8, id_, texts[i]] for i, id_ in enumerate(ids)]


def test_native_shapes(server, tokenizer):
    ids = tokenizer.encode("abc")
    asked = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [7, 9],
    }
    body = generate(server, {"max_new_tokens": 5}, text="abc", **asked).json()
    info = body["meta_info"]
    out = tokenizer.encode("abcab")
    assert body["output_ids"] == out
    assert info["input_token_logprobs"] == [[None, ids[0], None], *triples(ids[1:], 1)]
    assert info["output_token_logprobs"] == triples(out, 3)
    assert info["output_token_logprobs_length"] == info["completion_tokens"] == 5
    assert info["input_top_logprobs"][0] is info["input_token_ids_logprobs"][0] is None
    assert info["input_top_logprobs"][1:] == [
        [[-p / 8, ids[p], None], [-p / 8 - 1, ids[p] + 1, None]] for p in (1, 2)
    ]
    assert info["output_top_logprobs"] == [
        [[-p / 8, out[p - 3], None], [-p / 8 - 1, out[p - 3] + 1, None]] for p in range(3, 8)
    ]
    listed = [[-7.0, 7, None], [-9.0, 9, None]]
    assert info["input_token_ids_logprobs"][1:] == [listed] * 2
    assert info["output_token_ids_logprobs"] == [listed] * 5


def test_native_text_and_defaults(server, tokenizer):
    asked = {"return_logprob": True, "return_text_in_logprobs": True}
    info = generate(server, {"max_new_tokens": 4}, text="aé", **asked).json()["meta_info"]
    ids = tokenizer.encode("aéa")
    assert info["input_token_logprobs"] == [
        [None, ids[2 - 0], "\ufffd"]
    ]  # the last byte of é: of the output alone
    assert info["output_token_logprobs"] == triples([*ids[:3], ids[0]], 3, ["a", "\ufffd", "\ufffd", "a"])
    absent = {
        "input_top_logprobs",
        "output_top_logprobs",
        "input_token_ids_logprobs",
        "output_token_ids_logprobs",
    }
    assert not absent & info.keys()
    plain = generate(server, {"max_new_tokens": 4}, text="aé", return_text_in_logprobs=True).json()
    assert not [name for name in plain["meta_info"] if "logprob" in name]


@pytest.mark.parametrize("start", [0, 2, 3])
def test_native_start(server, tokenizer, start):
    ids = tokenizer.encode("abcd")
    asked = {"return_logprob": True, "logprob_start_len": start}
    info = generate(server, {"max_new_tokens": 1}, text="abcd", **asked).json()["meta_info"]
    assert info["input_token_logprobs"] == [[None, ids[start], None], *triples(ids[start + 1 :], start + 1)]


def test_native_prompt_alone(server, tokenizer):
    """Without output the prompt's are the answer, streamed too; asked of the output alone there is none."""
    body = {"text": "abcd", "return_logprob": True, "logprob_start_len": 1}
    whole = generate(server, {"max_new_tokens": 0}, **body).json()
    ids = tokenizer.encode("abcd")
    assert whole["meta_info"]["input_token_logprobs"] == [[None, ids[1], None], *triples(ids[2:], 2)]
    assert (whole["text"], whole["output_ids"], whole["meta_info"]["output_token_logprobs"]) == ("", [], [])
    (frame,) = frames(generate(server, {"max_new_tokens": 0}, **body, stream=True))
    assert frame["meta_info"]["input_token_logprobs"] == whole["meta_info"]["input_token_logprobs"]
    info = generate(server, {"max_new_tokens": 0}, text="abcd", return_logprob=True).json()["meta_info"]
    assert (info["input_token_logprobs"], info["finish_reason"]["type"]) == ([[None, ids[3], None]], "length")


def test_native_frames_are_cumulative(server):
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "token_ids_logprob": [4]}
    asked |= {"text": "hello world", "return_text_in_logprobs": True}
    sampling = {"max_new_tokens": 33, "stop": "ldhello worldx"}
    whole = generate(server, sampling, **asked).json()
    bodies = frames(generate(server, sampling, **asked, stream=True))
    assert len(bodies) > 1
    names = [name for name in whole["meta_info"] if name.startswith("output_t")]
    assert len(names) == 4
    for body in bodies:
        info, count = body["meta_info"], len(body["output_ids"])
        assert [entry[1] for entry in info["output_token_logprobs"]] == body["output_ids"]
        assert info["output_token_logprobs_length"] == info["completion_tokens"] == count
        assert info["input_token_logprobs"] == whole["meta_info"]["input_token_logprobs"]
        for name in set(names) - {"output_token_logprobs_length"}:
            assert info[name] == whole["meta_info"][name][:count]
    assert bodies[-1]["output_ids"] == whole["output_ids"]


def test_native_incremental_frames(folder):
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    with FakeServer(folder, *DRAFT, "--incremental-streaming-output") as server:
        bodies = frames(generate(server, {"max_new_tokens": 10}, text="abc", **asked, stream=True))
        whole = generate(server, {"max_new_tokens": 10}, text="abc", **asked).json()["meta_info"]
    names = ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs")
    for name in names:
        assert [entry for body in bodies for entry in body["meta_info"][name]] == whole[name]
    for body in bodies:
        assert [entry[1] for entry in body["meta_info"]["output_token_logprobs"]] == body["output_ids"]


def test_native_batch(server, tokenizer):
    asked = {
        "text": ["abc", "de", "fg"],
        "return_logprob": [True, True, False],
        "logprob_start_len": [0, -1, -1],
        "top_logprobs_num": [1, 2, 0],
        "token_ids_logprob": [[5], None, None],
    }
    first, second, third = generate(server, {"max_new_tokens": 2}, **asked).json()
    assert len(first["meta_info"]["input_token_logprobs"]) == 3
    assert first["meta_info"]["output_token_ids_logprobs"] == [[[-5.0, 5, None]]] * 2
    assert [len(top) for top in second["meta_info"]["output_top_logprobs"]] == [2, 2]
    assert "output_token_ids_logprobs" not in second["meta_info"]
    assert "output_token_logprobs" not in third["meta_info"]
    both = {"text": ["ab", "cd"], "return_logprob": True, "token_ids_logprob": [8]}
    for answer in generate(server, {"max_new_tokens": 2, "n": 2}, **both).json():
        info = answer["meta_info"]
        assert info["output_token_ids_logprobs"] == [[[-8.0, 8, None]]] * 2
        assert info["output_token_logprobs"] == triples(tokenizer.encode(answer["text"]), 2)


def completion(server, **body):
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def streamed_completion(server, **body) -> tuple[str, dict]:
    """Text and log-probabilities of all frames; each frame's tokens begin within its text."""
    text, joined = "", {}
    for item in frames(completion(server, **body, stream=True)):
        choice = item["choices"][0]
        logprobs = choice["logprobs"] or {}
        assert choice["text"].startswith(logprobs.get("tokens", [""])[0] if logprobs.get("tokens") else "")
        text += choice["text"]
        for name, values in logprobs.items():
            joined[name] = joined.get(name, []) + values
    return text, joined


def test_completion_shapes(server, client, tokenizer):
    answer = client.completions.create(model="m", prompt="abc", max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c", "a"]
    assert logprobs.token_logprobs == [-3 / 8, -4 / 8, -5 / 8, -6 / 8]
    assert logprobs.top_logprobs[0] == {"a": -3 / 8, "b": -11 / 8}
    assert list(logprobs.top_logprobs[1]) == ["b", "c"]  # most likely first
    assert logprobs.text_offset == [-1] * 4
    assert (
        client.completions.create(model="m", prompt="a", max_tokens=2, logprobs=0)
        .choices[0]
        .logprobs.top_logprobs
        == []
    )
    assert (
        completion(server, prompt="a", max_tokens=2, logprobs=False).json()["choices"][0]["logprobs"] is None
    )


def test_completion_echo_has_the_prompts(server, tokenizer):
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = completion(server, **body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "abcab"
    assert logprobs["token_logprobs"] == [None, -1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert logprobs["top_logprobs"][:2] == [None, {"b": -1 / 8}]
    assert streamed_completion(server, **body) == (choice["text"], logprobs)


@pytest.mark.parametrize(
    ("body", "text", "tokens"),
    [
        ({"max_tokens": 14}, "hello worldhel", "hello worldhel"),
        ({"max_tokens": 33, "stop": ["ldhe"]}, "hello wor", "hello wor"),
        ({"max_tokens": 33, "stop": ["ldhe"], "no_stop_trim": True}, "hello worldhe", "hello worldhe"),
        ({"max_tokens": 33, "stop": ["hello worldhello worldh"]}, "", ""),
        ({"max_tokens": 9, "stop_token_ids": [79]}, "he", "he"),
        ({"max_tokens": 9, "stop_token_ids": [79], "no_stop_trim": True}, "hel", "hel"),
        ({"max_tokens": 33, "stop": ["rldhello worx"]}, "hello world" * 3, "hello world" * 3),
    ],
)
@pytest.mark.parametrize("mode", ["off", "static"])
def test_completion_tokens_are_those_of_the_text(server, body, text, tokens, mode):
    body = {"prompt": "hello world", "logprobs": 1, "speculation": {"mode": mode}, **body}
    choice = completion(server, **body).json()["choices"][0]
    assert (choice["text"], "".join(choice["logprobs"]["tokens"])) == (text, tokens)
    assert choice["logprobs"]["token_logprobs"] == [-(11 + i) / 8 for i in range(len(tokens))]
    assert streamed_completion(server, **body) == (choice["text"], choice["logprobs"])


def test_completion_batch_and_n(server):
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3, "logprobs": 0}
    choices = completion(server, **body).json()["choices"]
    assert ["".join(choice["logprobs"]["tokens"]) for choice in choices] == ["aba", "aba", "ccc", "ccc"]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in choices] == [-2 / 8, -2 / 8, -1 / 8, -1 / 8]


def test_chat(server, client, tokenizer):
    """The echo of the prompt up to the end of the turn, whose token is no part of the text."""
    options = {"model": "m", "messages": MESSAGES, "max_tokens": 60, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**options)
    (choice,) = answer.choices
    entries = choice.logprobs.content
    prompt = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), add_special_tokens=False)
    shown = prompt[: prompt.index(IM_END_ID)]
    assert choice.message.content == "user\nhé"
    assert answer.usage.completion_tokens == len(shown) + 1
    assert [entry.token for entry in entries] == ["<|im_start|>", *"user\nh", "\ufffd", "\ufffd"]
    assert [entry.logprob for entry in entries] == [-(len(prompt) + i) / 8 for i in range(len(shown))]
    assert b"".join(bytes(entry.bytes) for entry in entries[1:]) == "user\nhé".encode()
    for entry, token_id in zip(entries, shown, strict=True):
        own, other = entry.top_logprobs
        assert (own.token, own.logprob, own.bytes) == (entry.token, entry.logprob, entry.bytes)
        assert (other.token, other.logprob) == (tokenizer.token_text(token_id + 1), entry.logprob - 1)
    streamed, text = [], ""
    for chunk in client.chat.completions.create(**options, stream=True):
        piece = chunk.choices[0]
        text += piece.delta.content or ""
        if piece.logprobs is not None:
            assert piece.delta.content
            streamed += piece.logprobs.content
    assert (text, streamed) == (choice.message.content, entries)


def test_chat_with_a_parser(folder):
    """Log-probabilities are of the text as it was written, tags and all; none is lost while the parser holds back."""
    messages = [{"role": "user", "content": "ab</think>cd"}]
    with FakeServer(folder, *DRAFT, "--reasoning-parser", "deepseek-r1") as server:
        for streams_reasoning in (True, False):
            body = {"messages": messages, "max_tokens": 60, "logprobs": True, "top_logprobs": 1}
            body |= {"stream_reasoning": streams_reasoning}
            choice = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]
            entries = choice["logprobs"]["content"]
            assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (
                "user\nab",
                "cd",
            )
            assert "".join(entry["token"] for entry in entries[1:]) == "user\nab</think>cd"
            response = server.client.post("/v1/chat/completions", json=body | {"stream": True})
            choices = [item["choices"][0] for item in frames(response)]
            told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
            assert [entry for logprobs in told for entry in logprobs["content"]] == entries


def test_chat_without_top_or_text(server, client):
    options = {"model": "m", "messages": MESSAGES, "logprobs": True}
    answer = client.chat.completions.create(**options, max_tokens=3).choices[0]
    assert [entry.top_logprobs for entry in answer.logprobs.content] == [[], [], []]
    stopped = client.chat.completions.create(**options, max_tokens=9, stop="user").choices[0]
    assert stopped.message.content == ""
    # The start of the turn, which comes before the stop string and is not shown, goes with the text after it.
    assert stopped.logprobs.content == []
    assert (
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3).choices[0].logprobs is None
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"top_logprobs_num": 3}, "top_logprobs_num"),
        ("/generate", {"token_ids_logprob": [3]}, "token_ids_logprob"),
        ("/generate", {"logprob_start_len": 1}, "logprob_start_len"),
        ("/generate", {"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ("/generate", {"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len: 2 is not"),
        ("/generate", {"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ("/generate", {"return_logprob": True, "top_logprobs_num": 257}, "256"),
        ("/generate", {"return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num"),
        ("/generate", {"return_logprob": True, "top_logprobs_num": 1.5}, "top_logprobs_num"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": [VOCAB_SIZE]}, "token_ids_logprob"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": [1] * 257}, "token_ids_logprob"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": "5"}, "token_ids_logprob"),
        ("/generate", {"return_logprob": 1}, "return_logprob"),
        ("/generate", {"return_logprob": [True, False]}, "return_logprob"),
        ("/generate", {"return_logprob": True, "top_logprobs_num": [1, 2]}, "top_logprobs_num"),
        ("/generate", {"return_logprob": True, "return_entropy": True}, "return_entropy"),
        ("/v1/completions", {"logprobs": 257}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"logprobs": "3"}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 257}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server, path, body, param, stream):
    prompts = {"/generate": {"text": "ab"}, "/v1/completions": {"prompt": "ab"}}
    good = prompts.get(path, {"messages": MESSAGES})
    response = server.client.post(path, json=good | body | {"stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert param in (error if isinstance(error, str) else error["message"])


def test_too_much_of_the_prompts_is_refused(server):
    """What a call's prompts have to report comes at once: there is a limit to all of it together."""
    body = {"prompt": ["a" * 200] * 20, "echo": True, "max_tokens": 1}
    assert len(completion(server, **body, logprobs=1).json()["choices"]) == 20
    response = server.client.post("/v1/completions", json=body | {"logprobs": 256, "n": 2})
    assert response.status_code == 400
    assert "the limit is 262144" in response.json()["message"]


def test_a_vocabulary_smaller_than_the_limit(tokenizer):
    from flashspark.api.errors import RequestError
    from flashspark.api.logprobs import chat_logprobs
    from flashspark.api.protocol import ChatBody
    from flashspark.api.sampling import Limits

    body = ChatBody.parse({"messages": MESSAGES, "logprobs": True, "top_logprobs": 30})
    assert chat_logprobs(body, 5, Limits(256, 30, 256, False)) == LogprobParams(4, 30)
    with pytest.raises(RequestError, match="top_logprobs: 30 is more than the vocabulary's 29 tokens"):
        chat_logprobs(body, 5, Limits(256, 29, 256, False))


PIECES = ["a", "b", " ", "é", "日", "🎉", "<|mask|>"]


@given(data=st.data())
def test_any_stream_shows_each_token_once_and_with_its_text(tokenizer, data):
    """However an answer is cut into steps: the frames' tokens are the whole answer's, each begins in its frame's
    text, and what a stop cut away is in none."""
    ids = tokenizer.encode("".join(data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12))))
    stops = tuple(data.draw(st.lists(st.sampled_from(["ab", "b ", "é日", "aab"]), max_size=2, unique=True)))
    no_trim = data.draw(st.booleans())
    sampling = SamplingParams(len(ids), stop=stops, skip_special_tokens=data.draw(st.booleans()))
    prompt = Prompt("r", [5], sampling, no_stop_trim=no_trim, logprobs=LogprobParams(0))

    detokenizer, text, finish = tokenizer.detokenizer(sampling.skip_special_tokens), "", None
    for count, token in enumerate(ids, start=1):  # the end, as the scheduler finds it
        text += detokenizer.push([token])
        found = [stop for stop in stops if stop in text]
        if found:
            finish = FinishReason("stop", min(found, key=lambda stop: text.find(stop) + len(stop)))
            ids = ids[:count]
            break
    choice = Choice(0, 0, "r", prompt, tokenizer, "off")
    at, seen, shown_text = 0, [], ""
    while at < len(ids):
        step = ids[at : at + data.draw(st.integers(1, 4))]
        at += len(step)
        values = TokenLogprobs([-float(i) for i in range(at - len(step), at)])
        end = None if at < len(ids) else finish or FinishReason("length")
        choice.apply(RequestOutput("r", step, end, logprobs=values))
        delta, new = choice.take_text(), choice.take_logprobs()
        begin = len(shown_text)
        shown_text += delta
        starts = choice.logprobs.text_starts[new]
        assert all(begin <= start < len(shown_text) for start in starts) or choice.finish is not None
        seen += choice.logprobs.output[new]
    assert shown_text == choice.text
    assert [-value for value, _, _ in seen] == list(range(len(seen)))
    assert [token for _, token, _ in seen] == ids[: len(seen)]
    if finish is None:
        assert len(seen) == len(ids)
    else:
        whole = tokenizer.decode(ids[: len(seen)], sampling.skip_special_tokens)
        assert shown_text.startswith(whole) or whole.startswith(shown_text)
        assert all(start < len(shown_text) for start in choice.logprobs.text_starts[: len(seen)])


def test_what_is_no_number_leaves_as_null(tokenizer):
    prompt = Prompt("r", [5, 6], SamplingParams(2), logprobs=LogprobParams(1, 1), logprob_text=False)
    choice = Choice(0, 0, "r", prompt, tokenizer, "off")
    values = TokenLogprobs([math.nan, -3.4e38], [[math.nan], [-0.0]], [[7], [8]])
    choice.apply(RequestOutput("r", [7, 8], FinishReason("length"), logprobs=values))
    body = json.loads(json_response(choice.logprobs.native(slice(None), with_prompt=True)).body)
    assert body["output_token_logprobs"] == [[None, 7, None], [-3.4e38, 8, None]]
    assert body["output_top_logprobs"][0] == [[None, 7, None]]
