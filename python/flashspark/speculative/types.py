"""What flows between the stages of a decode step. R requests, W = gamma + 1 rows per full block, M packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from flashspark.attention.interface import RaggedQueries

from .grammar import GrammarState
from .planner import Plan


@dataclass(frozen=True)
class StepBatch:
    """What the host hands over for one decode step.

    Host and device copies of the same small facts travel together, so that no stage has to ask the device.
    """

    rows: Tensor  # int64 [R], request rows
    row_list: list[int]
    verify_caps: Tensor  # int64 [R], most rows this step may verify: 1 … W
    cap_list: list[int]
    plan: Plan | None = None  # None: static, every request verifies up to its cap
    grammars: Mapping[int, GrammarState] = field(default_factory=dict)  # by batch index


@dataclass(frozen=True)
class DraftBlock:
    """Drafts and the distributions they were drawn from (a point mass for greedy rows), mostly sparse ones.

    Requests that were not drafted have zeros everywhere, and a verify length of 1; where that is all of them, gamma
    is 0.
    """

    tokens: Tensor  # int64 [R, gamma]
    candidate_ids: Tensor | None  # int64 [R, gamma, K]; None: every token is a candidate, in order, K = V
    candidate_probs: Tensor  # float32 [R, gamma, K]
    # float32 [R, gamma], what confidence is made of (`ConfidenceSource`); None where nobody asked, or none exists.
    signal: Tensor | None = None
    confidence: Tensor | None = (
        None  # float32 [R, gamma] of `signal`; None where the source has yet to predict
    )


@dataclass(frozen=True)
class RaggedLayout:
    """The packed verify rows. Row i of request r is packed row `queries.qo_indptr[r] + i`.

    Rows from `queries.qo_indptr[-1]` on are padding up to a tier: id 0 at position 0, written to the scratch slot.
    """

    input_ids: Tensor  # int64 [M]
    queries: RaggedQueries
    requests: Tensor  # int64 [M]: batch index of the request that each packed row is of; any, for padding
    block_rows: Tensor  # int64 [R, W]: packed row of block row i; past the verify length, of the last one
    cutoff: Tensor  # int64 [R]: rows that may be accepted, where the limits were given that cut it


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of consecutive tokens of one request, on the host. Inner lists as its `LogprobRule` asks."""

    values: list[float] = field(default_factory=list)  # one per token
    top_values: list[list[float]] = field(
        default_factory=list
    )  # by token, descending; empty where none are asked for
    top_ids: list[list[int]] = field(default_factory=list)
    listed_values: list[list[float]] = field(default_factory=list)  # by token, of the rule's ids

    def __add__(self, later: Logprobs) -> Logprobs:
        """Of these tokens and of those that follow them."""
        return Logprobs(
            self.values + later.values,
            self.top_values + later.top_values,
            self.top_ids + later.top_ids,
            self.listed_values + later.listed_values,
        )


@dataclass(frozen=True)
class Accepted:
    """What a step commits: `tokens[r, :num_tokens[r]]` are accepted drafts and the token that follows them."""

    tokens: Tensor  # int64 [R, W], or [R, 1] where nobody was drafted for
    num_tokens: Tensor  # int64 [R], 1 … W
    verify_lens: Tensor  # int64 [R], rows that could be accepted: num_tokens is at most that
    num_rows_run: int  # packed rows that the target ran, padding included
    is_finite: (
        Tensor  # bool [R]; False: the target gave no number to choose by, and nothing of the row can be used
    )
    # What only records look at.
    num_matched: (
        Tensor  # int64 [R], drafts that would have been accepted without a cutoff, junk past the rows run
    )
    drafts: Tensor  # int64 [R, gamma]; zeros where nothing was drafted
    confidence: Tensor | None = None  # float32 [R, gamma] of the drafts; None where nobody asked for it
    # What log-probabilities are made of: float32 [A, W, V], the logits that requests which adjust them were judged by,
    # in the order of `StepSampling.adjusted`; None where nobody does.
    adjusted_logits: Tensor | None = None
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)  # by batch index, of those who ask


def first_requests(accepted: Accepted, num_reqs: int) -> Accepted:
    """Of the first `num_reqs` slots, views; nobody's log-probabilities are among them."""
    return replace(
        accepted,
        tokens=accepted.tokens[:num_reqs],
        num_tokens=accepted.num_tokens[:num_reqs],
        verify_lens=accepted.verify_lens[:num_reqs],
        is_finite=accepted.is_finite[:num_reqs],
        num_matched=accepted.num_matched[:num_reqs],
        drafts=accepted.drafts[:num_reqs],
    )
