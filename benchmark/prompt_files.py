"""The benchmarks' prompts by name: W1, W2, and the 64 that the package ships."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from servers import ROOT

PROMPT_SETS = ("W1", "W2", "shipped")


def digest(texts: Sequence[str]) -> str:
    """SHA-256 of a set's texts, in order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def read_set(name: str) -> dict[str, Any]:
    """The file of W1 or W2: what it says of itself, and `prompts` with source and text."""
    content: dict[str, Any] = json.loads(
        (ROOT / "benchmark" / "prompts" / f"{name.lower()}.json").read_text()
    )
    if digest([prompt["text"] for prompt in content["prompts"]]) != content["sha256"]:
        raise ValueError(f"the prompts of {name} are not those that its file was written with")
    return content


def token_ids(name: str) -> list[list[int]]:
    """The set's prompts as ids of the shipped tokenizer, in the set's order.

    Raises:
        ValueError: there is no such set, or its file was changed.
    """
    from tokenizers import Tokenizer

    from flashspark.demo import DEMO_MODELS, DEMO_PROMPTS

    if name == "shipped":
        return [prompt["token_ids"] for prompt in json.loads(DEMO_PROMPTS.read_text())]
    if name not in PROMPT_SETS:
        raise ValueError(f"no prompt set {name}; there are {', '.join(PROMPT_SETS)}")
    tokenizer = Tokenizer.from_file(str(DEMO_MODELS["demo"] / "tokenizer.json"))
    texts = [prompt["text"] for prompt in read_set(name)["prompts"]]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def cut_to(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """As many prompts of exactly `num_tokens`, each begun by one of them and filled up from the next ones."""
    cut = []
    for first in range(len(prompts)):
        ids: list[int] = []
        place = first
        while len(ids) < num_tokens:
            ids += prompts[place % len(prompts)]
            place += 1
        cut.append(ids[:num_tokens])
    return cut
