"""Reasoning between `<think>` and `</think>`, split off the front of a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from .detokenizer import IncrementalDetokenizer
from .stop import StopMatcher

THINK, END_THINK = "<think>", "</think>"
_END = StopMatcher([END_THINK])

# SGLang's names, and whether an answer begins inside where its prompt does not say: a model of `qwen3` writes the
# opening tag itself if it reasons, those of the others seldom do.
REASONING_PARSERS: dict[str, bool] = {"deepseek-r1": True, "qwen3": False, "qwen3-thinking": True}


class SplitText(NamedTuple):
    """A piece of each kind; either may be empty."""

    reasoning: str
    content: str


def begins_inside(parser: str, prompt: str) -> bool:
    """Whether the answer to `prompt` begins as reasoning: templates often end with a tag, opened or closed."""
    tail = prompt.rstrip()
    return tail.endswith(THINK) or (REASONING_PARSERS[parser] and not tail.endswith(END_THINK))


class ReasoningParser:
    """One answer. All that `feed` and `finish` return, together, does not depend on how the text was cut.

    Only the front of an answer can be reasoning. White space around it is dropped; everything else comes out as it
    went in, and an answer without reasoning is unchanged.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._state: Literal["start", "blank", "reasoning", "gap", "content"] = "start"
        self._held = ""
        self.has_reasoning = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be reasoning."""
        return self._state in ("gap", "content")

    def feed(self, text: str) -> SplitText:
        """Appends text; what has become certain."""
        self._held += text
        if self._state == "start":
            self._start()
        reasoning = self._reasoning() if self._state in ("blank", "reasoning") else ""
        if self._state == "gap":
            self._held = self._held.lstrip()
            self._state = "content" if self._held else "gap"
        if self._state != "content":
            return SplitText(reasoning, "")
        content, self._held = self._held, ""
        return SplitText(reasoning, content)

    def finish(self) -> SplitText:
        """The rest."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return SplitText(held.rstrip(), "")
        if self._state == "start" and not self._inside:
            return SplitText("", held)
        return SplitText(held.strip(), "")

    def _start(self) -> None:
        """Decides how the answer begins, as soon as that is certain."""
        front = self._held.lstrip()
        if front.startswith(THINK):
            self._held, self._state = front.removeprefix(THINK), "blank"
        elif not THINK.startswith(front):
            self._state = "blank" if self._inside else "content"
        self.has_reasoning = self._state == "blank"

    def _reasoning(self) -> str:
        """Takes reasoning from what is held. Trailing white space waits: it is dropped if the reasoning ends there."""
        if self._state == "blank":
            self._held = self._held.lstrip()
            self._state = "reasoning" if self._held else "blank"
        end = self._held.find(END_THINK)
        if end >= 0:
            part, self._state = self._held[:end].rstrip(), "gap"
            self._held = self._held[end + len(END_THINK) :]
        else:
            part = self._held[: _END.releasable(self._held)].rstrip()
            self._held = self._held[len(part) :]
        return part


class ReasoningCounter:
    """How many tokens of one answer are reasoning, the closing tag's included."""

    def __init__(self, inside: bool, detokenizer: IncrementalDetokenizer) -> None:
        self._parser, self._detokenizer = ReasoningParser(inside), detokenizer
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """So far."""
        return self._num_tokens if self._parser.has_reasoning else 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for token_id in token_ids:
            if self._parser.has_ended:
                return
            self._parser.feed(self._detokenizer.push([token_id]))
            self._num_tokens += 1
