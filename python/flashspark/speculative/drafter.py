"""How a block is proposed. One interface; the families differ only in how rows become tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from flashspark.engine.model_runner import ModelRunner
from flashspark.kernels.estimator import RowEstimator
from flashspark.kernels.selector import (
    selector_walk,
    selector_walk_with_confidence,
    selector_walk_with_feature,
    top_candidates,
)
from flashspark.models.dflash import DFlashDraft
from flashspark.models.dflash2 import DFlash2Draft
from flashspark.models.dspark import DSparkDraft

from .confidence import ConfidenceSource, HeadConfidence
from .dspark import DSparkDrafter
from .estimator import AcceptanceEstimator
from .types import DraftBlock


class Drafter(Protocol):
    """Proposes `gamma` tokens after the anchor of each request."""

    gamma: int
    has_signal: bool  # whether a block can come with the signal that confidence is made of

    def propose(
        self,
        rows: Tensor,
        greedy: Tensor,
        temperature: Tensor,
        uniforms: Tensor | None,
        with_signal: bool = False,
        estimator: RowEstimator | None = None,
    ) -> DraftBlock:
        """Drafts for `rows` int64 [R].

        Args:
            greedy: bool [R], rows whose draft is an argmax.
            temperature: float32 [R], 1 for greedy rows.
            uniforms: float64 [R, gamma], one per draft; None when every row is greedy.
            with_signal: fill `DraftBlock.signal`, where `has_signal`.
            estimator: to fill `DraftBlock.confidence` with, where a kernel makes signal and confidence in one launch;
                looked at beside `with_signal` alone.
        """
        ...


class DFlashDrafter:
    """DFlash v1: every masked row's argmax, at any temperature, so q is a point mass."""

    has_signal = False

    def __init__(self, runner: ModelRunner, draft: DFlashDraft) -> None:
        self._runner, self._draft = runner, draft
        self._forbidden_ids = torch.tensor([draft.config.mask_token_id], device=runner.device)
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
    """DFlash2: the selector walks the rows' candidates left to right and draws from its own scores.

    The signal is logit(q_max) of the row that each token was drawn from.
    """

    has_signal = True

    def __init__(self, runner: ModelRunner, draft: DFlash2Draft) -> None:
        super().__init__(runner, draft)
        self._selector = draft.selector

    def propose(
        self,
        rows: Tensor,
        greedy: Tensor,
        temperature: Tensor,
        uniforms: Tensor | None,
        with_signal: bool = False,
        estimator: RowEstimator | None = None,
    ) -> DraftBlock:
        """See `Drafter`."""
        # In one piece, which head and selector both read.
        hidden = self._runner.draft_hidden(rows, self.gamma + 1)[:, 1:].contiguous()
        ids, scores = self._candidates(hidden, self._selector.top_k)
        walk = (
            scores,
            ids,
            self._runner.request_rows.anchors[rows],
            self._selector.project(hidden),
            self._selector.predecessor_codebook,
            self._selector.successor_codebook,
            temperature,
            greedy,
            scores if uniforms is None else uniforms,  # nobody reads noise when every row is greedy
            uniforms is not None,
        )
        if not with_signal:
            tokens, probs = selector_walk(*walk)
            return DraftBlock(tokens=tokens, candidate_ids=ids, candidate_probs=probs)
        if estimator is None:
            tokens, probs, feature = selector_walk_with_feature(*walk)
            return DraftBlock(tokens=tokens, candidate_ids=ids, candidate_probs=probs, signal=feature)
        tokens, probs, feature, confidence = selector_walk_with_confidence(*walk, rows, estimator)
        return DraftBlock(tokens, ids, probs, signal=feature, confidence=confidence)


def has_confidence_head(runner: ModelRunner) -> bool:
    """Whether the draft predicts its own acceptance, so that a calibration file means something."""
    return isinstance(runner.draft, DSparkDraft) and runner.draft.confidence is not None


def make_confidence_source(
    runner: ModelRunner, max_reqs: int, temperatures: Sequence[float] | None = None
) -> ConfidenceSource | None:
    """What turns the drafter's signal into confidence: the draft's own head, or the online estimator.

    None for a draft without a signal (DFlash v1), and without a draft. `temperatures` [gamma] calibrate a head.
    """
    draft = runner.draft
    if draft is not None and has_confidence_head(runner):
        return HeadConfidence(max_reqs, temperatures or [1.0] * draft.config.gamma, runner.device)
    if isinstance(draft, DSparkDraft | DFlash2Draft):
        return AcceptanceEstimator(max_reqs, draft.config.gamma, runner.device)
    return None


def make_scratch_source(runner: ModelRunner, max_reqs: int) -> ConfidenceSource:
    """A source that costs what the serving one costs, for synthetic requests: whatever it learns, it is never ready."""
    source = make_confidence_source(runner, max_reqs)
    assert source is not None, "the draft has no confidence"
    if isinstance(source, AcceptanceEstimator):
        return AcceptanceEstimator(max_reqs, source.gamma, runner.device, warmup_refits=sys.maxsize)
    return source


def make_drafter(runner: ModelRunner) -> Drafter | None:
    """The drafter that fits the runner's draft, or None without one."""
    if isinstance(runner.draft, DSparkDraft):
        return DSparkDrafter(runner, runner.draft)
    if isinstance(runner.draft, DFlash2Draft):
        return DFlash2Drafter(runner, runner.draft)
    return DFlashDrafter(runner, runner.draft) if runner.draft is not None else None
