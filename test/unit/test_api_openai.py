"""OpenAI's routes over the real HTTP server: by raw bytes, and with the official client."""

from __future__ import annotations

import json

import openai
import pytest

from fake_server import FakeServer
from flashspark.text import TextTokenizer
from tiny_models import IM_END_ID, write_tokenizer

DRAFT = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder):
    with FakeServer(folder, *DRAFT, "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return TextTokenizer.load(folder)


def post(server, path, **body):
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def frames(response) -> list:
    """The events, checked byte for byte: `data: `, one line of JSON, a blank line; `[DONE]` last."""
    assert response.headers["content-type"] == "text/event-stream"
    *events, rest = response.content.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]


def test_completion(server, tokenizer):
    body = post(server, "/v1/completions", model="m", prompt="hello world", max_tokens=14).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "m"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello worldhel",
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ]
    used = body["usage"]
    assert used["prompt_tokens"] == len(tokenizer.encode("hello world"))
    assert (used["completion_tokens"], used["total_tokens"]) == (14, 25)
    # 14 tokens in blocks of 4: four steps, the last one cut after 2
    assert used["speculative"] == {
        "verify_steps": 4,
        "drafted_tokens": 12,
        "verified_tokens": 12,
        "accepted_tokens": 10,
        "acceptance_length": 3.5,
    }


def test_completion_stream(server):
    response = post(server, "/v1/completions", prompt="abcdef", max_tokens=10, stream=True)
    bodies = frames(response)
    assert "".join(body["choices"][0]["text"] for body in bodies) == "abcdefabcd"
    assert [body["choices"][0]["finish_reason"] for body in bodies] == [None] * (len(bodies) - 1) + ["length"]
    assert all(body["usage"] is None for body in bodies)
    assert len({body["id"] for body in bodies}) == 1
    assert {body["object"] for body in bodies} == {"text_completion"}


def test_usage_frames(server):
    body = {"prompt": "abc", "max_tokens": 6, "stream": True}
    bodies = frames(post(server, "/v1/completions", **body, stream_options={"include_usage": True}))
    assert [item["usage"] is None for item in bodies] == [True] * (len(bodies) - 1) + [False]
    assert bodies[-1]["choices"] == []
    assert bodies[-1]["usage"]["completion_tokens"] == 6
    assert bodies[-1]["usage"]["speculative"]["verify_steps"] == 2
    options = {"continuous_usage_stats": True}
    bodies = frames(post(server, "/v1/completions", **body, stream_options=options))
    assert all(item["choices"] for item in bodies)
    counts = [item["usage"]["completion_tokens"] for item in bodies]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_chat_stream_order(server):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 40,
        "stream": True,
        "ignore_eos": True,
    }
    options = {"include_usage": True}
    bodies = frames(
        post(server, "/v1/chat/completions", **body, stream_options=options, return_spec_tokens_details=True)
    )
    *deltas, finish, extension, used = bodies
    assert deltas[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert all(item["choices"][0]["delta"].keys() == {"content", "reasoning_content"} for item in deltas[1:])
    assert all(item["choices"][0]["finish_reason"] is None for item in deltas)
    assert finish["choices"][0]["delta"] == {"reasoning_content": None}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert extension["choices"] == []
    assert extension["sglext"]["spec_tokens_details"]["spec_verify_ct"] == 10
    assert used["choices"] == []
    assert used["usage"]["completion_tokens"] == 40
    assert {item["object"] for item in bodies} == {"chat.completion.chunk"}


def test_chat(server):
    messages = [
        {"role": "System", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = post(
        server, "/v1/chat/completions", messages=messages, max_tokens=60, return_meta_info=True
    ).json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == "system\nbe brief"  # the echo up to the first end of turn
    assert choice["message"]["role"] == "assistant"
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", IM_END_ID)
    assert choice["meta_info"]["finish_reason"] == {"type": "stop", "matched": IM_END_ID}
    text = post(
        server,
        "/v1/chat/completions",
        messages=messages,
        max_tokens=60,
        ignore_eos=True,
        skip_special_tokens=False,
    ).json()["choices"][0]["message"]["content"]
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na b<|im_end|>\n")


def test_chat_without_a_maximum_goes_to_the_context_end(server):
    body = post(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], ignore_eos=True
    ).json()
    assert body["usage"]["total_tokens"] == 256


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["off", "static"])
@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        (["ldhe"], "hello wor", "ldhe"),  # straddles blocks and the echo's seam
        (["zzz", "o w", "lo"], "hel", "lo"),
        (["hello worldhello worldh"], "", "hello worldhello worldh"),
        (["never"], "hello worldhello worldhello world", None),
    ],
)
def test_stop_strings(server, stream, mode, stop, text, matched):
    body = {"prompt": "hello world", "max_tokens": 33, "stop": stop, "speculation": {"mode": mode}}
    response = post(server, "/v1/completions", **body, stream=stream)
    if stream:
        choices = [item["choices"][0] for item in frames(response)]
        assert "".join(choice["text"] for choice in choices) == text
        last = choices[-1]
    else:
        last = response.json()["choices"][0]
        assert last["text"] == text
    assert last["matched_stop"] == matched
    assert last["finish_reason"] == ("stop" if matched else "length")


