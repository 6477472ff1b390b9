"""The step loop: admit, prefill a little, verify one block of every running request, hand out what a step gave."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from flashspark.engine.model_runner import PrefillChunk
from flashspark.ipc import FinishReason, GenerateRequest, RequestOutput, SchedulerMetrics, StateValue
from flashspark.speculative.sts_records import CollectingHead
from flashspark.speculative.types import Logprobs
from flashspark.speculative.worker import SpeculativeWorker
from flashspark.text.tokenizer import TextTokenizer

from .charts import chart_state
from .deadlines import Deadlines
from .decode_loop import DecodeLoop
from .grammar import GrammarQueue
from .isolation import failure
from .limits import SchedulerLimits
from .live_settings import LiveSettings, Value
from .logprobs import rows_to_tell, to_message, wants_prompt_logprobs
from .metrics import scheduler_metrics
from .record_feed import FeedHeader, RecordFeed
from .request import Request, StopChecker
from .residency import Residency
from .step_record import DecodeMeans, StepRecord, decode_log_line, plan_log_line
from .step_totals import StepTotals

logger = logging.getLogger(__name__)

_COMPILE_WAIT_S = 0.002  # per turn that has nothing to do but wait for a grammar


class Scheduler:
    """Requests in, tokens out, one step at a time. Single-threaded; knows neither sockets nor devices."""

    def __init__(
        self,
        worker: SpeculativeWorker,
        limits: SchedulerLimits,
        send: Callable[[RequestOutput], None],
        eos_token_ids: Iterable[int] = (),
        tokenizer: TextTokenizer | None = None,
        random_seed: int = 0,
        grammars: GrammarQueue | None = None,
        overlap: bool = False,
    ) -> None:
        self.limits, self._worker, self._send = limits, worker, send
        self._eos_token_ids, self._tokenizer = frozenset(eos_token_ids), tokenizer
        self.residency = Residency(worker, limits.max_running_requests, limits.num_pages, limits.prefix_cache)
        self._grammars = GrammarQueue(None, 0) if grammars is None else grammars
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self._random_seed = random_seed
        self.records: deque[StepRecord] = deque(maxlen=max(1000, limits.decode_log_interval))
        self._settings = LiveSettings(worker)
        self._flushed = (0, 0)  # output tokens and verify steps at the last flush
        self._feed: RecordFeed | None = None
        self.num_steps, self._seconds = 0, 0.0  # turns; seconds of those since the last record
        self._step_totals = StepTotals()
        self.totals = dict.fromkeys(
            (
                *("finished", "aborted", "aborted_mid_block", "output_tokens", "verify_steps"),
                *("verify_tokens", "trimmed_steps", "draft_free_steps", "overlapped_steps"),
            ),
            0,
        )
        self._decoding = DecodeLoop(
            worker, self.residency, self._hand_out, self._fail, self.totals, overlap=overlap
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests) or self._decoding.in_flight is not None

    @property
    def _has_steps(self) -> bool:
        """`has_work`, but for what is being compiled."""
        return len(self._grammars) < len(self._requests) or self._decoding.in_flight is not None

    def add(self, message: GenerateRequest) -> None:
        """Queues a request. One that can never run is answered with an abort that says why."""
        problem = self._refusal(message)
        if problem is not None:
            self._send(
                RequestOutput(message.request_id, [], FinishReason("abort", message=problem, status_code=400))
            )
            return
        if message.sampling.max_new_tokens == 0 and not wants_prompt_logprobs(message):
            self._send(RequestOutput(message.request_id, [], FinishReason("length")))
            return
        self._num_arrivals += 1
        try:
            request = self._make_request(message)
        except Exception as error:  # a bug that this request has hit: the others go on
            logger.error("request %r failed", message.request_id, exc_info=error)
            self._send(RequestOutput(message.request_id, [], failure(error)))
            return
        self._requests[request.request_id] = request
        if message.sampling.grammar is None:
            self.residency.enqueue(request)
        else:
            self._grammars.add(request)

    def _make_request(self, message: GenerateRequest) -> Request:
        return Request(
            message=message,
            arrival=self._num_arrivals,
            seed=self._seed_for(message),
            stop_checker=StopChecker(message, self._eos_token_ids, self._tokenizer),
            gamma=self._worker.gamma if self._worker.speculates and message.speculation != "off" else 0,
            counts_verify_lens=self._worker.adaptive is not None,
        )

    def expire(self, deadlines: Deadlines, now_s: float) -> None:
        """Ends requests that have waited or run for too long; to be called now and then. With 503: what waits too
        long here may be served elsewhere."""
        for request in list(self._requests.values()):
            message = deadlines.missed(request, now_s)
            if message is not None:
                self.totals["aborted"] += 1
                self._end(request, [], FinishReason("abort", message=message, status_code=503))

    def abort(self, request_ids: Iterable[str], message: str) -> None:
        """Ends requests wherever they are; ids that are unknown or already ended are passed over."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self.totals["aborted"] += 1
                self.totals["aborted_mid_block"] += request.num_verify_steps > 0
                self._end(request, [], FinishReason("abort", message=message))

    def step(self) -> None:
        """One turn: admit, one prefill chunk, one decode step launched, one collected (`DecodeLoop.turn`)."""
        self._take_compiled(0.0 if self._has_steps else _COMPILE_WAIT_S)
        if not self._has_steps:
            return
        started = time.perf_counter()
        self._admit()
        self._take_record(self._decoding.turn(self._prefill()), started)

    def settle(self) -> None:
        """Hands out the step in flight, if there is one: between two turns, before what wants the device at rest."""
        if self._decoding.in_flight is not None:
            started = time.perf_counter()
            self._take_record(self._decoding.collect(), started)

    def _take_record(self, record: StepRecord | None, started: float) -> None:
        """Ends a turn; None where nothing was collected in it."""
        self.num_steps += 1
        ended = time.perf_counter()
        self._seconds += ended - started
        if record is None:
            return
        record = replace(record, forward_ct=self.num_steps, step_ms=self._seconds * 1e3)
        self._seconds = 0.0
        self.records.append(record)
        self._step_totals.add(record)
        if self._feed is not None:
            self._feed.add(record, ended, self.has_work and self._decoding.goes_on)
        self._log()

    def keep_records(self, components: Sequence[str], simulate_acc_len: float | None = None) -> None:
        """Keeps a record of every decode step from now on, for profilers."""
        worker, mode = self._worker, self._worker.mode.value
        header = FeedHeader(mode, worker.gamma, worker.width, components, simulate_acc_len)
        self._feed = self._settings.feed = RecordFeed(header)
        self._decoding.keeps_requests = self._feed.keeps_requests

    def info_record(self) -> bytes | None:
        """`dspark_info_record` as JSON; None where no records are kept."""
        return None if self._feed is None else self._feed.dump()

    def set_internal_state(self, values: Mapping[str, Value]) -> str | None:
        """Changes live settings, all or none; returns why where it is none."""
        if not self._requests:
            self.settle()
        refusal = self._settings.apply(values, is_idle=not self._requests)
        if refusal is None and not self._requests:
            self.records.clear()  # means over recent steps are of one mode and one width
        return refusal

    def flush_cache(self) -> bool:
        """Empties the prefix cache and starts the mean acceptance length afresh; False, and nothing, while busy."""
        if self._requests:
            return False
        self.settle()
        self.residency.flush()
        self._flushed = (self.totals["output_tokens"], self.totals["verify_steps"])
        return True

    def reseed(self, random_seed: int) -> bool:
        """Lets requests without a seed draw from here on what they would from the start of a server with this
        `--random-seed`; False, and nothing, while busy."""
        if self._requests:
            return False
        self.settle()
        self._random_seed, self._num_arrivals = random_seed, 0
        return True

    def retract_all(self) -> None:
        """Everybody gives up row and pages and returns to the queue."""
        self.settle()
        self.residency.retract_all()

    def close(self) -> None:
        """After the last step: writes the confidence records that waited for more."""
        self.settle()
        adaptive = self._settings.verifier
        if adaptive is not None and isinstance(adaptive.source, CollectingHead):
            adaptive.source.close()

    @property
    def verify_request_buckets(self) -> list[int]:
        """Batch sizes that steps are padded to; without fixed shapes, in static verification, each runs as it is."""
        adaptive, graphs = self._worker.adaptive, self._worker.graphs
        if graphs is not None:
            return list(graphs.grid.buckets)
        if adaptive is None or adaptive.planner.grid is None:
            return list(range(1, self.limits.max_running_requests + 1))
        return list(adaptive.planner.grid.buckets)

    def state(self) -> dict[str, int | float]:
        """Counters for /server_info. Once nothing is left to do, all rows are free, all pages free or evictable."""
        residency = self.residency
        num_cached_tokens, num_prompt_tokens = residency.num_cached_tokens, residency.num_prompt_tokens
        num_tokens, num_steps = (
            self.totals[name] - before
            for name, before in zip(("output_tokens", "verify_steps"), self._flushed, strict=True)
        )
        means: dict[str, int | float] = {}
        if num_steps and self._worker.gamma:  # else absent: clients take its presence for speculation
            means["avg_spec_accept_length"] = num_tokens / num_steps
        return {
            "num_running_reqs": len(residency.residents),
            "num_queue_reqs": len(residency.queue),
            "num_grammar_queue_reqs": len(self._grammars),
            "num_so_requests": self._grammars.num_added,
            "num_free_rows": residency.num_free_rows,
            "max_running_requests": residency.max_running_requests,
            "num_free_pages": residency.allocator.num_free,
            "num_cached_pages": residency.cache.num_pages,
            "num_evictable_pages": residency.cache.num_evictable,
            "num_prompt_tokens": num_prompt_tokens,
            "num_cached_tokens": num_cached_tokens,
            "cache_hit_rate": num_cached_tokens / num_prompt_tokens if num_prompt_tokens else 0.0,
            "num_pages": residency.allocator.num_pages,
            "num_sampling_rows": self._worker.sampling.num_assigned,
            "num_used_tokens": residency.num_used_tokens,
            "num_retractions": residency.num_retractions,
            "num_retracted_reqs": sum(request.num_retractions > 0 for request in residency.queue),
            "num_steps": self.num_steps,
            **self.totals,
            **means,
        }

    def verification_state(self) -> dict[str, int | float | str | bool | list[int] | None]:
        """How much is verified at present and what decides it, for /server_info."""
        adaptive, steps = self._worker.adaptive, self.totals["verify_steps"]
        if adaptive is None:
            return {"ragged_verify_mode": "static", **self._settings.state()}
        correction = adaptive.planner.correction
        return {
            "ragged_verify_mode": adaptive.mode.value,
            **self._settings.state(),
            "avg_spec_cap_length": self.totals["verify_tokens"] / steps if steps else 0.0,
            "confidence_is_ready": adaptive.source.is_ready,
            "plan_hash": self._step_totals.plan_hash,
            "pinned_budget_fraction": adaptive.planner.pinned_fraction,
            "cost_table_corrections": 0 if correction is None else correction.num_observations,
        }

    def metrics(self) -> SchedulerMetrics:
        """What /metrics shows of the scheduler."""
        return scheduler_metrics(
            self.state(),
            self._step_totals,
            self._recent_means(),
            self._worker.gamma,
            self.limits.max_total_num_tokens,
            self.limits.context_length,
            self._settings.verifier,
        )

    def charts(self) -> dict[str, StateValue]:
        """What the dashboard plots beside `state` and `verification_state`, for /server_info too."""
        throughput = self._recent_means().gen_throughput if self.residency.residents else 0.0
        return {"last_gen_throughput": throughput, **chart_state(self._step_totals, self._settings.verifier)}

    def _recent_means(self) -> DecodeMeans:
        return DecodeMeans.of(list(self.records)[-self.limits.decode_log_interval :], self._worker.gamma)

    def _take_compiled(self, wait_s: float) -> None:
        """Queues the requests whose grammars are compiled, and ends those whose cannot be. What is queued says so
        with an output of no tokens: a call of several grammars has to know that each is one."""
        for request, finish in self._grammars.take(wait_s):
            if finish is None:
                self.residency.enqueue(request)
                self._send(self._output(request, []))
            else:
                self._count_end(finish)
                self._end(request, [], finish)

    def _refusal(self, message: GenerateRequest) -> str | None:
        sampling = message.sampling
        total = len(message.input_ids) + sampling.max_new_tokens
        if message.request_id in self._requests:
            return f"request id {message.request_id!r} is already in flight"
        if not message.input_ids:
            return "the prompt is empty"
        if total > self.limits.context_length:
            return f"prompt and max_new_tokens take {total} tokens, the context length is {self.limits.context_length}"
        if total - 1 > self.limits.max_total_num_tokens:
            return (
                f"prompt and max_new_tokens take {total - 1} KV slots, the whole pool has "
                f"{self.limits.max_total_num_tokens}: lower max_new_tokens or raise --max-total-tokens"
            )
        if sampling.stop and self._tokenizer is None:
            return "'stop' needs a tokenizer, and the server was started with --skip-tokenizer-init"
        return None

    def _seed_for(self, message: GenerateRequest) -> int:
        if message.sampling.seed is not None:
            return message.sampling.seed
        # Distinct per request and reproducible for a fixed --random-seed and order of arrival.
        return (self._random_seed << 32) + self._num_arrivals

    def _prefill(self) -> int:
        """Runs up to `chunked_prefill_size` prompt tokens of the oldest unfinished prefills. Returns how many."""
        budget = self.limits.chunked_prefill_size
        chunks: list[PrefillChunk] = []
        chunked: list[Request] = []
        for request in self.residency.residents:
            if budget == 0:
                break
            if request.is_decodable:
                continue
            start = request.context_len
            token_ids = request.tokens[start : min(len(request.tokens) - 1, start + budget)]
            budget -= len(token_ids)
            chunks.append(PrefillChunk(request.row, start, token_ids))
            chunked.append(request)
        if not chunks:
            return 0
        asking = rows_to_tell([request.prompt_logprobs for request in chunked], chunks)
        found = self._worker.prefill(chunks, [rows for _, rows in asking])
        for (asks, _), told in zip(asking, found, strict=True):
            asks.add(told)
        for request, chunk in zip(chunked, chunks, strict=True):
            request.context_len += len(chunk.token_ids)
            self._worker.runner.request_rows.set_context(request.row, request.context_len, request.tokens[-1])
            self.residency.publish(request)
            if request.is_decodable and request.num_remaining == 0:  # its prompt was all that was asked about
                self.totals["finished"] += 1
                self._end(request, [], FinishReason("length"))
        return self.limits.chunked_prefill_size - budget

    def _admit(self) -> None:
        """Fills free rows. A request whose own settings cannot be put in place fails alone."""
        while True:
            try:
                return self.residency.admit()
            except Exception as error:
                request = self.residency.entering
                if request is None:
                    raise
                self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """Ends a request that a bug has hit."""
        logger.error("request %r failed", request.request_id, exc_info=error)
        self.totals["aborted"] += 1
        self._end(request, [], failure(error))

    def _end(
        self, request: Request, token_ids: list[int], finish: FinishReason, logprobs: Logprobs | None = None
    ) -> None:
        """Frees what the request holds, then says so: a client that hears it may count on the capacity."""
        del self._requests[request.request_id]
        request.has_ended = True
        if request.row >= 0:
            self.residency.release(request, publish=finish.status_code != 500)
        elif not self._grammars.discard(request):
            self.residency.queue.remove(request)
        self._send(self._output(request, token_ids, finish, logprobs))

    def _hand_out(
        self, request: Request, token_ids: list[int], finish: FinishReason | None, logprobs: Logprobs | None
    ) -> None:
        """What a step gave a request, and its end if that is one."""
        if finish is None:
            self._send(self._output(request, token_ids, logprobs=logprobs))
        else:
            self._count_end(finish)
            self._end(request, token_ids, finish, logprobs)

    def _count_end(self, finish: FinishReason) -> None:
        self.totals["aborted" if finish.type == "abort" else "finished"] += 1

    def _output(
        self,
        request: Request,
        token_ids: list[int],
        finish: FinishReason | None = None,
        logprobs: Logprobs | None = None,
    ) -> RequestOutput:
        """`logprobs` are the step's; those of `token_ids`, which a stop may have cut short, are sent."""
        return RequestOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            finish=finish,
            speculative=request.statistics(),
            num_retractions=request.num_retractions,
            queue_seconds=request.queue_seconds,
            token_origins=request.origins.take() if request.origins is not None else [],
            num_cached_tokens=request.num_cached_tokens,
            logprobs=None if logprobs is None else to_message(logprobs, len(token_ids)),
            prompt_logprobs=None if request.prompt_logprobs is None else request.prompt_logprobs.take(),
        )

    def _log(self) -> None:
        interval = self.limits.decode_log_interval
        if interval > 0 and self.records[-1].num_reqs > 0 and self.num_steps % interval == 0:
            recent = list(self.records)[-interval:]
            logger.info(
                decode_log_line(
                    recent,
                    self._worker.gamma,
                    self.residency.num_used_tokens,
                    self.limits.max_total_num_tokens,
                    len(self.residency.queue),
                )
            )
            plans = plan_log_line(recent)
            if plans is not None:
                logger.info(plans)
