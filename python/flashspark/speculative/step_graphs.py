"""A decode step as three pieces of fixed shape, so that they can be captured: draft, verify, greedy accept.

A shape is a `TierKey`: R request slots and T packed rows. One family serves all modes: a verify piece allocates the
budget, packs and runs the target; what a mode means is in numbers that the host uploads before it (`StepNumbers`).
Slots that no request takes point at the scratch row and verify nothing: attention and packing pass over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashspark.engine.graph_runner import GraphRunner, StepRunner
from flashspark.engine.model_runner import ModelRunner
from flashspark.kernels.accept_step import accept_step
from flashspark.kernels.allocate import allocate
from flashspark.kernels.top_tokens import best_tokens
from flashspark.upload import upload

from .accept import AcceptRule
from .confidence import ConfidenceSource
from .drafter import Drafter
from .layout import pack
from .sampling import SamplingRows
from .tiers import TierGrid, TierKey, capture_lens
from .types import Accepted, DraftBlock, RaggedLayout


class StepNumbers(NamedTuple):
    """What the host decides of a step; lists and arrays of one entry per request.

    Static: floors and least_run are the caps. Cap-accept: least_run are the caps, so that all rows are run whatever may
    be accepted. Compact: least_run is 0, and what is allocated is run.
    """

    rows: Sequence[int]
    caps: Sequence[int] | NDArray[np.int64]
    floors: Sequence[int] | NDArray[np.int64]
    least_run: Sequence[int] | NDArray[np.int64]
    budget: int


class VerifyPiece(NamedTuple):
    """What a verify piece leaves, R slots each but for the logits."""

    layout: RaggedLayout
    cutoff: Tensor  # int64 [R], rows that may be accepted; 1 in absent slots, which accept junk into the scratch row
    logits: Tensor  # float32 [T, V]


@dataclass(frozen=True)
class PieceKey:
    """Names a captured piece."""

    kind: str  # draft, verify, accept
    shape: TierKey  # of a draft: T is R·W
    width: int  # rows of a block that is verified; 1: a step without a draft
    sampled: bool = False  # of a draft: somebody draws
    signal: bool = False  # of a draft: it predicts


class StepGraphs:
    """The pieces of one worker's steps, and the tensors they read and write."""

    def __init__(
        self,
        runner: ModelRunner,
        sampling: SamplingRows,
        drafter: Drafter | None,
        source: ConfidenceSource | None,
        grid: TierGrid,
        survival_eps: float,
        step_runner: StepRunner,
        rule: AcceptRule,
    ) -> None:
        self.grid, self._source, self._eps = grid, source, survival_eps
        self._runner, self._sampling, self._drafter = runner, sampling, drafter
        self._step_runner, self.rule = step_runner, rule
        self.width = 1 if drafter is None else drafter.gamma + 1
        device, max_slots = runner.device, grid.buckets[-1]
        self._numbers = torch.zeros(4 * max_slots + 1, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(max_slots, self.width - 1, dtype=torch.int64, device=device)
        self._confidence = torch.ones(max_slots, self.width - 1, device=device)
        self.logits: Tensor | None = None
        self._dense_probs: Tensor | None = None  # of drafts drawn from the whole vocabulary
        if device.type == "cuda":  # one for all graphs: it is larger than all else that they need
            shape = (max_slots * self.width, runner.target.config.vocab_size)
            self.logits = torch.empty(shape, dtype=torch.float32, device=device)

    def load(self, numbers: StepNumbers, num_slots: int) -> None:
        """Uploads a step's numbers for `num_slots` slots, in one copy."""
        packed = np.zeros(4 * num_slots + 1, dtype=np.int64)
        num_reqs = len(numbers.rows)
        packed[:num_slots] = self._runner.request_rows.scratch_row
        for i, values in enumerate(numbers[:4]):
            packed[i * num_slots : i * num_slots + num_reqs] = values
        packed[-1] = numbers.budget
        self._numbers[: len(packed)].copy_(upload(packed, self._numbers.device))

    def rows(self, num_slots: int) -> Tensor:
        """Request rows of the slots, int64 [R]."""
        return self._numbers[:num_slots]

    def confidence(self, num_reqs: int) -> Tensor:
        """Of the drafts of the last draft piece that predicted, float32 [R, gamma]."""
        return self._confidence[:num_reqs]

    def draft(self, num_slots: int, sampled: bool, signal: bool) -> DraftBlock:
        """Drafts for every slot. `sampled`: whether somebody draws; `signal`: whether to predict acceptance."""
        return self._step_runner.run(
            self._draft_key(num_slots, sampled, signal), lambda: self._draft(num_slots, sampled, signal)
        )

    def verify(self, shape: TierKey, width: int) -> VerifyPiece:
        """Runs the target over the blocks of the last draft piece, or over anchors alone at width 1."""
        return self._step_runner.run(PieceKey("verify", shape, width), lambda: self._verify(shape, width))

    def accept(self, shape: TierKey, width: int, verified: VerifyPiece) -> Accepted:
        """Accepts and commits what the last verify piece left: R slots, all plain and greedy."""
        return self._step_runner.run(
            PieceKey("accept", shape, width), lambda: self._accept(shape, width, verified)
        )

    def serves(self, width: int) -> bool:
        """Whether blocks of `width` rows run in these pieces. Captured ones take shorter blocks too, as caps: the draft
        then fills its whole block, of which no more is verified."""
        return width == self.width or (isinstance(self._step_runner, GraphRunner) and width < self.width)

    def shape(self, num_reqs: int, num_tokens: int | None) -> TierKey | None:
        """The shape for a step's requests and rows (None: without a draft); None past the grid."""
        return self.grid.plain_key(num_reqs) if num_tokens is None else self.grid.key(num_reqs, num_tokens)

    def _draft_key(self, num_slots: int, sampled: bool, signal: bool) -> PieceKey:
        return PieceKey("draft", TierKey(num_slots, num_slots * self.width), self.width, sampled, signal)

    def _draft(self, num_slots: int, sampled: bool, signal: bool) -> DraftBlock:
        assert self._drafter is not None
        rows, gamma = self.rows(num_slots), self.width - 1
        greedy, temperature = self._sampling.draft_settings(rows)
        noise = self._sampling.uniforms(rows, self.width)[:, :gamma, 0] if sampled else None
        estimator = None if self._source is None else self._source.row_estimator
        block = self._drafter.propose(rows, greedy, temperature, noise, signal, estimator)
        self._drafts[:num_slots].copy_(block.tokens)
        if signal:
            assert self._source is not None and block.signal is not None
            confidence = block.confidence
            if confidence is None:
                confidence = self._source.predict(rows, block.signal)
            self._confidence[:num_slots].copy_(confidence)
        block = replace(block, tokens=self._drafts[:num_slots])
        if sampled and block.candidate_ids is None:
            block = replace(block, candidate_probs=self._keep_dense(block.candidate_probs))
        return block

    def _keep_dense(self, probs: Tensor) -> Tensor:
        """`probs` [R, gamma, V] in a tensor that all draft pieces share: one for each would take gigabytes."""
        if self._dense_probs is None:
            self._dense_probs = probs.new_empty(self.grid.buckets[-1], *probs.shape[1:])
        return self._dense_probs[: probs.shape[0]].copy_(probs)

    def _verify(self, shape: TierKey, width: int) -> VerifyPiece:
        num_slots = shape.num_slots
        rows, caps, floors, least_run = self._numbers[: 4 * num_slots].view(4, num_slots).unbind(0)
        drafts, lens = self._drafts[:num_slots, : width - 1], caps
        if width > 1:
            budget = self._numbers[4 * num_slots]
            lens = allocate(self._confidence[:num_slots], budget, floors, caps, self._eps)
        state = self._runner.request_rows
        layout = pack(
            state,
            rows,
            drafts,
            lens,
            shape.num_tokens,
            padded=True,
            least_run=least_run,
            max_lens=state.max_lens,
        )
        out = None if self.logits is None else self.logits[: shape.num_tokens]
        return VerifyPiece(layout, layout.cutoff, self._runner.verify(layout.input_ids, layout.queries, out))

    def _accept(self, shape: TierKey, width: int, verified: VerifyPiece) -> Accepted:
        state, rows = self._runner.request_rows, self.rows(shape.num_slots)
        drafts = self._drafts[: shape.num_slots, : width - 1]
        tokens, num_tokens, is_finite, num_matched = accept_step(
            *best_tokens(verified.logits),
            verified.layout.block_rows,
            drafts,
            self.rule.cutoff(verified.cutoff),
            rows,
            state.context_lens,
            state.anchors,
            self._sampling.steps,
            state.scratch_row,
            self.rule.simulated(self._sampling, rows),
        )
        return Accepted(
            tokens, num_tokens, verified.cutoff, verified.logits.shape[0], is_finite, num_matched, drafts
        )

    def capture(self, signals: Sequence[bool], on_progress: Callable[[int, int], None]) -> int:
        """Captures every piece that steps can ask for, largest first; returns how many.

        All slots are the scratch row's meanwhile, which has neither context nor pages.
        """
        runner = self._step_runner
        assert isinstance(runner, GraphRunner)
        pieces = sorted(
            reachable_pieces(self.grid, self.width, signals),
            key=lambda key: (key.kind != "draft", -key.shape.num_tokens, -key.shape.num_slots, -key.width),
        )
        verified = [key for key in pieces if key.kind == "verify"]
        drafts = [key for key in pieces if key.kind == "draft"]
        for done, key in enumerate([*drafts, *verified]):
            on_progress(done, len(drafts) + len(verified))
            self.load_scratch(key)
            if key.kind == "draft":
                runner.capture(key, partial(self._draft, key.shape.num_slots, key.sampled, key.signal))
                continue
            runner.capture(key, partial(self._verify, key.shape, key.width))
            piece = self.verify(key.shape, key.width)
            runner.capture(replace(key, kind="accept"), partial(self._accept, key.shape, key.width, piece))
        return len(pieces)

    def load_scratch(self, key: PieceKey) -> None:
        """Numbers with which a piece can run though nobody is there."""
        num_slots = key.shape.num_slots
        lens = [1] * num_slots if key.width == 1 else capture_lens(key.shape, key.width)
        rows = [self._runner.request_rows.scratch_row] * num_slots
        self.load(StepNumbers(rows, lens, lens, lens, 0), num_slots)


def reachable_pieces(grid: TierGrid, width: int, signals: Sequence[bool]) -> Iterator[PieceKey]:
    """Every piece that a step on the grid can ask for: what to capture, no more and no less.

    `signals`: whether drafts come with predictions, without, or both. Accepting is captured for greedy batches alone.
    """
    for kind in ("verify", "accept"):
        for shape in grid.plain_keys():
            yield PieceKey(kind, shape, 1)
        for shape in grid.reachable_keys() if width > 1 else ():
            yield PieceKey(kind, shape, width)
    for num_slots in grid.buckets if width > 1 else ():
        for sampled in (False, True):
            for signal in signals:
                yield PieceKey("draft", TierKey(num_slots, num_slots * width), width, sampled, signal)