def test_stop_is_kept_without_trimming(server):
    body = {"prompt": "hello world", "max_tokens": 33, "no_stop_trim": True}
    assert post(server, "/v1/completions", **body, stop="o w").json()["choices"][0]["text"] == "hello w"
    body = post(server, "/v1/completions", **body, stop_token_ids=[79]).json()["choices"][0]
    assert (body["text"], body["matched_stop"]) == ("hel", 79)
    body = post(server, "/v1/completions", prompt="hello world", max_tokens=9, stop_token_ids=[79]).json()
    assert body["choices"][0]["text"] == "he"
    assert body["usage"]["completion_tokens"] == 3  # the stop token was generated


def test_multibyte_text_is_never_cut(server):
    text = "naïve 日本 🎉 "
    length = 2 * len(text.encode())
    body = {"prompt": text, "max_tokens": length, "stream": True, "speculation": {"mode": "off"}}
    deltas = [item["choices"][0]["text"] for item in frames(post(server, "/v1/completions", **body))]
    assert "".join(deltas) == text * 2
    assert not any("�" in delta for delta in deltas)


def test_batch_and_n_are_prompt_major(server):
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2}
    whole = post(server, "/v1/completions", **body).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "ab"),
        (1, "ab"),
        (2, "cd"),
        (3, "cd"),
    ]
    assert whole["usage"]["prompt_tokens"] == 4  # once per prompt, not per choice
    assert whole["usage"]["completion_tokens"] == 8
    texts = {0: "", 1: "", 2: "", 3: ""}
    for item in frames(post(server, "/v1/completions", **body, stream=True)):
        texts[item["choices"][0]["index"]] += item["choices"][0]["text"]
    assert list(texts.values()) == ["ab", "ab", "cd", "cd"]


def test_prompt_forms_and_echo(server, tokenizer):
    ids = tokenizer.encode("xyz")
    for prompt, count in (("xyz", 1), (["xyz"], 1), (ids, 1), ([ids, ids], 2)):
        body = post(server, "/v1/completions", prompt=prompt, max_tokens=3, echo=True).json()
        assert [choice["text"] for choice in body["choices"]] == ["xyzxyz"] * count
    stream = post(server, "/v1/completions", prompt=ids, max_tokens=3, echo=True, stream=True)
    assert "".join(item["choices"][0]["text"] for item in frames(stream)) == "xyzxyz"


def test_extensions(server, tokenizer):
    body = {"prompt": "abcd", "max_tokens": 8, "return_token_ids": True, "return_cached_tokens_details": True}
    extension = post(server, "/v1/completions", **body, return_spec_tokens_details=True).json()["sglext"]
    assert extension["input_ids"] == tokenizer.encode("abcd")
    assert extension["output_ids"] == tokenizer.encode("abcdabcd")
    assert extension["cached_tokens_details"] == {"device": 0, "host": 0}
    details = extension["spec_tokens_details"]
    assert details["spec_accept_length"] == 4
    assert details["spec_accept_rate"] == 1
    several = post(server, "/v1/completions", **body, n=2).json()["sglext"]
    assert several["output_ids"] == [tokenizer.encode("abcdabcd")] * 2
    assert "sglext" not in post(server, "/v1/completions", prompt="a", max_tokens=1).json()


def test_speculation_off_has_no_statistics(server):
    body = {"prompt": "abcd", "max_tokens": 8, "speculation": {"mode": "off"}}
    used = post(server, "/v1/completions", **body).json()["usage"]
    assert "speculative" not in used
    assert used["speculation"] == {"mode": "off"}


