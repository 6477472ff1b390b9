"""Captured steps from flags: the tiers a device runs on, and the graphs of every step that can be asked for."""

from __future__ import annotations

import logging
import time

import torch

from flashspark import envs
from flashspark.args import ServerArgs
from flashspark.engine.build import Engine
from flashspark.engine.graph_runner import make_step_runner, used_bytes
from flashspark.engine.model_runner import ModelRunner
from flashspark.speculative.accept import AcceptRule
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.confidence import ConfidenceSource
from flashspark.speculative.planner_input import PlannerSettings
from flashspark.speculative.step_graphs import StepGraphs
from flashspark.speculative.tiers import TierGrid, TierRule
from flashspark.speculative.worker import SpeculativeWorker

logger = logging.getLogger(__name__)

# Every shape is captured on a GPU, which takes memory and seconds of the start; absent slots cost next to nothing.
GPU_RELATIVE, GPU_RELATIVE_REQS = 8, 4


def tier_rule(args: ServerArgs, device: torch.device, width: int) -> TierRule:
    """How fine the tiers are on a device."""
    max_reqs, finest = args.max_running_requests, args.speculative_verify_tier_tokens
    assert max_reqs is not None  # resolved by ServerArgs
    if device.type == "cpu":
        return TierRule(width, max_reqs, finest_tokens=finest)
    return TierRule(
        width,
        min(max_reqs, args.cuda_graph_max_bs_decode or max_reqs),
        finest_tokens=finest,
        relative=GPU_RELATIVE,
        relative_reqs=GPU_RELATIVE_REQS,
    )


def accept_rule(mode: VerifyMode, width: int) -> AcceptRule:
    """What `SGLANG_SIMULATE_ACC_LEN` asks for.

    Raises:
        ValueError: a length that this mode or width cannot have.
    """
    length = envs.simulated_accept_length()
    if length is None:
        return AcceptRule()
    name = envs.SIMULATE_ACC_LEN.name
    if length > 1 and mode is not VerifyMode.STATIC:
        raise ValueError(
            f"{name}={length:g} in {mode.value}: drafts would be accepted past a trimmed block; use static, or 1"
        )
    if length > width:
        raise ValueError(f"{name}={length:g}: a step commits at most its block of {width}")
    return AcceptRule(length - 1.0)


def check_backends(runner: ModelRunner, decode_flag: str = "--attention-backend") -> None:
    """Whether steps on the runner's attention backends can be captured. `decode_flag` asked for that of decode steps.

    Raises:
        ValueError: one cannot; which, and the remedy.
    """
    backends = {decode_flag: runner.verify_backend}
    if runner.draft is not None:
        backends["--speculative-draft-attention-backend"] = runner.draft_backend
    for flag, backend in backends.items():
        if not backend.capabilities.supports_ragged_verify_graph:
            raise ValueError(
                f"{flag} {backend.name} cannot be captured in CUDA graphs: use triton (of the target for decode steps "
                "alone: --decode-attention-backend triton), or --disable-cuda-graph"
            )


def build_graphs(
    args: ServerArgs,
    engine: Engine,
    worker: SpeculativeWorker,
    source: ConfidenceSource | None,
    grid: TierGrid,
) -> StepGraphs | None:
    """The captured steps of `worker`; None on a CPU, where a step has any shape it needs.

    `source` is of the confidence that drafts are predicted with; None in a server that never plans. May take seconds.
    """
    device, captures = engine.runner.device, not args.disable_cuda_graph
    runner = make_step_runner(device, captures)
    if runner is None:
        return None
    if captures:
        check_backends(
            engine.runner, f"--{'decode-' if args.decode_attention_backend else ''}attention-backend"
        )
    eps = PlannerSettings(worker.gamma).survival_eps if worker.gamma else 0.0
    graphs = StepGraphs(
        engine.runner, worker.sampling, worker.drafter, source, grid, eps, runner, worker.rule
    )
    if captures:
        if not args.enable_deterministic_inference:  # a choice by time may be another one at the next start
            _choose_matmuls(engine, graphs, worker.width)
        _capture(graphs, (False,) if source is None else (False, True), device)
    return graphs


@torch.inference_mode()
def _choose_matmuls(engine: Engine, graphs: StepGraphs, width: int) -> None:
    """Of every number of rows that a captured step multiplies."""
    started, grid = time.monotonic(), graphs.grid
    shapes = [*grid.plain_keys(), *(grid.reachable_keys() if width > 1 else ())]
    rows = {shape.num_tokens for shape in shapes} | {num_reqs * width for num_reqs in grid.buckets}
    num_loaded = engine.runner.choose_matmuls(sorted(rows), graphs.logits)
    logger.info(
        "matrix products: measured for %d row counts in %.1f s; %d products chosen under load",
        *(len(rows), time.monotonic() - started, num_loaded),
    )


@torch.inference_mode()
def _capture(graphs: StepGraphs, signals: tuple[bool, ...], device: torch.device) -> None:
    started = shown = time.monotonic()
    before = used_bytes(device)

    def on_progress(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= 2.0:
            shown = time.monotonic()
            logger.info("capturing CUDA graphs: %d of %d shapes", done, total)

    num_graphs = graphs.capture(signals, on_progress)
    num_bytes = used_bytes(device) - before
    logger.info(
        "captured %d CUDA graphs in %.1f s: %.2f GiB, %.1f MiB each",
        num_graphs,
        time.monotonic() - started,
        num_bytes / 2**30,
        num_bytes / 2**20 / num_graphs,
    )
