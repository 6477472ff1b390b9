"""What /metrics shows of the scheduler, put together when somebody asks. Names are those of the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from flashspark.ipc import MetricSample, SchedulerMetrics
from flashspark.speculative.adaptive import AdaptiveVerifier

from .step_record import DecodeMeans
from .step_totals import StepTotals

_CLASSES = {1: ("all",), 2: ("greedy", "sampled")}  # of requests, as the estimator has coefficients for them


def scheduler_metrics(
    state: dict[str, int | float],
    totals: StepTotals,
    means: DecodeMeans,
    gamma: int,
    max_total_num_tokens: int,
    context_length: int,
    adaptive: AdaptiveVerifier | None,
) -> SchedulerMetrics:
    """Counts and gauges. Waits for the device where a source of confidence keeps its sums there.

    Args:
        state: `Scheduler.state()`.
        means: of the latest steps.
    """
    page_size = int(max_total_num_tokens // state["num_pages"])
    names = (
        *("num_running_reqs", "num_queue_reqs", "num_grammar_queue_reqs", "num_retracted_reqs"),
        *("num_used_tokens", "num_pages"),
    )
    values: dict[str, float] = {name: state[name] for name in names} | {
        "utilization": state["num_running_reqs"] / state["max_running_requests"],
        "max_total_num_tokens": max_total_num_tokens,
        "kv_used_tokens": state["num_used_tokens"],
        "kv_available_tokens": state["num_free_pages"] * page_size,
        "kv_evictable_tokens": state["num_evictable_pages"] * page_size,
        "page_size": page_size,
        "context_len": context_length,
        "token_usage": state["num_used_tokens"] / max_total_num_tokens,
        "cache_hit_rate": state["cache_hit_rate"],
        "gen_throughput": means.gen_throughput if state["num_running_reqs"] else 0.0,
        "num_retractions_total": state["num_retractions"],
        "num_aborted_requests_total": state["aborted"],
        "num_so_requests_total": state["num_so_requests"],
    }
    samples = [MetricSample(name, value) for name, value in values.items()]
    samples.append(
        MetricSample("cached_tokens_total", state["num_cached_tokens"], {"cache_source": "device"})
    )
    tokens = {
        "prefill_compute": state["num_prompt_tokens"] - state["num_cached_tokens"],
        "prefill_cache": state["num_cached_tokens"],
        "decode": state["output_tokens"],
    }
    samples += [
        MetricSample("realtime_tokens_total", value, {"mode": mode}) for mode, value in tokens.items()
    ]
    if gamma:
        samples += _of_speculation(state, means, gamma)
    if adaptive is not None:
        samples += _of_plans(totals, means)
        samples += _of_confidence(adaptive)
    return SchedulerMetrics(samples, totals.steps_by_size, totals.num_rows_run)


def _of_speculation(state: dict[str, int | float], means: DecodeMeans, gamma: int) -> list[MetricSample]:
    return [
        MetricSample("spec_num_steps", 1),  # one pass of the draft gives the whole block
        MetricSample("spec_num_draft_tokens", gamma + 1),
        MetricSample("spec_accept_length", means.accept_length),
        MetricSample("spec_accept_rate", means.accept_rate),
        MetricSample("spec_verify_calls_total", state["verify_steps"]),
        MetricSample("verify_tokens_total", state["verify_tokens"]),
    ]


def _of_plans(totals: StepTotals, means: DecodeMeans) -> list[MetricSample]:
    optional = {
        "spec_cap_length": means.cap_length,
        "spec_block_accept_length": means.block_accept_length,
        "spec_step_time_error_seconds": means.step_time_error_s,
    }
    samples = [MetricSample(name, value) for name, value in optional.items() if value is not None]
    samples += [
        MetricSample("verify_full_block_tokens_total", totals.num_full_tokens),
        MetricSample("verify_tokens_trimmed_total", totals.num_trimmed_tokens),
        MetricSample("verify_pad_tokens_total", totals.num_pad_tokens),
        MetricSample("plan_skipped_small_batch_total", totals.num_small_batch_plans),
        MetricSample("plan_predicted_steps_total", totals.num_predicted_steps),
        MetricSample("plan_predicted_step_seconds_total", totals.predicted_seconds),
        MetricSample("plan_measured_step_seconds_total", totals.measured_seconds),
    ]
    counts = (
        ("plans_total", "outcome", totals.outcomes),
        ("plan_unresolved_total", "reason", totals.unresolved),
    )
    for name, label, counter in counts:
        samples += [MetricSample(name, count, {label: value}) for value, count in sorted(counter.items())]
    return samples


def _of_confidence(adaptive: AdaptiveVerifier) -> list[MetricSample]:
    summary = adaptive.source.summary()
    samples = [
        MetricSample("confidence_is_ready", float(adaptive.source.is_ready)),
        MetricSample("confidence_scored_blocks_total", _number(summary["scored_blocks"])),
        MetricSample("confidence_expected_accepted_total", _number(summary["expected_accepted"])),
        MetricSample("confidence_actual_accepted_total", _number(summary["actual_accepted"])),
        MetricSample("confidence_expected_minus_actual", _number(summary["expected_minus_actual_per_block"])),
    ]
    errors = summary["calibration_errors"]
    assert isinstance(errors, list)
    samples += [
        MetricSample("confidence_calibration_error", _number(error), {"position": str(k)})
        for k, error in enumerate(errors)
    ]
    slopes = summary.get("slope")
    if not isinstance(slopes, list):  # a trained head has no coefficients that change
        return samples
    classes = _CLASSES[len(slopes)]
    samples += [
        MetricSample("estimator_slope", _number(slope), {"class": name})
        for name, slope in zip(classes, slopes, strict=True)
    ]
    for metric, key in (
        ("estimator_intercept", "intercepts"),
        ("estimator_observations_total", "observations"),
    ):
        rows = summary[key]
        assert isinstance(rows, list)
        for name, row in zip(classes, rows, strict=True):
            assert isinstance(row, Sequence)
            samples += [
                MetricSample(metric, value, {"class": name, "position": str(k)})
                for k, value in enumerate(row)
            ]
    return samples


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
