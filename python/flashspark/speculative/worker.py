"""One decode step, stage by stage. Without a draft the block is the anchor alone: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashspark.engine.model_runner import ModelRunner, PrefillChunk
from flashspark.engine.stage_clock import StageClock
from flashspark.upload import upload

from .accept import AcceptRule, accept, commit
from .adaptive import AdaptiveVerifier, VerifyMode
from .drafter import Drafter
from .grammar import BlockReader, PendingBlocks
from .layout import pack
from .logprobs import PromptRows, committed_logprobs, prompt_logprobs
from .sampling import RowSampling, SamplingRows, StepSampling
from .step_graphs import StepGraphs, StepNumbers, VerifyPiece
from .tiers import TierKey
from .types import Accepted, DraftBlock, Logprobs, RaggedLayout, StepBatch, first_requests


class SpeculativeWorker:
    """Drives draft, allocate, layout, verify, accept and commit over the runner's requests.

    `adaptive` None is static verification: every request verifies as much of its block as its cap allows.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampling: SamplingRows,
        drafter: Drafter | None,
        adaptive: AdaptiveVerifier | None = None,
    ) -> None:
        self.runner, self.sampling, self.drafter, self.adaptive = runner, sampling, drafter, adaptive
        self._reader = BlockReader(runner.device)
        self.gamma = drafter.gamma if drafter else 0
        self.width = self.gamma + 1
        self.speculates = True  # False: new requests decode without a draft
        self.scales_logprobs = True  # False: those of output tokens are reported as before temperature
        self.rule = AcceptRule()
        self.stage_clock: StageClock | None = None  # told of the stages' borders, for measuring
        self.graphs: StepGraphs | None = None  # None: steps run as they come, in shapes of their own

    @property
    def mode(self) -> VerifyMode:
        """How it verifies at present."""
        return VerifyMode.STATIC if self.adaptive is None else self.adaptive.mode

    def mark(self, stage: str) -> None:
        """Tells the clock, if somebody measures, that the device work of `stage` begins here."""
        if self.stage_clock is not None:
            self.stage_clock.mark(stage)

    @property
    def accepts_drafts(self) -> bool:
        """False: what becomes of drafts is simulated, and teaches nothing."""
        return self.rule.simulated_drafts is None

    def set_width(self, width: int) -> None:
        """Blocks of `width` rows from now on, 2 … what the draft was built for. Nobody holds a row, and adaptive
        verification, which is built for one width, is not asked to plan others."""
        assert self.drafter is not None and self.sampling.num_assigned == 0
        self.gamma = self.drafter.gamma = width - 1
        self.width = width

    def assign(
        self,
        row: int,
        params: RowSampling,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        step_index: int,
        speculates: bool,
        is_constrained: bool = False,
    ) -> None:
        """A request takes `row`; see `SamplingRows.assign`. `speculates`: whether anything is drafted for it;
        `is_constrained`: whether it has a grammar, which the draft does not see."""
        self.sampling.assign(row, params, prompt_ids, output_ids, step_index)
        if self.adaptive is not None:
            is_visible = speculates and self.accepts_drafts and not is_constrained
            self.adaptive.assign(row, params, is_visible)

    def release(self, row: int) -> None:
        """The request in `row` has left."""
        self.sampling.release(row)
        if self.adaptive is not None:
            self.adaptive.release(row)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk], wanted: Sequence[PromptRows] = ()) -> list[Logprobs]:
        """Runs prompt chunks (`ModelRunner.prefill`); log-probabilities of the `wanted` rows' next tokens."""
        self.mark("prefill")
        hidden = self.runner.prefill(chunks, reads_hidden=len(wanted) > 0)
        return [] if hidden is None else prompt_logprobs(self.runner.target, hidden, wanted)

    @torch.inference_mode()
    def decode(self, batch: StepBatch) -> Accepted:
        """Runs one step and commits it on the device; the caller handles the tokens on the host."""
        members = self._who_drafts(batch)
        self.mark("draft" if members else "verify")
        if self.graphs is not None and self.graphs.serves(self.width):
            shape = self.graphs.shape(len(batch.row_list), self._num_rows(batch) if members else None)
            if shape is not None:
                width = self.graphs.width if members else 1
                return self._observed(batch, self._decode_in_shape(batch, self.graphs, shape, width))
        return self._observed(batch, self._decode(batch, members))

    def _observed(self, batch: StepBatch, accepted: Accepted) -> Accepted:
        """The step as it is, once its outcomes have taught, if anything was predicted for it."""
        if self.adaptive is not None and accepted.confidence is not None:
            self.adaptive.source.observe(
                batch.rows, batch.row_list, accepted.num_tokens - 1, accepted.verify_lens
            )
        return accepted

    def _num_rows(self, batch: StepBatch) -> int:
        """Rows that a drafted step has to hold, padding left out."""
        if batch.plan is None or self.mode is not VerifyMode.COMPACT:
            return sum(batch.cap_list)
        return batch.plan.verify.num_tokens

    def _decode_in_shape(self, batch: StepBatch, graphs: StepGraphs, shape: TierKey, width: int) -> Accepted:
        """As `_decode`, in pieces of fixed shape. Drafts are made for everybody, whoever can use them."""
        row_list, plan, num_reqs = batch.row_list, batch.plan, len(batch.row_list)
        graphs.load(self._numbers(batch), shape.num_slots)
        rows = graphs.rows(num_reqs)
        confidence, block = None, None
        if width > 1:
            signal = plan is not None and plan.looks and self.adaptive is not None
            block = graphs.draft(shape.num_slots, self.sampling.draws(row_list), signal)
            if signal and self.adaptive is not None:
                confidence = graphs.confidence(num_reqs)
                self.adaptive.relay(rows, row_list, confidence)
            self.mark("verify")
        verified = graphs.verify(shape, width)
        self.mark("accept")
        if not batch.grammars and self.sampling.is_plain(row_list):
            accepted = first_requests(graphs.accept(shape, width, verified), num_reqs)
        else:
            accepted = self._accept_apart(batch, verified, block, width)
        # Captured blocks are as wide as the draft's own, whatever the width is at present.
        return replace(accepted, confidence=confidence, drafts=accepted.drafts[:, : self.gamma])

    def _numbers(self, batch: StepBatch) -> StepNumbers:
        """What the host has decided of a step, as its pieces read it."""
        plan, caps = batch.plan, batch.cap_list
        if plan is None or self.adaptive is None:
            return StepNumbers(batch.row_list, caps, caps, caps, 0)
        if not plan.draft:
            return StepNumbers(batch.row_list, plan.caps, plan.caps, plan.caps, 0)
        # A plan may cap what is verified below what requests can use, and cap-accept runs all of that.
        least_run = [0] * len(caps) if self.mode is VerifyMode.COMPACT else caps
        if plan.verify.full:
            return StepNumbers(batch.row_list, plan.caps, plan.caps, least_run, 0)
        assert plan.verify.budget is not None, "a plan without a budget verifies everything"
        return StepNumbers(batch.row_list, plan.caps, plan.floors, least_run, plan.verify.budget)

    def _accept_apart(
        self, batch: StepBatch, verified: VerifyPiece, block: DraftBlock | None, width: int
    ) -> Accepted:
        """Accepts and commits a verified step in which somebody asks for more than an argmax."""
        num_reqs, rows = len(batch.row_list), batch.rows
        if block is None:
            draft = _empty_block(num_reqs, 0, 1, rows.device, dense=False)
        else:
            ids = block.candidate_ids
            draft = DraftBlock(
                block.tokens[:num_reqs],
                None if ids is None else ids[:num_reqs],
                block.candidate_probs[:num_reqs],
            )
        cutoff = verified.cutoff[:num_reqs]
        layout = replace(
            verified.layout,
            requests=verified.layout.requests.clamp(max=num_reqs - 1),  # padding names the last slot
            block_rows=verified.layout.block_rows[:num_reqs],
        )
        step = self.sampling.begin_step(rows, batch.row_list, width, batch.grammars)
        blocks = self._read_blocks(batch, draft, cutoff) if batch.grammars else None
        return self._judge(verified.logits, layout, draft, cutoff, rows, step, blocks)

    def _decode(self, batch: StepBatch, members: list[int]) -> Accepted:
        """A step in whatever shape it has."""
        rows = batch.rows
        gamma = self.gamma if members else 0  # where nothing is drafted, the blocks are their anchors
        step = self.sampling.begin_step(rows, batch.row_list, gamma + 1, batch.grammars)
        draft = self._draft(batch, step, members)
        confidence = None if draft.signal is None else self._publish(batch, draft, members)
        if members:
            self.mark("verify")
        verify_lens, layout = self._lay_out(batch, draft, confidence)
        state = self.runner.request_rows
        # The host's caps are of what it knew when it launched the step; rows past the limit run, and commit nothing.
        verify_lens = state.within_limits(verify_lens, rows, state.context_lens[rows])
        blocks = self._read_blocks(batch, draft, verify_lens) if batch.grammars else None
        logits = self.runner.verify(layout.input_ids, layout.queries)
        self.mark("accept")
        accepted = self._judge(logits, layout, draft, verify_lens, rows, step, blocks)
        return replace(accepted, confidence=confidence)

    def _judge(
        self,
        logits: Tensor,
        layout: RaggedLayout,
        draft: DraftBlock,
        verify_lens: Tensor,
        rows: Tensor,
        step: StepSampling,
        blocks: PendingBlocks | None,
    ) -> Accepted:
        """Accepts and commits, and tells what was asked for."""
        request_rows = self.runner.request_rows
        accepted = accept(
            logits,
            layout,
            draft,
            self.rule.cutoff(verify_lens),
            rows,
            request_rows.context_lens[rows],
            self.sampling,
            step,
            None if blocks is None else blocks.masks(),
            self.rule.simulated(self.sampling, rows),
        )
        accepted = replace(accepted, verify_lens=verify_lens)
        if step.reported:
            found = committed_logprobs(logits, layout, accepted, step, self.scales_logprobs)
            accepted = replace(accepted, logprobs=found)
        commit(request_rows, self.sampling, rows, step, accepted)
        return accepted

    def _read_blocks(self, batch: StepBatch, draft: DraftBlock, verify_lens: Tensor) -> PendingBlocks:
        """Drafts under a grammar, on their way to the host. Rows that are not run need no masks."""
        num_rows = verify_lens if self.mode is VerifyMode.COMPACT else batch.verify_caps
        return self._reader.start(batch.grammars, draft.tokens, num_rows)

    def _who_drafts(self, batch: StepBatch) -> list[int]:
        """Batch indices of the requests that can use drafts in this step."""
        if self.drafter is None or (batch.plan is not None and not batch.plan.draft):
            return []
        return [i for i, cap in enumerate(batch.cap_list) if cap > 1]

    def _lay_out(
        self, batch: StepBatch, draft: DraftBlock, confidence: Tensor | None
    ) -> tuple[Tensor, RaggedLayout]:
        """Verify lengths and the packed rows. What may be accepted and what is computed differ in cap-accept."""
        request_rows, rows, plan = self.runner.request_rows, batch.rows, batch.plan
        if plan is None or self.adaptive is None:
            return batch.verify_caps, self._pack_caps(batch, draft)
        lens = self.adaptive.verify_lens(plan, confidence)
        if self.adaptive.mode is VerifyMode.COMPACT:
            num_rows = plan.verify.num_tokens_run
            padded = not plan.verify.full or num_rows > plan.verify.num_tokens
            full = plan.verify.num_tokens == len(batch.row_list) * self.width
            return lens, pack(request_rows, rows, draft.tokens, lens, num_rows, padded, full)
        if not plan.draft:
            return lens, pack(request_rows, rows, draft.tokens, lens, plan.verify.num_tokens)
        return lens, self._pack_caps(batch, draft)

    def _pack_caps(self, batch: StepBatch, draft: DraftBlock) -> RaggedLayout:
        """All that the caps allow, whatever of it may be accepted."""
        num_rows = sum(batch.cap_list)
        full = num_rows == len(batch.row_list) * self.width
        return pack(
            self.runner.request_rows, batch.rows, draft.tokens, batch.verify_caps, num_rows, full=full
        )

    def _publish(self, batch: StepBatch, draft: DraftBlock, members: list[int]) -> Tensor:
        """Confidence [R, gamma] of the step's drafts, on its way to later plans; 0 where nothing was drafted."""
        assert self.adaptive is not None and draft.signal is not None
        if len(members) == len(batch.row_list):
            return self.adaptive.publish(batch.rows, batch.row_list, draft.signal)
        index = upload(members, batch.rows.device)
        confidence = torch.zeros_like(draft.signal)
        member_rows = [batch.row_list[i] for i in members]
        confidence[index] = self.adaptive.publish(batch.rows[index], member_rows, draft.signal[index])
        return confidence

    def _draft(self, batch: StepBatch, step: StepSampling, members: list[int]) -> DraftBlock:
        """Drafts for `members`; the others get an empty block."""
        num_reqs, device = len(batch.row_list), batch.rows.device
        if self.drafter is None or not members:
            return _empty_block(num_reqs, 0, 1, device, dense=False)
        uniforms = None if step.uniforms is None else step.uniforms[:, : self.gamma, 0]
        with_signal = batch.plan is not None and batch.plan.looks
        if len(members) == num_reqs:
            return self.drafter.propose(batch.rows, step.greedy, step.temperature, uniforms, with_signal)
        index = upload(members, device)
        some = self.drafter.propose(
            batch.rows[index],
            step.greedy[index],
            step.temperature[index],
            None if uniforms is None else uniforms[index],
            with_signal,
        )
        num_candidates, dense = some.candidate_probs.shape[2], some.candidate_ids is None
        block = _empty_block(num_reqs, self.gamma, num_candidates, device, dense)
        block.tokens[index] = some.tokens
        if block.candidate_ids is not None and some.candidate_ids is not None:
            block.candidate_ids[index] = some.candidate_ids
        block.candidate_probs[index] = some.candidate_probs
        if some.signal is None:
            return block
        signal = torch.zeros(num_reqs, self.gamma, device=device)
        signal[index] = some.signal
        return replace(block, signal=signal)


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
