"""Moves requests on by what a step committed."""

from __future__ import annotations

from torch import Tensor

from .dispatch import Implementation, runs_triton


def commit_rows(
    context_lens: Tensor,
    anchors: Tensor,
    rows: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    implementation: Implementation | None = None,
) -> None:
    """Adds `num_tokens` to the lengths and makes the last committed token the anchor, in place.

    Args:
        context_lens, anchors: int64 [rows].
        rows: int64 [R], distinct.
        tokens: int64 [R, W], of which the first `num_tokens[r]` are committed.
        num_tokens: int64 [R], 1 … W.
    """
    if runs_triton(rows, implementation):
        from .triton import commit_rows as twin

        twin.commit_rows(context_lens, anchors, rows, tokens, num_tokens)
        return
    context_lens[rows] += num_tokens
    anchors[rows] = tokens.gather(1, num_tokens[:, None] - 1).squeeze(1)
