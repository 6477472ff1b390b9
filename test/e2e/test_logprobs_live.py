"""Log-probabilities of the shipped pair over HTTP, against transformers and through the official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import Qwen3ForCausalLM

from e2e.server import Server, frames, generate_body, running_server, speculative
from e2e.test_compact_live import DEAR_ROWS
from flashspark.args.server_args import resolve_model_path
from flashspark.demo import DEMO_PROMPTS
from flashspark.text import TextTokenizer

ASKED = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):\n    return"}]


@pytest.fixture(scope="module")
def theirs() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(resolve_model_path("demo"))


def texts(count: int) -> list[str]:
    """Held-out prompts."""
    return [item["text"] for item in json.loads(DEMO_PROMPTS.read_text())[:count]]


def native(server: Server, text: str, **body: Any) -> dict[str, Any]:
    """One greedy answer of 48 tokens with everything asked for."""
    request = generate_body(text, max_new_tokens=48, ignore_eos=True) | ASKED | body
    response = server.http.post("/generate", json=request)
    assert response.status_code == 200, response.text
    return frames(response.content)[-1] if body.get("stream") else response.json()


def check(theirs: Qwen3ForCausalLM, answer: dict[str, Any]) -> None:
    """Every position of prompt and output within 1e-3 of transformers'."""
    info = answer["meta_info"]
    prompt = [entry[1] for entry in info["input_token_logprobs"]]
    ids = torch.tensor(prompt + answer["output_ids"])
    with torch.no_grad():
        expected = torch.log_softmax(theirs(ids[None]).logits[0].float(), -1)[:-1]
    first, *entries = info["input_token_logprobs"] + info["output_token_logprobs"]
    assert first[0] is None and info["input_top_logprobs"][0] is None
    assert [entry[1] for entry in entries] == ids[1:].tolist()
    found = torch.tensor([entry[0] for entry in entries])
    torch.testing.assert_close(found, expected.gather(1, ids[1:, None])[:, 0], atol=1e-3, rtol=0)
    tops = info["input_top_logprobs"][1:] + info["output_top_logprobs"]
    top_values = torch.tensor([[entry[0] for entry in top] for top in tops])
    torch.testing.assert_close(top_values, expected.topk(3).values, atol=1e-3, rtol=0)
    top_ids = torch.tensor([[entry[1] for entry in top] for top in tops])
    torch.testing.assert_close(top_values, expected.gather(1, top_ids), atol=1e-3, rtol=0)


def test_static(demo: Server, theirs: Qwen3ForCausalLM) -> None:
    for text in texts(2):
        answer = native(demo, text)
        assert answer["meta_info"]["spec_num_correct_drafts"] > 0
        check(theirs, answer)
        streamed = native(demo, text, stream=True)
        assert streamed["output_ids"] == answer["output_ids"]
        check(theirs, streamed)
        plain = native(demo, text, speculation={"mode": "off"})
        assert plain["output_ids"] == answer["output_ids"]
        check(theirs, plain)
        without = demo.generate(text, max_new_tokens=48, ignore_eos=True)
        assert without["output_ids"] == answer["output_ids"]


@pytest.mark.full
def test_every_mode(theirs: Qwen3ForCausalLM, tmp_path: Path) -> None:
    """A DSPARK draft, a third of whose rows is verified, in each mode: one text."""
    flags = [*speculative("demo", "demo-dspark"), "--speculative-algorithm", "DSPARK"]
    table = tmp_path / "table.json"
    table.write_text(json.dumps(DEAR_ROWS))
    flags += ["--ragged-verify-mode", "compact", "--speculative-cost-table", "none"]
    flags += ["--speculative-dspark-sps-table-path", str(table)]
    body = generate_body("", max_new_tokens=48, ignore_eos=True) | ASKED | {"text": texts(4)}
    with running_server(*flags, log=tmp_path / "log") as server:
        outputs = []
        for mode in ("compact", "cap-accept", "static"):
            pin = {} if mode == "static" else {"dspark_force_budget_frac": 0.3}
            settings = {"server_args": {"ragged_verify_mode": mode, **pin}}
            assert server.http.post("/set_internal_state", json=settings).json() == [True]
            trimmed = server.state()["trimmed_steps"]
            answers = server.http.post("/generate", json=body).json()
            for answer in answers:
                check(theirs, answer)
            outputs.append([answer["output_ids"] for answer in answers])
            assert (server.wait_idle()["trimmed_steps"] > trimmed) == (mode != "static")
        assert outputs[0] == outputs[1] == outputs[2]


def test_completions(demo: Server, tokenizer: TextTokenizer) -> None:
    client, text = demo.openai(), texts(1)[0]
    reference = native(demo, text, return_text_in_logprobs=True)
    options: dict[str, Any] = {
        "model": "m",
        "prompt": text,
        "max_tokens": 48,
        "temperature": 0,
        "logprobs": 3,
    }
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    whole = client.completions.create(**options, extra_body=extra).choices[0]
    assert whole.logprobs is not None
    entries = reference["meta_info"]["output_token_logprobs"]
    assert whole.logprobs.tokens == [entry[2] for entry in entries]
    assert whole.logprobs.token_logprobs == pytest.approx([entry[0] for entry in entries], abs=1e-3)
    tokens, values, shown = [], [], ""
    for chunk in client.completions.create(**options, extra_body=extra, stream=True):
        piece = chunk.choices[0]
        shown += piece.text
        if piece.logprobs is not None:
            tokens += piece.logprobs.tokens or []
            values += piece.logprobs.token_logprobs or []
    assert (shown, tokens) == (whole.text, whole.logprobs.tokens)
    assert values == pytest.approx(whole.logprobs.token_logprobs, abs=1e-3)
    echoed = client.completions.create(**options, extra_body=extra, echo=True).choices[0]
    assert echoed.logprobs is not None and echoed.logprobs.token_logprobs is not None
    prompt = reference["meta_info"]["input_token_logprobs"]
    assert echoed.logprobs.token_logprobs[0] is None
    expected = [entry[0] for entry in prompt[1:] + entries]
    assert echoed.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)


def test_chat(demo: Server, tokenizer: TextTokenizer) -> None:
    client = demo.openai()
    ids = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), add_special_tokens=False)
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
    reference = demo.http.post("/generate", json=body | ASKED).json()
    options: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    options |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    entries = reference["meta_info"]["output_token_logprobs"]
    if reference["meta_info"]["finish_reason"]["type"] == "stop":
        entries = entries[:-1]
    assert [entry.logprob for entry in whole.logprobs.content] == pytest.approx(
        [entry[0] for entry in entries], abs=1e-3
    )
    special = {entry.token for entry in whole.logprobs.content if entry.token.startswith("<|")}
    raw = b"".join(bytes(e.bytes or []) for e in whole.logprobs.content if e.token not in special)
    assert raw.decode() == whole.message.content
    for entry, top in zip(
        whole.logprobs.content, reference["meta_info"]["output_top_logprobs"], strict=False
    ):
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx([t[0] for t in top], abs=1e-3)
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in whole.logprobs.content], abs=1e-3
    )


def test_refusals_reach_the_client(demo: Server) -> None:
    client = demo.openai()
    for options, param in (
        ({"logprobs": True, "top_logprobs": 5000}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=MESSAGES, **options)
        assert caught.value.param == param
