"""The accept stage: target rows and drafts in, committed tokens out. Greedy and drawn requests share a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.kernels.accept import accept_greedy, accept_sampled

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
) -> Accepted:
    """Applies each request's rule along its drafted prefix.

    Args:
        logits: float32 [M, V], the packed verify rows.
        verify_lens, rows, context_lens: int64 [R]; `context_lens` is n before the step.
    """
    drafts = draft.tokens
    best = logits.max(-1)
    target_ids = best.indices[layout.block_rows]
    # Rows past the cutoff, which cap-accept computes too, may be anything. The maximum of a row with a NaN is NaN.
    is_cut = torch.arange(drafts.shape[1] + 1, device=drafts.device) >= verify_lens[:, None]
    is_finite = (best.values.isfinite()[layout.block_rows] | is_cut).all(1)
    adjusted_logits: Tensor | None = None
    if step.adjusted is not None:
        chosen = step.adjusted
        adjusted_logits = sampling.adjust(
            step.adjusted_rows, logits[layout.block_rows[chosen]], drafts[chosen], context_lens[chosen]
        )
        best = adjusted_logits.max(-1)
        target_ids[chosen] = best.indices
        is_finite[chosen] &= (best.values.isfinite() | is_cut[chosen]).all(1)
    num_accepted, following = accept_greedy(target_ids, drafts, verify_lens)

    if step.sampled is not None:
        assert step.uniforms is not None
        chosen = step.sampled
        chosen_logits = logits[layout.block_rows[chosen]]
        if adjusted_logits is not None:
            places, sources = step.adjusted_among_sampled
            chosen_logits[places] = adjusted_logits[sources]
        num_accepted[chosen], following[chosen] = accept_sampled(
            sampling.probs(rows[chosen], chosen_logits, step.truncates),
            drafts[chosen],
            None if draft.candidate_ids is None else draft.candidate_ids[chosen],
            draft.candidate_probs[chosen],
            verify_lens[chosen],
            step.uniforms[chosen, :-1, 1],
            step.uniforms[chosen, :, 2],
        )

    tokens = torch.cat((drafts, drafts.new_zeros(drafts.shape[0], 1)), dim=1)
    tokens.scatter_(1, num_accepted[:, None], following[:, None])
    return Accepted(tokens, num_accepted + 1, verify_lens, num_rows_run=logits.shape[0], is_finite=is_finite)
