"""All that a greedy step does after the argmax: accept, and move the requests on. On a GPU it is one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from .accept import accept_greedy, all_finite, block_tokens
from .commit_rows import commit_rows
from .dispatch import Implementation, runs_triton


def accept_step(
    best_ids: Tensor,
    best_logits: Tensor,
    block_rows: Tensor,
    drafts: Tensor,
    cutoff: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    anchors: Tensor,
    steps: Tensor,
    scratch_row: int,
    simulated: Tensor | None = None,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accepts drafts as `accept_greedy` and commits as `commit_rows`; `context_lens`, `anchors` and `steps` change.

    Slots of nobody name the scratch row, as many as there are. Its length is 0 afterwards; its anchor and step, and
    what such a slot returns, mean nothing.

    Args:
        best_ids, best_logits: int64 and float32 [M], the largest logit of each packed row.
        block_rows: int64 [R, W], the packed row of each block row; past the cutoff, any. R is at least 1.
        drafts: int64 [R, W - 1].
        cutoff: int64 [R], how many rows may be accepted, 1 … W.
        rows: int64 [R], request rows, distinct but for the scratch row.
        context_lens, anchors, steps: int64 [rows].
        simulated: int64 [R], drafts to accept whatever the target says, up to the cutoff; None: it decides.

    Returns:
        tokens int64 [R, W] of which the first so many are committed, how many int64 [R], whether the logits of all
        rows before the cutoff are finite bool [R], and the third of `accept_greedy` int64 [R].
    """
    if runs_triton(best_ids, implementation):
        from .triton import accept_step as twin

        return twin.accept_step(
            best_ids,
            best_logits,
            block_rows,
            drafts,
            cutoff,
            rows,
            context_lens,
            anchors,
            steps,
            scratch_row,
            simulated,
        )
    target_ids = best_ids[block_rows]
    num_accepted, following, num_matched = accept_greedy(target_ids, drafts, cutoff, "torch")
    if simulated is not None:
        num_accepted = torch.minimum(simulated, cutoff - 1)
        following = target_ids.gather(1, num_accepted[:, None]).squeeze(1)
    tokens, num_tokens = block_tokens(drafts, num_accepted, following), num_accepted + 1
    commit_rows(context_lens, anchors, rows, tokens, num_tokens, "torch")
    steps[rows] += 1
    context_lens[scratch_row] = 0
    return tokens, num_tokens, all_finite(best_logits[block_rows], cutoff), num_matched
