"""The accept stage: target rows and drafts in, committed tokens out. Greedy and drawn requests share a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashspark.engine.request_rows import RequestRows
from flashspark.kernels.accept import accept_greedy, accept_sampled, all_finite, block_tokens
from flashspark.kernels.commit_rows import commit_rows
from flashspark.kernels.token_mask import apply_token_masks
from flashspark.kernels.top_tokens import best_tokens
from flashspark.upload import upload

from .grammar import StepMasks
from .sampling import SamplingRows, StepSampling
from .types import Accepted, DraftBlock, RaggedLayout


@dataclass(frozen=True)
class AcceptRule:
    """What becomes of drafts when step times are measured: `SGLANG_SIMULATE_ACC_LEN`.

    None: they are judged by the target. 0: none is accepted, and every step commits the target's own next token, which
    is still exact. More: so many are accepted on average, whatever the target says; the text is nonsense then.
    """

    simulated_drafts: float | None = None

    def cutoff(self, verify_lens: Tensor) -> Tensor:
        """How far drafts may be accepted, of `verify_lens` int64 [R]."""
        return torch.ones_like(verify_lens) if self.simulated_drafts == 0 else verify_lens

    def simulated(self, sampling: SamplingRows, rows: Tensor) -> Tensor | None:
        """Drafts to accept in this step of `rows`, int64 [R]; None where the target decides.

        Fractions are dithered over a request's steps, so that each step is one of the two nearest numbers.
        """
        if not self.simulated_drafts:
            return None
        return sampling.dithered(rows, self.simulated_drafts)


def commit(
    request_rows: RequestRows, sampling: SamplingRows, rows: Tensor, step: StepSampling, accepted: Accepted
) -> None:
    """Moves lengths, anchors and penalty counts on; K/V of the committed rows is in place already."""
    tokens, num_tokens = accepted.tokens, accepted.num_tokens
    commit_rows(request_rows.context_lens, request_rows.anchors, rows, tokens, num_tokens)
    sampling.commit(rows, step, tokens, num_tokens)


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
    simulated: Tensor | None = None,
) -> Accepted:
    """Applies each request's rule along its drafted prefix.

    Args:
        logits: float32 [M, V], the packed verify rows.
        verify_lens, rows, context_lens: int64 [R]; `context_lens` is n before the step.
        masks: of the requests with a grammar; None where there is none.
        simulated: int64 [R], drafts to accept whatever the target says; None: it decides.
    """
    drafts = draft.tokens
    best_ids, best_logits = best_tokens(logits)
    target_ids = best_ids[layout.block_rows]
    # Rows past the cutoff, which cap-accept computes too, may be anything. The maximum of a row with a NaN is NaN.
    is_finite = all_finite(best_logits[layout.block_rows], verify_lens)
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
        is_finite[chosen] &= all_finite(best_logits, verify_lens[chosen])
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

    if simulated is not None:
        num_accepted = torch.minimum(simulated, verify_lens - 1)
        following = target_ids.gather(1, num_accepted[:, None]).squeeze(1)
    return Accepted(
        tokens=block_tokens(drafts, num_accepted, following),
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
        if places:
            chosen_logits[upload(places, logits.device)] = adjusted_logits[upload(sources, logits.device)]
    lane_rows = rows[step.sampled].repeat_interleave(block_rows.shape[1])
    probs = sampling.probs(lane_rows, chosen_logits.flatten(0, 1), step.truncates)
    return probs, torch.arange(block_rows.numel(), device=logits.device).view_as(block_rows)
