"""One decode step, stage by stage. Without a draft the block is the anchor alone: plain decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.engine.model_runner import ModelRunner

from .accept import accept
from .drafter import Drafter
from .layout import pack
from .sampling import SamplingRows, StepSampling
from .types import Accepted, DraftBlock, StepBatch


class SpeculativeWorker:
    """Drives draft, layout, verify, accept and commit over the runner's requests."""

    def __init__(self, runner: ModelRunner, sampling: SamplingRows, drafter: Drafter | None) -> None:
        self.runner, self.sampling, self.drafter = runner, sampling, drafter
        self.gamma = drafter.gamma if drafter else 0
        self.width = self.gamma + 1

    @torch.inference_mode()
    def decode(self, batch: StepBatch) -> Accepted:
        """Runs one step and commits it on the device; the caller handles the tokens on the host.

        Static verification: every request verifies as much of its block as its cap allows.
        """
        rows, request_rows = batch.rows, self.runner.request_rows
        step = self.sampling.begin_step(rows, batch.row_list, self.width)
        draft = self._draft(batch, step)
        verify_lens = batch.verify_caps
        layout = pack(request_rows, rows, draft.tokens, verify_lens, sum(batch.cap_list))
        logits = self.runner.verify(layout.input_ids, layout.queries)
        context_lens = request_rows.context_lens[rows]
        accepted = accept(logits, layout, draft, verify_lens, rows, context_lens, self.sampling, step)
        self._commit(rows, step, accepted)
        return accepted

    def _draft(self, batch: StepBatch, step: StepSampling) -> DraftBlock:
        """Drafts for the requests that can use it; the others get an empty block."""
        num_reqs = len(batch.row_list)
        members = [i for i, cap in enumerate(batch.cap_list) if cap > 1]
        uniforms = None if step.uniforms is None else step.uniforms[:, : self.gamma, 0]
        if self.drafter is None or not members:
            return _empty_block(num_reqs, self.gamma, 1, batch.rows.device, dense=False)
        if len(members) == num_reqs:
            return self.drafter.propose(batch.rows, step.greedy, step.temperature, uniforms)
        index = torch.tensor(members, device=batch.rows.device)
        some = self.drafter.propose(
            batch.rows[index],
            step.greedy[index],
            step.temperature[index],
            None if uniforms is None else uniforms[index],
        )
        num_candidates, dense = some.candidate_probs.shape[2], some.candidate_ids is None
        block = _empty_block(num_reqs, self.gamma, num_candidates, batch.rows.device, dense)
        block.tokens[index] = some.tokens
        if block.candidate_ids is not None and some.candidate_ids is not None:
            block.candidate_ids[index] = some.candidate_ids
        block.candidate_probs[index] = some.candidate_probs
        return block

    def _commit(self, rows: Tensor, step: StepSampling, accepted: Accepted) -> None:
        """Moves lengths, anchors and penalty counts on; K/V of the committed rows is in place already."""
        request_rows = self.runner.request_rows
        request_rows.context_lens[rows] += accepted.num_tokens
        request_rows.anchors[rows] = accepted.tokens.gather(1, accepted.num_tokens[:, None] - 1).squeeze(1)
        self.sampling.commit(rows, step, accepted.tokens, accepted.num_tokens)


def _empty_block(
    num_reqs: int, gamma: int, num_candidates: int, device: torch.device, dense: bool
) -> DraftBlock:
    tokens = torch.zeros(num_reqs, gamma, dtype=torch.int64, device=device)
    shape = (num_reqs, gamma, num_candidates)
    return DraftBlock(
        tokens=tokens,
        candidate_ids=None if dense else torch.zeros(shape, dtype=torch.int64, device=device),
        candidate_probs=torch.zeros(shape, dtype=torch.float32, device=device),
    )