def test_what_was_asked_of_the_draft_is_told(server):
    body = {"prompt": "abcd", "max_tokens": 8}
    assert post(server, "/v1/completions", **body).json()["usage"]["speculation"] == {"mode": "static"}
    asked = {"mode": "static", "max_verify_len": 2}
    used = post(server, "/v1/completions", **body, speculation=asked).json()["usage"]
    assert (used["speculation"], used["speculative"]["verify_steps"]) == (asked, 4)
    options = {"include_usage": True}
    *_, last = frames(
        post(server, "/v1/completions", **body, speculation=asked, stream=True, stream_options=options)
    )
    assert last["usage"]["speculation"] == asked
    messages = [{"role": "user", "content": "hi"}]
    chat = post(
        server, "/v1/chat/completions", messages=messages, return_meta_info=True, speculation=asked
    ).json()
    assert chat["usage"]["speculation"] == chat["choices"][0]["meta_info"]["speculation"] == asked


@pytest.mark.parametrize(
    ("speculation", "message", "param"),
    [
        ({"mode": "adaptive"}, "needs a server started with --ragged-verify-mode", "speculation.mode"),
        ({"mode": "static", "max_verify_len": 5}, "5 is more than the 4 rows", "speculation.max_verify_len"),
        ({"mode": "off", "max_verify_len": 1}, "leave it out", "speculation.max_verify_len"),
    ],
)
def test_speculation_that_cannot_be_had(server, speculation, message, param):
    bodies = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/generate": {"text": "a"},
    }
    for path, body in bodies.items():
        response = server.client.post(path, json=body | {"speculation": speculation})
        assert response.status_code == 400
        error = response.json()["error"]
        assert message in error["message"]
        assert path == "/generate" or error["param"] == param


def test_an_adaptive_server_tells_and_takes_its_mode(folder):
    with FakeServer(folder, *DRAFT, "--ragged-verify-mode", "compact") as server:
        body = {"text": "abcd", "sampling_params": {"max_new_tokens": 8}}
        for asked, told in (
            (None, {"mode": "adaptive"}),
            ({"mode": "adaptive", "max_verify_len": 3}, {"mode": "adaptive", "max_verify_len": 3}),
            ({"mode": "static"}, {"mode": "static"}),
        ):
            info = post(server, "/generate", **body, speculation=asked).json()["meta_info"]
            assert info["speculation"] == told


def test_models(server, client):
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert client.models.list().data[0].id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error_info:
        client.models.retrieve("other/model")
    assert error_info.value.code == "model_not_found"


def test_tokenize_and_back(server, tokenizer):
    body = post(server, "/v1/tokenize", prompt="añb").json()
    assert body == {"tokens": tokenizer.encode("añb"), "count": 4, "max_model_len": 256}
    assert post(server, "/detokenize", tokens=body["tokens"]).json() == {"text": "añb"}
    assert post(server, "/tokenize", prompt=["a", "bc"]).json()["count"] == [1, 2]
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages)
    assert post(server, "/tokenize", messages=messages).json()["count"] == len(
        tokenizer.encode(rendered, False)
    )


class TestOfficialClient:
    """The `openai` package as it comes."""

    def test_text(self, client):
        answer = client.completions.create(model="tiny", prompt="abc", max_tokens=5, n=2, seed=3, stop=["zz"])
        assert [choice.text for choice in answer.choices] == ["abcab", "abcab"]
        assert answer.usage.prompt_tokens == 3

    def test_text_stream(self, client):
        chunks = list(
            client.completions.create(model="tiny", prompt="abc", max_tokens=50, stop="bcab", stream=True)
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == "a"
        assert chunks[-1].choices[0].finish_reason == "stop"

    def test_chat(self, client):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=30,
            temperature=0,
            n=2,
            extra_body={"speculation": {"mode": "static"}},
        )
        assert answer.choices[1].message.content == "user\nhi"
        assert answer.choices[1].finish_reason == "stop"
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.speculative["acceptance_length"] > 1

    def test_chat_stream(self, client):
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
        texts, used = {0: "", 1: ""}, []
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            used += [chunk.usage] if chunk.usage else []
        assert texts == {0: "user\nhi", 1: "user\nhi"}
        assert len(used) == 1
        assert used[0].completion_tokens == 18

    def test_errors(self, client):
        with pytest.raises(openai.BadRequestError) as error_info:
            client.completions.create(model="tiny", prompt="a" * 300, max_tokens=5)
        assert error_info.value.code == "context_length_exceeded"
        assert error_info.value.param == "prompt"
        with pytest.raises(openai.BadRequestError, match="stop"):
            client.completions.create(model="tiny", prompt="a", stop=["a", ""], stream=True)
