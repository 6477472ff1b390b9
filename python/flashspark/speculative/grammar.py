"""Grammars inside a step: where each request stands in its own, and what that allows at each of its block rows.

What row i may emit depends on the i drafts before it, so the drafts are read to the host within the step, the one
place where a step does so. The copy starts before the target runs and is waited for once it is under way. Each block
is walked up to the first draft that its grammar refuses: nothing can be accepted there, and the rows after it stay as
they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .relay import CopyEngine, ImmediateCopies, PendingCopy, StreamCopies

logger = logging.getLogger(__name__)


class Look(NamedTuple):
    """What follows at one point of a text, as a grammar has it."""

    mask: Tensor  # int32 [ceil(V / 32)], the tokens that may
    is_completed: bool  # the text so far matches


class Matcher(Protocol):
    """A text on its way through a grammar. It knows no stop tokens: ends are this module's affair."""

    def look(self) -> Look:
        """What follows here. RuntimeError, here and below: nobody can tell any more."""
        ...

    def advance(self, tokens: Sequence[int]) -> list[Look]:
        """Takes the first token, which may follow, and those after it as long as they may; what follows each."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes the latest tokens back."""
        ...


class Standing(Enum):
    """What can follow the output."""

    OPEN = "a token"
    ENDED = "nothing: the grammar is matched and cannot go on"
    SUPPRESSED = "only stop tokens go on from here, and min_new_tokens (min_tokens) suppresses them"
    STUCK = "no token of the model's vocabulary goes on from here"
    FAILED = "the grammar is too complex to be followed from here"


class _Place(NamedTuple):
    """A point of the output: what can follow, and what a row there may emit, stop ids included."""

    standing: Standing
    grammar_mask: Tensor  # int32 [ceil(V / 32)]
    mask: Tensor  # int32 [ceil(V / 32)]

    def allows(self, token: int) -> bool:
        """Whether the grammar goes on with `token`."""
        return is_allowed(self.grammar_mask, token)


