"""The accept stage: target rows and drafts in, committed tokens out. Greedy and drawn requests share a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.kernels.accept import accept_greedy, accept_sampled
from flashspark.kernels.token_mask import apply_token_masks
from flashspark.kernels.top_tokens import best_tokens

from .grammar import StepMasks
from .sampling import SamplingRows, StepSampling
from .types import Accepted, DraftBlock, RaggedLayout


def accept(
    logits: Tensor,
    layout: RaggedLayout,
    draft: DraftBlock,
    verify_lens: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    sampling: SamplingRows,
    step: StepSampling,
    masks: StepMasks | None = None,
) -> Accepted:
    """Applies each request's rule along its drafted prefix.

    Args:
        logits: float32 [M, V], the packed verify rows.
        verify_lens, rows, context_lens: int64 [R]; `context_lens` is n before the step.
        masks: of the requests with a grammar; None where there is none.
    """
    drafts = draft.tokens
    best_ids, best_logits = best_tokens(logits)
    target_ids = best_ids[layout.block_rows]
    # Rows past the cutoff, which cap-accept computes too, may be anything. The maximum of a row with a NaN is NaN.
    is_cut = torch.arange(drafts.shape[1] + 1, device=drafts.device) >= verify_lens[:, None]
    is_finite = (best_logits.isfinite()[layout.block_rows] | is_cut).all(1)
    adjusted_logits: Tensor | None = None
    if step.adjusted is not None:
        chosen = step.adjusted
        adjusted_logits = sampling.adjust(
            step.adjusted_rows, logits[layout.block_rows[chosen]], drafts[chosen], context_lens[chosen]
        )
        if masks is not None:
            places = masks.places(step.adjusted_list, adjusted_logits.shape[1])
            apply_token_masks(adjusted_logits.flatten(0, 1), places, masks.masks)
        target_ids[chosen], best_logits = best_tokens(adjusted_logits)
        is_finite[chosen] &= (best_logits.isfinite() | is_cut[chosen]).all(1)
    num_accepted, following, num_matched = accept_greedy(target_ids, drafts, verify_lens)

    if step.sampled is not None:
        assert step.uniforms is not None
        chosen = step.sampled
        probs, block_rows = _target_probs(logits, layout, rows, adjusted_logits, sampling, step)
        num_accepted[chosen], following[chosen], num_matched[chosen] = accept_sampled(
            probs,
            block_rows,
            drafts[chosen],
            None if draft.candidate_ids is None else draft.candidate_ids[chosen],
            draft.candidate_probs[chosen],
            verify_lens[chosen],
            step.uniforms[chosen, :-1, 1],
            step.uniforms[chosen, :, 2],
        )

    tokens = torch.cat((drafts, drafts.new_zeros(drafts.shape[0], 1)), dim=1)
    tokens.scatter_(1, num_accepted[:, None], following[:, None])
    return Accepted(
        tokens=tokens,
        num_tokens=num_accepted + 1,
        verify_lens=verify_lens,
        num_rows_run=logits.shape[0],
        is_finite=is_finite,
        num_matched=num_matched,
        drafts=drafts,
        adjusted_logits=adjusted_logits,
    )


def _target_probs(
    logits: Tensor,
    layout: RaggedLayout,
    rows: Tensor,
    adjusted_logits: Tensor | None,
    sampling: SamplingRows,
    step: StepSampling,
) -> tuple[Tensor, Tensor]:
    """What requests that draw are drawn from: float32 [N, V], and where each of their block rows is, int64 [S, W].

    Either of every packed row or of full blocks of those that draw, whichever is less: trimmed blocks must not pay
    for rows that nobody verified.
    """
    assert step.sampled is not None
    block_rows = layout.block_rows[step.sampled]
    if adjusted_logits is None and logits.shape[0] <= block_rows.numel():
        return sampling.probs(rows[layout.requests], logits, step.truncates), block_rows
    chosen_logits = logits[block_rows]
    if adjusted_logits is not None:
        places, sources = step.adjusted_among_sampled
        chosen_logits[places] = adjusted_logits[sources]
    lane_rows = rows[step.sampled].repeat_interleave(block_rows.shape[1])
    probs = sampling.probs(lane_rows, chosen_logits.flatten(0, 1), step.truncates)
    return probs, torch.arange(block_rows.numel(), device=logits.device).view_as(block_rows)
