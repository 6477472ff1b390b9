"""`/metrics`: what requests took, counted here, and what the scheduler says of itself at the moment of the call.

Names, labels and bucket edges are SGLang's where SGLang has the metric.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from flashspark.ipc import SchedulerMetrics, SchedulerReady

from .engine_client import EngineDead
from .wire import json_response

if TYPE_CHECKING:
    from .context import ServerContext

PREFIX = "sglang:"
_TTFT_EDGES = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E_EDGES = (*_TTFT_EDGES, 600, 1200, 1800, 2400)
_PER_TOKEN_EDGES = (*(0.002, 0.005, 0.010, 0.020, 0.030, 0.040, 0.050, 0.060, 0.080), *_TTFT_EDGES[:7])
_QUEUE_EDGES = (0.001, 0.005, 0.01, 0.05, *_TTFT_EDGES[:-2])
_LENGTH_EDGES = tuple(1 << i for i in range(4, 18))
_ITL_EDGES = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040),
    *(0.060, 0.080, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)

# Of the scheduler, in the order they are shown. A name that ends in _total is a counter, the others are gauges.
SCHEDULER_METRICS = {
    "num_running_reqs": "Requests that hold a row.",
    "num_queue_reqs": "Requests that wait for a row or for pages.",
    "utilization": "Share of the rows that requests hold.",
    "num_retracted_reqs": "Requests that gave up their pages and wait for others.",
    "num_grammar_queue_reqs": "Requests that wait for their grammar to be compiled.",
    "num_so_requests_total": "Requests with a grammar.",
    "num_used_tokens": "KV positions in pages that requests hold.",
    "max_total_num_tokens": "KV positions of the pool.",
    "kv_used_tokens": "As num_used_tokens.",
    "kv_available_tokens": "KV positions in pages that are free.",
    "kv_evictable_tokens": "KV positions in pages of the prefix cache that no request holds.",
    "page_size": "KV positions of a page.",
    "num_pages": "Pages of the pool.",
    "context_len": "Most tokens of prompt and output together.",
    "token_usage": "Share of the pool's KV positions in pages that requests hold.",
    "cache_hit_rate": "Share of the admitted prompts' tokens that the prefix cache had.",
    "cached_tokens_total": "Tokens of the admitted prompts that the prefix cache had.",
    "realtime_tokens_total": "Tokens by mode: computed prompts, those that the prefix cache had, and output.",
    "gen_throughput": "Output tokens per second of the latest decode steps; 0 while nothing runs.",
    "num_retractions_total": "Times a request gave up its pages to an older one.",
    "num_aborted_requests_total": "Requests that were aborted.",
    "spec_num_steps": "Passes of the draft per step.",
    "spec_num_draft_tokens": "Rows of a full block: the anchor and the drafts.",
    "spec_accept_length": "Output tokens per request and verify step, of the latest steps.",
    "spec_accept_rate": "Accepted share of the drafts of full blocks, of the latest steps.",
    "spec_cap_length": "Rows verified per request and step, the anchor included, of the latest steps.",
    "spec_block_accept_length": "What the accept length would be without caps; in cap-accept alone.",
    "spec_verify_calls_total": "Verify steps, counted per request.",
    "verify_tokens_total": "Rows verified, anchors included.",
    "verify_full_block_tokens_total": "Rows of everybody's full blocks.",
    "verify_tokens_trimmed_total": "Rows of full blocks that drafted steps did not verify.",
    "verify_pad_tokens_total": "Rows run that belong to no request.",
    "plans_total": "Plans by what they came to.",
    "plan_unresolved_total": "Plans that had no confidence to go by, by reason.",
    "plan_skipped_small_batch_total": "Plans that priced nothing, because every budget runs on one tier.",
    "plan_predicted_steps_total": "Steps whose time was predicted.",
    "plan_predicted_step_seconds_total": "Predicted seconds of these steps.",
    "plan_measured_step_seconds_total": "Measured seconds of the same steps.",
    "spec_step_time_error_seconds": "Predicted minus measured seconds per step, of the latest steps.",
    "confidence_is_ready": "1 once the confidence may trim.",
    "confidence_scored_blocks_total": "Blocks whose outcome was held against the confidence.",
    "confidence_expected_accepted_total": "Accepted drafts that the confidence expected of these blocks.",
    "confidence_actual_accepted_total": "Accepted drafts of these blocks.",
    "confidence_expected_minus_actual": "The difference of the two, per block.",
    "confidence_calibration_error": "Mean distance of survival from its outcome, by draft position.",
    "estimator_slope": "Slope of the online estimator, by class of requests.",
    "estimator_intercept": "Its intercepts, by class and draft position.",
    "estimator_observations_total": "Drafts it has learnt from, by class and draft position.",
}


class Timed(Protocol):
    """An answer as it comes in; `Choice` is one. Times are monotonic."""

    first_token_s: float | None
    last_token_s: float | None
    queue_seconds: float | None


class RequestMetrics:
    """Counts and times of answers, as the API process sees them. One per server."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # a second series beside each counter that nobody reads
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine_type": "unified"}
        names = (*self.labels, "is_streaming")

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, names, registry=self.registry)

        def histogram(
            name: str, text: str, edges: Iterable[float], labels: Iterable[str] = names
        ) -> Histogram:
            return Histogram(PREFIX + name, text, labels, registry=self.registry, buckets=tuple(edges))

        self._requests = counter("num_requests", "Answers that ended.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of answers that ended.")
        self._generation_tokens = counter("generation_tokens", "Output tokens of answers that ended.")
        self._first = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT_EDGES
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _E2E_EDGES)
        self._between = histogram(
            "inter_token_latency_seconds",
            "Between tokens: the time between two steps' tokens over their number, once for each.",
            _ITL_EDGES,
            tuple(self.labels),
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "From the first token to the last, over the tokens between; answers of one token have none.",
            _PER_TOKEN_EDGES,
        )
        self._queue = histogram(
            "queue_time_seconds", "From arrival to a row.", _QUEUE_EDGES, tuple(self.labels)
        )
        self._prompt_lengths = histogram(
            "prompt_tokens_histogram", "Answers by prompt tokens.", _LENGTH_EDGES, tuple(self.labels)
        )
        self._output_lengths = histogram(
            "generation_tokens_histogram", "Answers by output tokens.", _LENGTH_EDGES, tuple(self.labels)
        )
        gauges = {
            "startup_time_seconds": "From the start of the process to the first request it could take.",
            "num_paused_reqs": "Requests in flight while /pause_generation holds them.",
            "kv_cache_memory_usage_gb": "GiB of the KV pools.",
        }
        self._gauges = {
            name: Gauge(PREFIX + name, text, tuple(self.labels), registry=self.registry)
            for name, text in gauges.items()
        }

    def observe_tokens(self, answer: Timed, num_new: int, started_s: float, is_streaming: bool) -> None:
        """`num_new` tokens of an answer that was asked for at `started_s` (monotonic) have come in."""
        if num_new == 0:
            return
        now = time.monotonic()
        if answer.last_token_s is None:
            answer.first_token_s = now
            self._first.labels(**self._of(is_streaming)).observe(now - started_s)
        else:
            between = self._between.labels(**self.labels)
            for _ in range(num_new):
                between.observe((now - answer.last_token_s) / num_new)
        answer.last_token_s = now

    def observe_end(
        self, answer: Timed, num_prompt: int, num_output: int, started_s: float, is_streaming: bool
    ) -> None:
        """An answer has ended, its tokens observed."""
        labels = self._of(is_streaming)
        self._requests.labels(**labels).inc()
        self._prompt_tokens.labels(**labels).inc(num_prompt)
        self._generation_tokens.labels(**labels).inc(num_output)
        self._e2e.labels(**labels).observe(time.monotonic() - started_s)
        self._prompt_lengths.labels(**self.labels).observe(num_prompt)
        self._output_lengths.labels(**self.labels).observe(num_output)
        if answer.queue_seconds is not None:
            self._queue.labels(**self.labels).observe(answer.queue_seconds)
        if num_output > 1 and answer.first_token_s is not None and answer.last_token_s is not None:
            seconds = (answer.last_token_s - answer.first_token_s) / (num_output - 1)
            self._per_token.labels(**labels).observe(seconds)

    def set(self, name: str, value: float | None) -> None:
        """A gauge of the server, by its name without the prefix; None where it is not known."""
        if value is not None:
            self._gauges[name].labels(**self.labels).set(value)

    def _of(self, is_streaming: bool) -> dict[str, str]:
        return self.labels | {"is_streaming": "true" if is_streaming else "false"}