def is_allowed(mask: Tensor, token: int) -> bool:
    """The bit of `token` in int32 [ceil(V / 32)]."""
    return bool(int(mask[token // 32]) >> token % 32 & 1)


class GrammarState:
    """One request's place in its grammar: behind the committed output, or ahead of it by walked drafts.

    Lives as long as the request does, retractions included.
    """

    def __init__(
        self, matcher: Matcher, vocab_size: int, stop_ids: Sequence[int], min_new_tokens: int = 0
    ) -> None:
        """`stop_ids` may follow wherever the text so far matches the grammar, and nowhere before `min_new_tokens`."""
        self._matcher, self._min_new_tokens = matcher, min_new_tokens
        nothing = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
        self._stop_words = nothing.clone()
        for token_id in stop_ids:
            self._stop_words[token_id // 32] |= _bit(token_id)
        self._vocabulary = ~nothing  # matchers may set bits past its end
        if vocab_size % 32:
            self._vocabulary[-1] = (1 << vocab_size % 32) - 1
        self._num_tokens = 0  # committed
        self._nowhere, self._has_failed = _Place(Standing.FAILED, nothing, nothing), False
        self._ahead: list[int] = []  # drafts that the matcher has taken and nobody has committed yet
        self._places = [self._place(matcher.look(), 0)]  # after the output, then after each of `_ahead`

    @property
    def standing(self) -> Standing:
        """What can follow the committed output."""
        return self._places[0].standing

    def walk(self, drafts: Sequence[int]) -> list[Tensor]:
        """What block rows 0, 1, … may emit: int32 [ceil(V / 32)] each, of as many rows as can matter."""
        self._return()
        if drafts and self._places[-1].allows(drafts[0]):
            places = self._advance(drafts)
            self._places += places
            self._ahead += drafts[: len(places)]
        # Where nothing can follow the request is over, whatever the row there emits.
        return [place.mask for place in takewhile(lambda p: p.standing is Standing.OPEN, self._places)]

    def push(self, token: int) -> bool:
        """The next token of the output, no stop id; False, and nothing else, if the grammar refuses it. `standing`
        says whether the output can go on."""
        if self._ahead and self._ahead[0] == token:
            del self._ahead[0], self._places[0]
            self._num_tokens += 1
            return True
        self._return()
        if self.standing is Standing.FAILED:
            return True
        if not self._places[0].allows(token):
            return False
        self._places = self._advance([token])
        self._num_tokens += 1
        return True

    def _return(self) -> None:
        """Back to the committed output."""
        if self._ahead and not self._has_failed:
            try:
                self._matcher.rollback(len(self._ahead))
            except RuntimeError as error:
                self._failed(error)
        self._ahead.clear()
        # Where a matcher that failed stands nobody knows, so that it is not asked again.
        self._places = [self._nowhere] if self._has_failed else self._places[:1]

    def _advance(self, tokens: Sequence[int]) -> list[_Place]:
        """The places that follow the committed output."""
        try:
            looks = self._matcher.advance(tokens)
            return [self._place(look, self._num_tokens + i) for i, look in enumerate(looks, start=1)]
        except (
            RuntimeError
        ) as error:  # the library's limits, or those of time and memory: this request alone ends
            return [self._failed(error)]

    def _failed(self, error: RuntimeError) -> _Place:
        logger.warning("a grammar cannot be followed any further: %s", error)
        self._has_failed = True
        return self._nowhere

    def _place(self, look: Look, num_tokens: int) -> _Place:
        """After `num_tokens` of output. The end of a grammar wins over `min_new_tokens`."""
        grammar_mask, is_completed = look.mask & self._vocabulary, look.is_completed
        mask = grammar_mask
        if num_tokens < self._min_new_tokens:
            mask = grammar_mask & ~self._stop_words
        if mask.any():
            standing = Standing.OPEN
        elif is_completed:
            standing = Standing.ENDED
        else:
            standing = Standing.SUPPRESSED if grammar_mask.any() else Standing.STUCK
        if is_completed and num_tokens >= self._min_new_tokens:
            mask = mask | self._stop_words
        return _Place(standing, grammar_mask, mask)


def _bit(token_id: int) -> int:
    """The bit of a token in its int32 word, whose highest one is the sign."""
    place = token_id % 32
    return 1 << place if place < 31 else -(1 << 31)


@dataclass(frozen=True)
class StepMasks:
    """What grammars allow in one step, for the block rows that matter: `masks[k]` is of row `rows[k]` of the request
    at batch index `requests[k]`."""

    requests: list[int]
    rows: list[int]
    masks: Tensor  # int32 [K, ceil(V / 32)]

    def places(self, members: Sequence[int], width: int) -> Tensor:
        """Their rows in the logits [len(members) * width, V] of the batch indices `members`: int64 [K]."""
        first_row = {request: i * width for i, request in enumerate(members)}
        places = [first_row[request] + row for request, row in zip(self.requests, self.rows, strict=True)]
        return torch.tensor(places, device=self.masks.device)


class BlockReader:
    """Reads the drafts of constrained requests to the host and walks them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: CopyEngine = StreamCopies(device) if device.type == "cuda" else ImmediateCopies()

    def start(self, grammars: Mapping[int, GrammarState], tokens: Tensor, num_rows: Tensor) -> PendingBlocks:
        """Starts the copy.

        Args:
            grammars: by batch index; not empty.
            tokens: int64 [R, gamma], the step's drafts.
            num_rows: int64 [R], block rows that can matter for each request.
        """
        members = list(grammars)
        blocks = torch.cat((num_rows[:, None], tokens), 1)[torch.tensor(members, device=self._device)]
        target = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=self._device.type == "cuda")
        return PendingBlocks(grammars, blocks, target, self._copies.start(blocks, target))


@dataclass(frozen=True)
class PendingBlocks:
    """Drafts on their way to the host."""

    grammars: Mapping[int, GrammarState]
    source: Tensor  # held until the copy has ended
    blocks: Tensor  # int64 [members, 1 + gamma]: rows that matter, drafts
    copy: PendingCopy

    def masks(self) -> StepMasks:
        """Waits for the drafts and walks them."""
        self.copy.wait_on_host()
        requests: list[int] = []
        rows: list[int] = []
        masks: list[Tensor] = []
        for (request, grammar), (num_rows, *drafts) in zip(
            self.grammars.items(), self.blocks.tolist(), strict=True
        ):
            walked = grammar.walk(drafts[: num_rows - 1])
            requests += [request] * len(walked)
            rows += range(len(walked))
            masks += walked
        # No masks at all: every one of these requests is stuck, and ends with this step.
        stacked = torch.stack(masks) if masks else torch.zeros(0, 1, dtype=torch.int32)
        return StepMasks(requests, rows, stacked.to(self.source.device))
