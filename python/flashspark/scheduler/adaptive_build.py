"""Adaptive verification from flags: every refusal of it in one place, the cost table, and the object that plans.

`read_inputs` looks at flags and files before a model is loaded; `build_adaptive` at the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from flashspark import envs
from flashspark.args import ServerArgs
from flashspark.engine.build import Engine
from flashspark.engine.fingerprint import device_fingerprint, folder_fingerprint, version_fingerprint
from flashspark.speculative.adaptive import AdaptiveVerifier, VerifyMode
from flashspark.speculative.calibration import StsCalibration, load_sts
from flashspark.speculative.confidence import ConfidenceSource
from flashspark.speculative.cost_table import (
    CostCorrection,
    CostTable,
    PlainStepCosts,
    SpsAdditiveCostTable,
    SpsCostTable,
    load_cost_table,
)
from flashspark.speculative.drafter import has_confidence_head, make_confidence_source, make_scratch_source
from flashspark.speculative.looks import LookRule
from flashspark.speculative.planner import VerifyPlanner
from flashspark.speculative.planner_input import PlannerSettings
from flashspark.speculative.startup_table import (
    BUDGET_SECONDS,
    CONTEXT_TOKENS,
    PLAIN_BUDGET_SECONDS,
    StepTimer,
    measure_plain_costs,
    measure_tables,
)
from flashspark.speculative.sts_records import CollectingHead, record_files
from flashspark.speculative.table_cache import FORMAT, Fingerprint, StoredTables, TableCache, cache_folder
from flashspark.speculative.tiers import TierGrid, spaced
from flashspark.speculative.worker import SpeculativeWorker

from .graph_build import build_graphs, tier_rule

logger = logging.getLogger(__name__)

WORST_ERROR_TO_KEEP = 0.1  # mean relative error of the fit
PLAIN_RATE = 0.125  # of correction: where drafting wins, a draft-free step is rare, and has to count
# At that rate one slow step (the first of its kind loads its kernels) would make all plain steps a quarter too dear.
PLAIN_MEDIAN_OF = 3
_MODE = "--ragged-verify-mode (SGLANG_RAGGED_VERIFY_MODE)"
_TABLE = "--speculative-dspark-sps-table-path"
_STS = "--speculative-dspark-confidence-sts-path"
_COLLECT = envs.DSPARK_STS_COLLECT_PATH.name

T = TypeVar("T")
Info = dict[str, int | float | str | bool | list[int | str] | None]


@dataclass(frozen=True)
class AdaptiveInputs:
    """The mode and the files it reads, checked as far as that goes without a model."""

    mode: VerifyMode
    table: SpsCostTable | SpsAdditiveCostTable | None = None
    calibration: StsCalibration | None = None
    collect_stem: str = ""  # records for a calibration go there; empty: none are kept


@dataclass(frozen=True)
class _Costs:
    """The tables to plan with, and where they come from, for log and /server_info."""

    table: CostTable | None
    plain: PlainStepCosts | None
    source: str


def read_inputs(args: ServerArgs) -> AdaptiveInputs:
    """What the flags ask for.

    Raises:
        ValueError: a mode that cannot work with these flags, or a file that cannot be read.
    """
    mode = VerifyMode(args.ragged_verify_mode)
    collect_stem = _collect_stem(args, mode)
    if mode is VerifyMode.STATIC:
        for name, value in (
            (_TABLE, args.speculative_dspark_sps_table_path),
            (_STS, args.speculative_dspark_confidence_sts_path),
            ("--speculative-min-drafts-every", args.speculative_min_drafts_every),
        ):
            if value:
                logger.warning("%s has no effect in static verification: give %s compact", name, _MODE)
        return AdaptiveInputs(mode)
    if not args.speculative:
        raise ValueError(
            f"{_MODE} {mode.value}: verification is planned from a draft's confidence, and there is no draft; add "
            "--speculative-algorithm and --speculative-draft-model-path, or use static"
        )
    table_path, sts_path = args.speculative_dspark_sps_table_path, args.speculative_dspark_confidence_sts_path
    return AdaptiveInputs(
        mode,
        _named(_TABLE, load_cost_table, table_path) if table_path else None,
        _named(_STS, load_sts, sts_path) if sts_path else None,
        collect_stem,
    )


def _collect_stem(args: ServerArgs, mode: VerifyMode) -> str:
    """Where records for a calibration go; empty if nobody asked for any."""
    stem = envs.DSPARK_STS_COLLECT_PATH.get()
    if not stem:
        return ""
    if mode is not VerifyMode.CAP_ACCEPT:
        raise ValueError(
            f"{_COLLECT}: records are collected in mode cap-accept alone: add --ragged-verify-mode cap-accept"
        )
    if args.speculative_dspark_confidence_sts_path:
        raise ValueError(f"{_COLLECT}: a calibration is fitted to an uncalibrated head: leave {_STS} out")
    if envs.simulated_accept_length() is not None:
        raise ValueError(
            f"{_COLLECT}: with {envs.SIMULATE_ACC_LEN.name} no draft is accepted, whatever the head says"
        )
    if files := record_files(stem):
        raise ValueError(
            f"{_COLLECT}: {files[0]} exists, and records of two runs must not mix: move it or give another stem"
        )
    if not Path(stem).parent.is_dir():
        raise ValueError(f"{_COLLECT}: there is no folder {Path(stem).parent}")
    return stem


def build_adaptive(
    args: ServerArgs, inputs: AdaptiveInputs, engine: Engine, worker: SpeculativeWorker
) -> tuple[AdaptiveVerifier | None, Info]:
    """The verifier for `worker`, None in static mode, and what /server_info says of it.

    May take seconds: without a table, step costs are measured now. Everything that can be refused is refused before.

    Raises:
        ValueError: draft, backend, width or file do not fit the mode; the message names the remedy.
    """
    runner, max_reqs = engine.runner, args.max_running_requests
    assert max_reqs is not None  # resolved by ServerArgs
    grid = TierGrid(tier_rule(args, engine.runner.device, worker.width))
    if inputs.mode is VerifyMode.STATIC:
        worker.graphs = build_graphs(args, engine, worker, None, grid)
        return None, {"speculative_cost_table_source": None}
    _check_engine(inputs.mode, engine, worker)
    source = _source(inputs, engine, worker.gamma, max_reqs)
    if source is None:
        raise ValueError(
            f"{_MODE} {inputs.mode.value}: {args.speculative_draft_model_path} is a DFlash draft of the first kind, "
            "whose drafts come without confidence; use a DFlash2 or DSpark draft, or static"
        )
    worker.graphs = build_graphs(args, engine, worker, source, grid)
    costs = _costs(args, inputs, engine, worker, grid)
    settings = PlannerSettings(
        gamma=worker.gamma,
        min_drafts_every=args.speculative_min_drafts_every,
        look_rule=_look_rule(inputs, runner.device),
        trim_without_table=inputs.mode is VerifyMode.CAP_ACCEPT and not inputs.collect_stem,
    )
    rows, plain = _corrections(args, worker.width)
    planner = VerifyPlanner(settings, costs.table, grid, costs.plain, rows, plain)
    _log_costs(costs, planner, max_reqs, worker.width)
    info: Info = {
        "speculative_cost_table_source": costs.source,
        "speculative_cost_table_json": planner.table.to_json()
        if isinstance(planner.table, SpsCostTable | SpsAdditiveCostTable)
        else None,
        "speculative_confidence_source": "head" if has_confidence_head(runner) else "online estimator",
        "cost_table_correction": rows is not None and inputs.mode is VerifyMode.COMPACT,
        "verify_request_buckets": list(grid.buckets),
    }
    return AdaptiveVerifier(inputs.mode, planner, source, max_reqs, runner.device), info


def _look_rule(inputs: AdaptiveInputs, device: torch.device) -> LookRule:
    """A collector wants every block. On a GPU a look costs less of a step than on a CPU, and a smaller gain pays."""
    if inputs.collect_stem:
        return LookRule(idle_every=1)
    return LookRule() if device.type == "cpu" else LookRule.of_captured_steps()


def _check_engine(mode: VerifyMode, engine: Engine, worker: SpeculativeWorker) -> None:
    backend = engine.runner.verify_backend
    if not backend.capabilities.supports_ragged_verify:
        raise ValueError(
            f"{_MODE} {mode.value}: the attention backend {backend.name} cannot verify windows of different lengths; "
            "use --attention-backend triton (torch_native on a CPU; for decode steps alone: "
            "--decode-attention-backend), or static"
        )
    if worker.gamma < 1:
        raise ValueError(
            f"{_MODE} {mode.value}: a block of {worker.width} row has no draft to trim; raise "
            "--speculative-num-draft-tokens to 2 or more, or use static"
        )


def _source(inputs: AdaptiveInputs, engine: Engine, gamma: int, max_reqs: int) -> ConfidenceSource | None:
    runner = engine.runner
    if not inputs.collect_stem:
        return make_confidence_source(runner, max_reqs, _temperatures(inputs, engine, gamma))
    if not has_confidence_head(runner):
        raise ValueError(
            f"{_COLLECT}: the draft has no confidence head, so there is nothing to calibrate; unset it"
        )
    logger.info(
        "confidence records: collected into %s.<number>.pt; every draft is verified, whatever it costs",
        inputs.collect_stem,
    )
    return CollectingHead(max_reqs, gamma, runner.device, inputs.collect_stem)


def _temperatures(inputs: AdaptiveInputs, engine: Engine, gamma: int) -> tuple[float, ...] | None:
    """The calibration that fits the head; None where there is no file or no head."""
    if inputs.calibration is None:
        return None
    if not has_confidence_head(engine.runner):
        logger.warning(
            "%s has no effect: the draft has no confidence head, its confidence is learned online", _STS
        )
        return None
    temperatures = inputs.calibration.temperatures
    if len(temperatures) != gamma:
        raise ValueError(
            f"{_STS}: the file has {len(temperatures)} temperatures, a block has {gamma} drafts; fit the file at this "
            "block size, or set --speculative-dspark-block-size to what it was fitted at"
        )
    return temperatures


def _costs(
    args: ServerArgs, inputs: AdaptiveInputs, engine: Engine, worker: SpeculativeWorker, grid: TierGrid
) -> _Costs:
    """A file wins; then what is measured, now or at an earlier start; then nothing.

    A file has no price for draft-free steps: that is measured beside it, unless nothing may be.
    """
    if inputs.collect_stem:
        return _Costs(None, None, "none")
    file = None if inputs.table is None else f"file {args.speculative_dspark_sps_table_path}"
    if args.speculative_cost_table == "none":
        return _Costs(inputs.table, None, file or "none")
    fingerprint = _fingerprint(args, engine, worker, grid)
    cache = TableCache(cache_folder(), fingerprint, ("target", "draft", "width"))
    stored = cache.load()
    if stored is not None:
        logger.info("step costs: measured at an earlier start, read from %s", cache.path)
        if file is not None:
            return _Costs(inputs.table, stored.plain, file)
        return _Costs(stored.table, stored.plain, f"cache {cache.path}")
    started = time.monotonic()
    runner, max_reqs = engine.runner, grid.rule.max_num_reqs
    assert worker.drafter is not None  # refused before
    scratch = make_scratch_source(runner, max_reqs)
    try:
        timer = StepTimer(
            runner, worker.drafter, scratch, grid, max_reqs, engine.context_length, graphs=worker.graphs
        )
    except ValueError as error:
        logger.warning("step costs cannot be measured: %s", error)
        return _Costs(inputs.table, None, file or "none")
    if file is not None:
        logger.info(
            "step costs: measuring steps without a draft, which the file does not price, %.0f s at most",
            PLAIN_BUDGET_SECONDS,
        )
        return _Costs(inputs.table, measure_plain_costs(timer, max_reqs, worker.gamma), file)
    logger.info("step costs: measuring them, %.0f s at most (kept for the next start)", BUDGET_SECONDS)
    fitted, measured = measure_tables(timer, max_reqs, worker.gamma)
    seconds = time.monotonic() - started
    logger.info(
        "step costs: measured in %.1f s, %d shapes %d times; the table describes them within %.0f %% on average, "
        "%.0f %% at worst",
        seconds,
        len(measured.samples),
        measured.num_rounds,
        100 * fitted.mean_error,
        100 * fitted.worst_error,
    )
    if measured.num_left_out:
        logger.warning(
            "step costs: %d shapes would have taken too long and are interpolated", measured.num_left_out
        )
    if fitted.mean_error > WORST_ERROR_TO_KEEP or measured.num_left_out > len(measured.samples):
        logger.warning(
            "step costs: too rough to keep for the next start; is the machine busy with something else?"
        )
    else:
        cache.store(
            StoredTables(FORMAT, fingerprint, fitted.table, fitted.plain, fitted.worst_error, seconds)
        )
    return _Costs(fitted.table, fitted.plain, "measured at start-up")


def _fingerprint(args: ServerArgs, engine: Engine, worker: SpeculativeWorker, grid: TierGrid) -> Fingerprint:
    runner = engine.runner
    assert args.speculative_draft_model_path is not None  # refused before
    rule = grid.rule
    return {
        "target": folder_fingerprint(args.model_path),
        "draft": folder_fingerprint(args.speculative_draft_model_path),
        "width": worker.width,
        "overrides": args.json_model_override_args,
        "weights": f"{args.load_format}, {args.speculative_draft_load_format or args.load_format}",
        "dtype": str(runner.target.dtype).removeprefix("torch."),
        "device": device_fingerprint(runner.device),
        "attention": f"{runner.verify_backend.name}, {runner.draft_backend.name}",
        "page size": args.page_size,
        "context": min(CONTEXT_TOKENS, engine.context_length - worker.width),
        "graphs": int(worker.graphs is not None and not args.disable_cuda_graph),
        "tiers": f"{rule.max_num_reqs} requests, finest {rule.finest_reqs} and {rule.finest_tokens}, 1/{rule.relative}",
        "tensor parallel": args.tp_size,
        "versions": version_fingerprint(),
    }


def _corrections(args: ServerArgs, width: int) -> tuple[CostCorrection | None, CostCorrection | None]:
    """Of the table by rows and of draft-free steps by requests; None where step times must not steer plans."""
    if args.disable_cost_table_correction or args.enable_deterministic_inference:
        return None, None
    max_reqs = args.max_running_requests
    assert max_reqs is not None
    rows = spaced(1, max_reqs * width, width, 4)
    return CostCorrection(np.array(rows)), CostCorrection(
        np.array(spaced(1, max_reqs, 1, 4)), rate=PLAIN_RATE, median_of=PLAIN_MEDIAN_OF
    )


def _log_costs(costs: _Costs, planner: VerifyPlanner, max_reqs: int, width: int) -> None:
    """What the planner thinks a step takes, in a line that can be checked at a glance."""
    table = planner.table
    if costs.table is None or costs.table.is_uninitialized or table is None:
        what = "a cap is set wherever a draft is hopeless" if table is not None else "every draft is verified"
        logger.info("cost table: %s; without step costs %s", costs.source, what)
        return
    batches = sorted({min(n, max_reqs) for n in (1, 8, 32)} | {max_reqs})
    shapes = [(n, rows) for n in batches for rows in sorted({n * 2, n * width})]
    parts = [f"({n}, {m}) {1e3 * float(table.step_seconds(n, np.array([m]))[0]):.2f}" for n, m in shapes]
    if costs.plain is not None:
        parts += [f"({n}, no draft) {1e3 * costs.plain.step_seconds(n):.2f}" for n in batches]
    logger.info("cost table: %s; ms at (requests, rows): %s", costs.source, ", ".join(parts))
    if isinstance(table, SpsCostTable) and table.sample_batch_tokens[-1] < max_reqs * width:
        logger.warning(
            "%s ends at %d rows, a full batch has %d: larger steps are priced like its last probe, so nothing of them "
            "is trimmed for their own sake; profile up to --max-running-requests, or lower that",
            _TABLE,
            table.sample_batch_tokens[-1],
            max_reqs * width,
        )


def _named(flag: str, load: Callable[[str], T], path: str) -> T:
    try:
        return load(path)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