async def metrics(request: Request, context: ServerContext) -> Response:
    """Prometheus' text format; 404 without --enable-metrics."""
    if context.metrics is None:
        return json_response({"detail": "Not Found"}, status=404)
    context.metrics.set("startup_time_seconds", context.startup_seconds)
    context.metrics.set("num_paused_reqs", context.engine.num_in_flight if context.paused else 0)
    context.metrics.set("kv_cache_memory_usage_gb", kv_memory(context.ready)["kvcache"])
    families: list[Metric] = []
    try:
        scheduler = await context.engine.metrics()
    except (EngineDead, TimeoutError, asyncio.TimeoutError):
        pass  # what is counted here is shown anyhow
    else:
        families = scheduler_families(scheduler, context.metrics.labels)
    text = generate_latest(context.metrics.registry) + generate_latest(_Shown(families))
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def kv_memory(ready: SchedulerReady) -> dict[str, Any]:
    """What the KV pool takes, in GiB and in tokens."""
    bytes_per_token = ready.info.get("kv_bytes_per_token")
    size = bytes_per_token * ready.max_total_num_tokens / 2**30 if isinstance(bytes_per_token, int) else None
    return {"kvcache": size, "token_capacity": ready.max_total_num_tokens}


def scheduler_families(scheduler: SchedulerMetrics, labels: dict[str, str]) -> list[Metric]:
    """The scheduler's samples as metrics, with the labels of the only rank."""
    labels = labels | {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for sample in scheduler.samples:
        family = families.get(sample.name)
        if family is None:
            kind = CounterMetricFamily if sample.name.endswith("_total") else GaugeMetricFamily
            names = [*labels, *sample.labels]
            family = kind(PREFIX + sample.name, SCHEDULER_METRICS[sample.name], labels=names)
            families[sample.name] = family
        family.add_metric([*labels.values(), *sample.labels.values()], sample.value)
    counts = scheduler.steps_by_size
    sizes = HistogramMetricFamily(
        PREFIX + "verify_tier_tokens",
        "Decode steps by the rows they ran, padding included.",
        labels=list(labels),
    )
    edges = [str(float(1 << i)) for i in range(len(counts) - 1)] + ["+Inf"]
    buckets = [(edge, sum(counts[: i + 1])) for i, edge in enumerate(edges)]
    sizes.add_metric(list(labels.values()), buckets, sum_value=scheduler.num_rows_run)
    return [*(families[name] for name in SCHEDULER_METRICS if name in families), sizes]


class _Shown(CollectorRegistry):
    """Metrics that exist for one answer."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
