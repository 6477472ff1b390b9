"""Reasoning off the front of an answer, in any pieces, and how many tokens it takes."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashspark.text import TextTokenizer
from flashspark.text.reasoning import REASONING_PARSERS, ReasoningCounter, ReasoningParser, begins_inside
from tiny_models import write_tokenizer
from unit.test_text_tool_calls import cut, places


def split(inside: bool, *pieces: str) -> tuple[str, str]:
    one = ReasoningParser(inside)
    parts = [*map(one.feed, pieces), one.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nSo …\n\nyes\n</think>\n\nAnswer\n", "So …\n\nyes", "Answer\n"),
        (False, "\n<think>a</think>b", "a", "b"),
        (False, "<think>\n\n</think>\n\nAnswer", "", "Answer"),
        (False, " Answer <think>a</think>", "", " Answer <think>a</think>"),
        (False, "a</think>b", "", "a</think>b"),
        (False, " <thin", "", " <thin"),
        (False, "", "", ""),
        (False, "<think>a </think", "a </think", ""),
        (False, "<think> a \n", "a", ""),
        (False, "<think>a</think>b</think>c", "a", "b</think>c"),
        (True, "a</think> b ", "a", "b "),
        (True, "<think>\na</think>b", "a", "b"),
        (True, "</think>b", "", "b"),
        (True, "a", "a", ""),
        (True, "<thi", "<thi", ""),
        (True, "\n ", "", ""),
        (True, " a<think>b</think>c", "a<think>b", "c"),
    ],
)
def test_split(inside, text, reasoning, content):
    assert split(inside, text) == split(inside, *text) == (reasoning, content)


SCRAPS = ["<think>", "</think>", "<", "</", "think>", "\n", "  ", "a", "é", "<tool_call>"]
texts = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=15).map("".join)


@settings(deadline=None, max_examples=300)
@given(inside=st.booleans(), text=texts, where=places)
@example(True, "a \n</think>\n b", [3, 4, 9])
def test_any_cut_gives_the_same(inside, text, where):
    whole = split(inside, text)
    assert split(inside, *cut(text, where)) == split(inside, *text) == whole
    assert whole[0] == whole[0].strip()
    if not inside and not text.lstrip().startswith("<think>"):
        assert whole == ("", text)
    # Nothing is lost but the tags and the white space around them.
    joined, rest = ("".join(part.split()) for part in ("".join(whole), text))
    assert len(rest) - len(joined) in {0, len("<think>"), len("</think>"), len("<think></think>")}
    remaining = iter(rest)
    assert all(char in remaining for char in joined)


@pytest.mark.parametrize(
    ("tail", "inside"),
    [
        ("<|im_start|>assistant\n", {"deepseek-r1": True, "qwen3": False, "qwen3-thinking": True}),
        ("<|im_start|>assistant\n<think>\n", dict.fromkeys(REASONING_PARSERS, True)),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", dict.fromkeys(REASONING_PARSERS, False)),
    ],
)
def test_the_prompt_says_where_an_answer_begins(tail, inside):
    assert {name: begins_inside(name, f"<think>hi{tail}") for name in REASONING_PARSERS} == inside


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    ("inside", "text", "num_tokens"),
    [
        (False, "<think>abc</think>\n\nd", len("<think>abc</think>")),
        (True, "abc</think>d", len("abc</think>")),
        (True, "abc", 3),
        (False, "abc</think>d", 0),
        (False, "<think", 0),
        (False, "", 0),
    ],
)
@pytest.mark.parametrize("width", [1, 3, 100])
def test_tokens(tokenizer, inside, text, num_tokens, width):
    ids = tokenizer.encode(text)  # one per byte
    counter = ReasoningCounter(inside, tokenizer.detokenizer())
    for i in range(0, len(ids), width):
        counter.push(ids[i : i + width])
    assert counter.num_tokens == num_tokens
