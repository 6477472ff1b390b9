"""From validated arguments to a scheduler that can serve."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashspark import envs
from flashspark.args import ServerArgs
from flashspark.args.server_args import flag_name
from flashspark.engine.build import Engine, EngineOptions, build_engine, verify_width
from flashspark.ipc import RequestOutput, SchedulerReady
from flashspark.speculative.accept import AcceptRule
from flashspark.speculative.drafter import make_drafter
from flashspark.speculative.sampling import SamplingRows
from flashspark.speculative.step_results import runs_ahead
from flashspark.speculative.warm_up import warm_up
from flashspark.speculative.worker import SpeculativeWorker
from flashspark.text.tokenizer import TextTokenizer

from .adaptive_build import Info, build_adaptive, read_inputs
from .grammar import GrammarQueue, unavailable_reason
from .grammar_process import IsolatedCompiler
from .graph_build import accept_rule
from .limits import SchedulerLimits
from .scheduler import Scheduler

# On a CPU, one chunk stays well under a second for a small model.
CPU_CHUNKED_PREFILL_SIZE, GPU_CHUNKED_PREFILL_SIZE = 2048, 8192


def build_scheduler(
    args: ServerArgs, send: Callable[[RequestOutput], None]
) -> tuple[Scheduler, SchedulerReady]:
    """Builds the engine and every manager above it.

    Raises:
        ValueError: what cannot be served, with the remedy.
    """
    try:
        return _build(args, send)
    except torch.AcceleratorError:  # whose text may speak of memory too: an illegal access
        raise
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise the second
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise ValueError(_too_large(args, error)) from error


def _too_large(args: ServerArgs, error: Exception) -> str:
    names = ["max_total_tokens", "max_running_requests", "page_size"]
    if isinstance(error, torch.OutOfMemoryError):  # a GPU's
        names.append("mem_fraction_static")
    given = ", ".join(f"{flag_name(name)} {getattr(args, name) or '(not given)'}" for name in names)
    reason = str(error).split("\n")[0] or "no memory"
    return f"the model and its pools do not fit into memory: lower one of {given} ({reason})"


def _build(args: ServerArgs, send: Callable[[RequestOutput], None]) -> tuple[Scheduler, SchedulerReady]:
    inputs = read_inputs(args)
    options = _engine_options(args)
    rule = AcceptRule()
    if envs.simulated_accept_length() is not None:  # refused before a model is loaded
        rule = accept_rule(inputs.mode, verify_width(options))
    engine = build_engine(options)
    tokenizer = (
        None if args.skip_tokenizer_init else TextTokenizer.load(args.tokenizer_path or args.model_path)
    )
    max_running_requests, seed = args.max_running_requests, args.random_seed
    assert max_running_requests is not None and seed is not None  # resolved by ServerArgs
    runner = engine.runner
    sampling = SamplingRows(max_running_requests, runner.target.config.vocab_size, runner.device)
    worker = SpeculativeWorker(runner, sampling, make_drafter(runner))
    worker.scales_logprobs = not envs.RETURN_ORIGINAL_LOGPROB.get()
    worker.rule = rule
    worker.adaptive, verification = build_adaptive(args, inputs, engine, worker)
    limits = SchedulerLimits(
        context_length=engine.context_length,
        max_running_requests=max_running_requests,
        num_pages=engine.capacity.num_pages,
        page_size=args.page_size,
        chunked_prefill_size=_prefill_budget(args, runner.device.type),
        decode_log_interval=args.decode_log_interval,
        prefix_cache=not args.disable_radix_cache,
    )
    # On a device that runs ahead, kernels are compiled when they are first called.
    if runs_ahead(runner.device) and not args.skip_server_warmup:
        warm_up(worker, limits.chunked_prefill_size, limits.context_length)
    vocab_size = runner.target.config.vocab_size
    # A file may name an id that the model does not have; it can never be drawn, and must not be suppressed.
    eos_token_ids = [i for i in tokenizer.eos_token_ids if 0 <= i < vocab_size] if tokenizer else []
    grammars = _grammar_queue(args, tokenizer, vocab_size)
    overlap = runs_ahead(runner.device) and not args.disable_overlap_schedule
    overlap = overlap or args.enable_overlap_schedule
    scheduler = Scheduler(worker, limits, send, eos_token_ids, tokenizer, seed, grammars, overlap)
    info = {**verification, "overlap_schedule": overlap}
    return scheduler, _ready(engine, worker, limits, eos_token_ids, info)


def _grammar_queue(args: ServerArgs, tokenizer: TextTokenizer | None, vocab_size: int) -> GrammarQueue:
    reason = unavailable_reason(args.grammar_backend, tokenizer)
    if reason is not None or tokenizer is None:
        return GrammarQueue(None, vocab_size, reason)
    timeout_s = envs.GRAMMAR_TIMEOUT_S.get()
    compiler = IsolatedCompiler(args.tokenizer_path or args.model_path, vocab_size, timeout_s)
    return GrammarQueue(compiler, vocab_size, timeout_s=timeout_s)


def _engine_options(args: ServerArgs) -> EngineOptions:
    assert args.max_running_requests is not None  # resolved by ServerArgs
    return EngineOptions(
        model_path=args.model_path,
        draft_path=args.speculative_draft_model_path,
        max_running_requests=args.max_running_requests,
        dtype=args.dtype,
        device=args.device,
        load_format=args.load_format,
        draft_load_format=args.speculative_draft_load_format or args.load_format,
        model_overrides=args.model_overrides,
        algorithm=args.speculative_algorithm,
        block_size=args.draft_block_size,
        context_length=args.context_length,
        max_total_tokens=args.max_total_tokens,
        page_size=args.page_size,
        attention_backend=args.attention_backend,
        prefill_attention_backend=args.prefill_attention_backend,
        decode_attention_backend=args.decode_attention_backend,
        draft_attention_backend=args.speculative_draft_attention_backend,
        torch_threads=args.torch_threads,
        mem_fraction_static=args.mem_fraction_static,
    )


def _prefill_budget(args: ServerArgs, device_type: str) -> int:
    usual = CPU_CHUNKED_PREFILL_SIZE if device_type == "cpu" else GPU_CHUNKED_PREFILL_SIZE
    chunk = args.chunked_prefill_size or usual
    return args.max_prefill_tokens if chunk < 0 else min(chunk, args.max_prefill_tokens)


def _ready(
    engine: Engine,
    worker: SpeculativeWorker,
    limits: SchedulerLimits,
    eos_token_ids: list[int],
    verification: Info,
) -> SchedulerReady:
    runner = engine.runner
    of_dspark = runner.draft is not None and runner.draft.config.algorithm == "DSPARK"
    return SchedulerReady(
        context_length=limits.context_length,
        vocab_size=runner.target.config.vocab_size,
        eos_token_ids=eos_token_ids,
        max_total_num_tokens=limits.max_total_num_tokens,
        max_running_requests=limits.max_running_requests,
        info={
            "architectures": [runner.target.config.architecture],
            "dtype": str(runner.target.dtype).removeprefix("torch."),
            "device": str(runner.device),
            "chunked_prefill_size": limits.chunked_prefill_size,
            "speculative_num_draft_tokens": worker.width if worker.gamma else None,
            "speculative_dspark_block_size": worker.gamma if of_dspark else None,
            "return_original_logprob": not worker.scales_logprobs,
            "kv_bytes_per_token": engine.capacity.bytes_per_token,
            "kv_capacity_reason": engine.capacity.reason,
            **verification,
        },
    )
