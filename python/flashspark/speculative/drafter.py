"""How a block is proposed. One interface; the families differ only in how rows become tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flashspark.engine.model_runner import ModelRunner
from flashspark.kernels.selector import selector_walk, top_candidates
from flashspark.models.dflash import DFlashDraft
from flashspark.models.dflash2 import DFlash2Draft
from flashspark.models.dspark import DSparkDraft

from .dspark import DSparkDrafter
from .types import DraftBlock


class Drafter(Protocol):
    """Proposes `gamma` tokens after the anchor of each request."""

    gamma: int

    def propose(
        self, rows: Tensor, greedy: Tensor, temperature: Tensor, uniforms: Tensor | None
    ) -> DraftBlock:
        """Drafts for `rows` int64 [R].

        Args:
            greedy: bool [R], rows whose draft is an argmax.
            temperature: float32 [R], 1 for greedy rows.
            uniforms: float64 [R, gamma], one per draft; None when every row is greedy.
        """
        ...


class DFlashDrafter:
    """DFlash v1: every masked row's argmax, at any temperature, so q is a point mass."""

    def __init__(self, runner: ModelRunner, draft: DFlashDraft) -> None:
        self._runner, self._draft = runner, draft
        self._forbidden_ids = torch.tensor([draft.config.mask_token_id], device=runner.device)
        self.gamma = draft.config.gamma

    def propose(
        self, rows: Tensor, greedy: Tensor, temperature: Tensor, uniforms: Tensor | None
    ) -> DraftBlock:
        """See `Drafter`; neither temperature nor noise plays a part."""
        hidden = self._runner.draft_hidden(rows, self.gamma + 1)[:, 1:]
        ids, _ = self._candidates(hidden, 1)
        ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        return DraftBlock(tokens=ids[..., 0], candidate_ids=ids, candidate_probs=ones)

    def _candidates(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Best `k` ids and their logits, [R, gamma, k] each; the mask token is never among them."""
        logits = self._draft.scale_logits(self._runner.target.logits(hidden.flatten(0, 1)))
        ids, scores = top_candidates(logits, k, self._forbidden_ids)
        shape = (hidden.shape[0], self.gamma, k)
        return ids.view(shape), scores.view(shape)


class DFlash2Drafter(DFlashDrafter):
    """DFlash2: the selector walks the rows' candidates left to right and draws from its own scores."""

    def __init__(self, runner: ModelRunner, draft: DFlash2Draft) -> None:
        super().__init__(runner, draft)
        self._selector = draft.selector

    def propose(
        self, rows: Tensor, greedy: Tensor, temperature: Tensor, uniforms: Tensor | None
    ) -> DraftBlock:
        """See `Drafter`."""
        hidden = self._runner.draft_hidden(rows, self.gamma + 1)[:, 1:]
        ids, scores = self._candidates(hidden, self._selector.top_k)
        tokens, probs = selector_walk(
            scores,
            ids,
            self._runner.request_rows.anchors[rows],
            self._selector.project(hidden),
            self._selector.predecessor_codebook,
            self._selector.successor_codebook,
            temperature,
            greedy,
            scores[..., 0] if uniforms is None else uniforms,  # nobody reads noise when every row is greedy
            any_sampled=uniforms is not None,
        )
        return DraftBlock(tokens=tokens, candidate_ids=ids, candidate_probs=probs)


def make_drafter(runner: ModelRunner) -> Drafter | None:
    """The drafter that fits the runner's draft, or None without one."""
    if isinstance(runner.draft, DSparkDraft):
        return DSparkDrafter(runner, runner.draft)
    if isinstance(runner.draft, DFlash2Draft):
        return DFlash2Drafter(runner, runner.draft)
    return DFlashDrafter(runner, runner.draft) if runner.draft is not None else None
