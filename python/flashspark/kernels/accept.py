"""Cutoff accept: how much of each drafted prefix the target keeps, and the token that follows it.

Target row i of a request is its distribution after the anchor and i drafts. A request whose verify length is L has
rows 0 … L-1; draft i (0-based) may be accepted only if i < L - 1. Rows and q past the cutoff may hold anything, NaN
included, and drafts there any token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton
from .target_probs import sample_categorical


def _accepted_prefix(matches: Tensor, verify_lens: Tensor) -> tuple[Tensor, Tensor]:
    """`matches` bool [R, gamma], `verify_lens` [R] -> leading matches below the cutoff, and all, int64 [R] each."""
    num_matched = matches.to(torch.int64).cumprod(1).sum(1)
    return torch.minimum(num_matched, verify_lens - 1), num_matched


def accept_greedy(
    target_ids: Tensor, drafts: Tensor, verify_lens: Tensor, implementation: Implementation | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Longest drafted prefix that equals the target's argmax; then the argmax of the row after it.

    Args:
        target_ids: int64 [R, gamma + 1], argmax per row.
        drafts: int64 [R, gamma].
        verify_lens: int64 [R], 1 … gamma + 1.

    Returns:
        number of accepted drafts int64 [R], following token int64 [R], and how many drafts would have been accepted
        without the cutoff int64 [R], which means something as far as the rows past it do.
    """
    if runs_triton(target_ids, implementation):
        from .triton import accept as twin

        return twin.accept_greedy(target_ids, drafts, verify_lens)
    num_accepted, num_matched = _accepted_prefix(target_ids[:, :-1] == drafts, verify_lens)
    return num_accepted, target_ids.gather(1, num_accepted[:, None]).squeeze(1), num_matched


def all_finite(best_logits: Tensor, verify_lens: Tensor) -> Tensor:
    """Whether the largest logits of all rows below the cutoff are finite: float [R, W], int64 [R] -> bool [R]."""
    is_cut = torch.arange(best_logits.shape[1], device=best_logits.device) >= verify_lens[:, None]
    return (best_logits.isfinite() | is_cut).all(1)


def block_tokens(drafts: Tensor, num_accepted: Tensor, following: Tensor) -> Tensor:
    """`drafts` [R, gamma] with the following token [R] at `num_accepted` [R]: int64 [R, gamma + 1]."""
    tokens = torch.cat((drafts, drafts.new_zeros(drafts.shape[0], 1)), dim=1)
    return tokens.scatter_(1, num_accepted[:, None], following[:, None])


def accept_sampled(
    probs: Tensor,
    block_rows: Tensor,
    drafts: Tensor,
    candidate_ids: Tensor | None,
    candidate_probs: Tensor,
    verify_lens: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative sampling (Leviathan et al. 2023) with drafts drawn from sparse or dense distributions.

    Draft d of row i is kept iff u * q_i(d) < p_i(d). At the first rejection the following token is drawn from
    max(p - q, 0) over the whole vocabulary; where the block or the cutoff ended without one, from p itself.

    Args:
        probs: float32 [N, V], the target's p, one row for each verified block row; others may be among them.
        block_rows: int64 [R, gamma + 1], where in `probs` each block row is; past the cutoff, anywhere.
        drafts: int64 [R, gamma].
        candidate_ids: int64 [R, gamma, K], distinct within a row; None where K is V and candidate i is token i.
        candidate_probs: float32 [R, gamma, K], the q each draft was drawn from; zero off the candidates.
        verify_lens: int64 [R].
        accept_uniforms: float64 [R, gamma].
        final_uniforms: float64 [R, gamma + 1]; only the entry of the row after the accepted prefix is used.

    Returns:
        number of accepted drafts, following token, accepted drafts without the cutoff: as `accept_greedy`.
    """
    if runs_triton(probs, implementation):
        from .triton import sampling

        return sampling.accept_sampled(
            probs,
            block_rows,
            drafts,
            candidate_ids,
            candidate_probs,
            verify_lens,
            accept_uniforms,
            final_uniforms,
        )
    num_rows = block_rows.shape[1]
    if num_rows == 1:  # nothing drafted
        none = torch.zeros_like(verify_lens)
        return none, sample_categorical(probs[block_rows[:, 0]], final_uniforms[:, 0]), none
    p_draft = probs[block_rows[:, :-1], drafts]
    if candidate_ids is None:
        q_draft = candidate_probs.gather(2, drafts[..., None]).squeeze(2)
    else:
        q_draft = (candidate_probs * (candidate_ids == drafts[..., None])).sum(2)
    num_accepted, num_matched = _accepted_prefix(accept_uniforms * q_draft < p_draft, verify_lens)

    row = num_accepted[:, None]
    weights = probs[block_rows.gather(1, row).squeeze(1)]
    rejected = num_accepted < verify_lens - 1
    # Rows past the last draft have no q; clamp the index and mask.
    draft_row = num_accepted.clamp(max=num_rows - 2)[:, None, None].expand(-1, 1, candidate_probs.shape[2])
    q = torch.where(rejected[:, None], candidate_probs.gather(1, draft_row).squeeze(1), 0.0)
    if candidate_ids is None:
        residual = (weights - q).clamp_(min=0.0)
    else:
        residual = weights.scatter_add(1, candidate_ids.gather(1, draft_row).squeeze(1), -q).clamp_(min=0.0)
    # p = q up to rounding leaves no residual mass, though a rejection was drawn: p is then the right fallback.
    has_mass = residual.sum(1, keepdim=True) > 0
    weights = torch.where(has_mass, residual, weights)
    return num_accepted, sample_categorical(weights, final_uniforms.gather(1, row).squeeze(1)), num_matched
