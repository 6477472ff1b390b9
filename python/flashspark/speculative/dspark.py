"""How DSpark proposes a block: logits of all slots from one draft forward, then the Markov head's walk."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.engine.model_runner import ModelRunner
from flashspark.kernels.estimator import RowEstimator, logit_of_largest
from flashspark.kernels.markov_walk import MarkovWalk, markov_walk
from flashspark.models.dspark import DSparkDraft

from .types import DraftBlock


class DSparkDrafter:
    """DSpark: every token drawn from the softmax of its slot's logits, corrected by the token before it.

    A batch of greedy requests alone proposes point masses; as soon as one draws, q is the whole vocabulary's. The
    signal is the confidence head's raw logit; without a head, logit(q_max) of the corrected logits at the request's
    temperature.
    """

    has_signal = True

    def __init__(self, runner: ModelRunner, draft: DSparkDraft) -> None:
        self._runner, self._draft = runner, draft
        self._forbidden_ids = torch.tensor([draft.config.mask_token_id], device=runner.device)
        self._markov = None if draft.markov is None else draft.markov.weights
        self.gamma = draft.config.gamma

    def propose(
        self,
        rows: Tensor,
        greedy: Tensor,
        temperature: Tensor,
        uniforms: Tensor | None,
        with_signal: bool = False,
        estimator: RowEstimator | None = None,
    ) -> DraftBlock:
        """See `Drafter`; confidence is left to its source."""
        walk, z = self.walk(rows, greedy, temperature, uniforms)
        signal = self._signal(walk, z, rows, temperature) if with_signal else None
        if walk.probs is not None:
            return DraftBlock(walk.tokens, candidate_ids=None, candidate_probs=walk.probs, signal=signal)
        ids = walk.tokens[..., None]
        ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        return DraftBlock(walk.tokens, candidate_ids=ids, candidate_probs=ones, signal=signal)

    def _signal(self, walk: MarkovWalk, z: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
        if self._draft.confidence is None:
            return logit_of_largest(walk.logits, temperature[:, None])  # 1 for greedy rows, as it should be
        anchors = self._runner.request_rows.anchors[rows, None]
        return self._draft.confidence_logits(z, torch.cat((anchors, walk.tokens[:, :-1]), dim=1))

    def walk(
        self, rows: Tensor, greedy: Tensor, temperature: Tensor, uniforms: Tensor | None
    ) -> tuple[MarkovWalk, Tensor]:
        """The drafts with their corrected logits, before they are made a block, and z [R, gamma, H] of their slots.

        Arguments as of `Drafter`.

        The last gamma rows of the block are the slots: all of them, or all but the anchor's.
        """
        config, target = self._draft.config, self._runner.target
        num_rows = config.draft_rows - config.gamma + self.gamma
        z = self._runner.draft_hidden(rows, num_rows)[:, -self.gamma :]
        by_slot = z.transpose(0, 1)  # [g, R, H]: the walk goes slot by slot
        logits = self._draft.scale_logits(target.logits(by_slot.flatten(0, 1)))
        markov = self._draft.markov
        projected = None if markov is None else markov.project(by_slot)
        walk = markov_walk(
            logits.view(self.gamma, rows.shape[0], -1).transpose(0, 1),
            self._runner.request_rows.anchors[rows],
            self._markov,
            None if projected is None else projected.transpose(0, 1),
            temperature,
            greedy,
            uniforms,
            self._forbidden_ids,
        )
        return walk, z
