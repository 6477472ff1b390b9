"""Decode steps: launched, and collected while the next one runs.

One code, two twins. The synchronous one, the reference, collects a step as soon as it is launched. The overlapped one
launches a step before it collects the one before it, so that the host appends, looks for stops and reports while the
device works. It knows each request's length as of the step before the one in flight, and what follows from that is
the same in both: caps count what is left for certain and the device cuts them to what is left
(`RequestRows.within_limits`), plans look at outcomes a step late (`Request.num_waited`).

Who ends while a step is in flight takes part in it once more, and its tokens are dropped. Its row and pages may be
handed on at once all the same: everything on the device runs in one order, so whatever a new owner writes comes after
whatever the step in flight writes or reads. Nor is what the prefix cache takes over ever written again: it takes full
pages below the length that the host knows of, and a step in flight writes at or behind that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from flashspark.ipc import FinishReason
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.planner import Plan
from flashspark.speculative.step_results import PendingResults, StepReader, StepResults
from flashspark.speculative.types import Logprobs, StepBatch
from flashspark.speculative.worker import SpeculativeWorker
from flashspark.upload import upload

from .isolation import decode_apart, not_finite
from .request import Request
from .request_record import RequestRecord, request_records
from .residency import Residency
from .step_record import StepRecord

logger = logging.getLogger(__name__)

HandOut = Callable[[Request, list[int], FinishReason | None, Logprobs | None], None]


@dataclass(frozen=True)
class StepInFlight:
    """A step that was launched."""

    running: list[Request]
    batch: StepBatch
    results: PendingResults
    num_rows_run: int
    logprobs: dict[int, Logprobs]
    num_prefill_tokens: int
    is_overlapped: bool


class DecodeLoop:
    """Launches and collects the steps of one scheduler."""

    def __init__(
        self,
        worker: SpeculativeWorker,
        residency: Residency,
        hand_out: HandOut,
        fail: Callable[[Request, Exception], None],
        totals: dict[str, int],
        overlap: bool = False,
    ) -> None:
        """
        Args:
            hand_out: takes what a step gave a request: tokens, the reason if it ends with them, log-probabilities.
            fail: ends a request that a bug has hit.
            totals: counters, some of which are counted here.
        """
        self._worker, self._residency = worker, residency
        self._hand_out, self._fail, self._totals = hand_out, fail, totals
        self.overlap = overlap
        self.reader = StepReader(worker.runner.device)
        self.keeps_requests = False  # whether records tell of each request
        self.in_flight: StepInFlight | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the device was kept busy up to now, or never is: the time between two records is one step's."""
        return self.overlap == (self.in_flight is not None)

    def turn(self, num_prefill_tokens: int) -> StepRecord | None:
        """Launches the next step of everybody who goes on, and collects one.

        The step in flight is collected first, in a turn of its own, where the next one needs its outcome: for
        grammars and log-probabilities, where nobody is sure to go on, and where pages have run out, since what is
        reserved for it is more than it will fill, and nobody should be retracted for that.

        Args:
            num_prefill_tokens: prompt tokens that were run just before.

        Returns:
            What was collected; None where a first step was launched and nothing collected.
        """
        before = self.in_flight
        running = [r for r in self._residency.residents if r.is_decodable and r.verify_cap > 0]
        waits_for_host = any(request.waits_for_host for request in running)
        must_collect = not running or waits_for_host or not self._residency.has_room(running)
        if before is not None and must_collect:
            return self._collected(num_prefill_tokens)
        running = self._residency.grow(running)
        if not running:
            return StepRecord(num_prefill_tokens=num_prefill_tokens)
        try:
            launched = self._launch(running, num_prefill_tokens)
        except torch.AcceleratorError:  # the device is lost, and with it every request
            raise
        except Exception as error:
            logger.error("a step failed, of requests %r", [r.request_id for r in running], exc_info=error)
            if before is not None:  # the next turn tries again, and knows more
                return self._collected(num_prefill_tokens)
            apart = decode_apart(running, error, self._decode_alone, self._fail)
            return replace(apart, num_prefill_tokens=num_prefill_tokens)
        if not self.overlap or waits_for_host:
            return self._collect(launched)
        record = self.collect()
        self.in_flight = launched
        for request, cap in zip(running, launched.batch.cap_list, strict=True):
            request.cap_in_flight = cap
        return record

    def collect(self) -> StepRecord | None:
        """Hands out the step in flight, if there is one."""
        step, self.in_flight = self.in_flight, None
        if step is None:
            return None
        for request in step.running:
            request.cap_in_flight = 0
        return self._collect(step)

    def _collected(self, num_prefill_tokens: int) -> StepRecord:
        """The step in flight, in a turn that launches none."""
        record = self.collect()
        assert record is not None
        return replace(record, num_prefill_tokens=record.num_prefill_tokens + num_prefill_tokens)

    def _decode_alone(self, running: list[Request]) -> StepRecord:
        return self._collect(self._launch(running, planned=False))

    def _launch(
        self, running: list[Request], num_prefill_tokens: int = 0, planned: bool = True
    ) -> StepInFlight:
        device = self._worker.runner.device
        row_list = [request.row for request in running]
        cap_list = [request.verify_cap for request in running]
        plan = self._plan(running, row_list, cap_list) if planned else None
        grammars = {i: request.grammar for i, request in enumerate(running) if request.grammar is not None}
        rows, caps = upload(row_list, device), upload(cap_list, device)
        batch = StepBatch(rows, row_list, caps, cap_list, plan, grammars)
        clock = self.reader.clock()
        accepted = self._worker.decode(batch)
        self._worker.mark("results")
        results = self.reader.start(accepted, clock, self.keeps_requests)
        self._worker.mark("idle")
        return StepInFlight(
            running=running,
            batch=batch,
            results=results,
            num_rows_run=accepted.num_rows_run,
            logprobs=dict(accepted.logprobs),
            num_prefill_tokens=num_prefill_tokens,
            is_overlapped=self.in_flight is not None,
        )

    def _plan(self, running: list[Request], row_list: list[int], cap_list: list[int]) -> Plan | None:
        """How much of each block to verify; None in static mode, where that is not a question."""
        if self._worker.adaptive is None:
            return None
        return self._worker.adaptive.plan(
            row_list,
            cap_list,
            [request.keeps_block for request in running],
            [request.num_waited for request in running],
        )

    def _collect(self, step: StepInFlight) -> StepRecord:
        """Waits for a step and hands out what it gave."""
        results, running, plan = step.results.wait(), step.running, step.batch.plan
        if plan is not None and self._worker.adaptive is not None:
            self._worker.adaptive.observe_step(plan, results.seconds)
            self._totals["trimmed_steps"] += plan.draft and not plan.verify.full
            self._totals["draft_free_steps"] += not plan.draft
        self._totals["overlapped_steps"] += step.is_overlapped
        # What the device cut the caps to; who has ended could use its anchor alone.
        caps = [
            1 if request.has_ended else min(cap, request.num_remaining)
            for request, cap in zip(running, step.batch.cap_list, strict=True)
        ]
        num_dropped = sum(request.has_ended for request in running)
        num_uncapped = self._num_uncapped(results, step.batch, caps)
        num_kept, num_uncapped_tokens = self._hand_out_all(step, results, caps, num_uncapped)
        num_output_tokens = sum(kept for kept in num_kept if kept > 0)
        self._totals["output_tokens"] += num_output_tokens
        reqs: Sequence[RequestRecord] = ()
        if self.keeps_requests:
            reqs = request_records(running, step.batch, caps, results, num_kept, num_uncapped)
        return StepRecord(
            num_reqs=len(running),
            num_dropped_reqs=num_dropped,
            is_overlapped=step.is_overlapped,
            num_grammar_reqs=len(step.batch.grammars),
            num_prefill_tokens=step.num_prefill_tokens,
            num_verify_tokens=sum(results.verify_lens),
            num_rows_run=step.num_rows_run,
            num_output_tokens=num_output_tokens,
            num_full_tokens=sum(caps),
            num_uncapped_tokens=None if num_uncapped is None else num_uncapped_tokens,
            decode_ms=results.seconds * 1e3,
            mode=self._worker.mode.value,
            plan=plan,
            reqs=reqs,
        )

    def _hand_out_all(
        self, step: StepInFlight, results: StepResults, caps: list[int], num_uncapped: list[int] | None
    ) -> tuple[list[int], int]:
        """Tokens that each request took, -1 where the step gave it nothing usable; and what all would have got without
        cutoffs."""
        num_kept, num_uncapped_tokens = [-1] * len(step.running), 0
        plan = step.batch.plan
        drafts = plan is None or plan.draft
        for i, request in enumerate(step.running):
            if request.has_ended:
                continue
            if not results.is_finite[i]:
                self._hand_out(request, [], not_finite(), None)
                continue
            verify_len = results.verify_lens[i]
            num_drafted = request.gamma if drafts and caps[i] > 1 else 0
            try:
                kept, finish = request.append_step(results.tokens[i], verify_len, num_drafted)
            except Exception as error:  # a bug in what looks for its end
                self._fail(request, error)
                continue
            num_kept[i] = len(kept)
            if num_uncapped is not None:
                ended = finish is not None
                num_uncapped_tokens += request.count_uncapped(num_uncapped[i], len(kept), ended)
            self._totals["verify_tokens"] += verify_len
            self._totals["verify_steps"] += 1
            self._hand_out(request, kept, finish, step.logprobs.get(i))
        return num_kept, num_uncapped_tokens

    def _num_uncapped(self, results: StepResults, batch: StepBatch, caps: list[int]) -> list[int] | None:
        """Drafts each request would have accepted without a cutoff; None where their rows were not computed."""
        if self._worker.mode is not VerifyMode.CAP_ACCEPT or not self._worker.accepts_drafts:
            return None
        if batch.plan is not None and not batch.plan.draft:
            return [0] * len(caps)
        return [min(matched, cap - 1) for matched, cap in zip(results.num_matched, caps, strict=True)]
