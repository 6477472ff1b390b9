"""Log-probabilities of one request on the host: which rows of its prompt are still wanted, what waits to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashspark.engine.model_runner import PrefillChunk
from flashspark.ipc import GenerateRequest, LogprobParams, TokenLogprobs
from flashspark.speculative.logprobs import PromptRows
from flashspark.speculative.sampling import LogprobRule
from flashspark.speculative.types import Logprobs


def wants_prompt_logprobs(message: GenerateRequest) -> bool:
    """Whether rows of its prompt have to be reported."""
    return message.logprobs is not None and message.logprobs.start < len(message.input_ids) - 1


def logprob_rule(params: LogprobParams) -> LogprobRule:
    """What is wanted of each position."""
    return LogprobRule(params.num_top, params.token_ids)


class PromptLogprobs:
    """Collects those of a prompt over its chunks, each position once, retractions or not.

    The row of position p tells of the token after it, so the last row wanted is the one before the anchor's.
    """

    def __init__(self, message: GenerateRequest, params: LogprobParams) -> None:
        self._ids, self._rule = message.input_ids, logprob_rule(params)
        self._next, self._end = params.start, len(message.input_ids) - 1
        self._collected = Logprobs()

    @property
    def first_row(self) -> int | None:
        """The position whose row has to be run next; None where no more are wanted."""
        return self._next if self._next < self._end else None

    def rows_of(self, start: int, num_tokens: int, at: int) -> PromptRows | None:
        """What a chunk of positions `start` … can tell, its rows being packed from row `at` on."""
        first, end = max(self._next, start), min(self._end, start + num_tokens)
        if first >= end:
            return None
        rows = range(at + first - start, at + end - start)
        return PromptRows(rows, self._ids[first + 1 : end + 1], self._rule)

    def add(self, found: Logprobs) -> None:
        """Keeps what the rows of `rows_of` told."""
        self._collected += found
        self._next += len(found.values)

    def take(self) -> TokenLogprobs | None:
        """What is to be sent; None where there is nothing."""
        collected, self._collected = self._collected, Logprobs()
        return to_message(collected, len(collected.values)) if collected.values else None


def rows_to_tell(
    asking: Iterable[PromptLogprobs | None], chunks: Sequence[PrefillChunk]
) -> list[tuple[PromptLogprobs, PromptRows]]:
    """Whose chunks have rows to tell, and which of the packed ones; `asking` has one entry per chunk."""
    found, at = [], 0
    for asks, chunk in zip(asking, chunks, strict=True):
        rows = asks.rows_of(chunk.start, len(chunk.token_ids), at) if asks is not None else None
        if asks is not None and rows is not None:
            found.append((asks, rows))
        at += len(chunk.token_ids)
    return found


def to_message(logprobs: Logprobs, num_tokens: int) -> TokenLogprobs:
    """The first `num_tokens` of them as they are sent."""
    return TokenLogprobs(
        logprobs.values[:num_tokens],
        logprobs.top_values[:num_tokens],
        logprobs.top_ids[:num_tokens],
        logprobs.listed_values[:num_tokens],
    )
