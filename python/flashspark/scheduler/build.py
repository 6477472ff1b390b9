"""From validated arguments to a scheduler that can serve: load, size the pools, check what fits what."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

from flashspark.args import ServerArgs
from flashspark.attention.kv_pool import KVPool
from flashspark.attention.registry import make_backend
from flashspark.engine.capacity import KVCapacity, available_memory_bytes, decide_capacity
from flashspark.engine.loader import load_draft, load_target
from flashspark.engine.model_runner import ModelRunner
from flashspark.engine.request_rows import RequestRows
from flashspark.ipc import RequestOutput, SchedulerReady
from flashspark.models.dflash import DFlashDraft
from flashspark.models.qwen3 import Qwen3
from flashspark.speculative.drafter import make_drafter
from flashspark.speculative.sampling import SamplingRows
from flashspark.speculative.worker import SpeculativeWorker
from flashspark.text.tokenizer import TextTokenizer

from .kv_pages import num_pages_for
from .scheduler import Scheduler, SchedulerLimits

logger = logging.getLogger(__name__)

DEFAULT_CHUNKED_PREFILL_SIZE = 2048  # on a CPU: one chunk stays well under a second for a small model


def build_scheduler(
    args: ServerArgs, send: Callable[[RequestOutput], None]
) -> tuple[Scheduler, SchedulerReady]:
    """Loads the models and makes every manager.

    Raises:
        ValueError (ModelFormatError among them): a folder, draft or limit that cannot be served; the message names
            the remedy.
    """
    device = _device(args.device)
    # One core stays free for the API process: a decode step never waits for it, but its clients do.
    torch.set_num_threads(args.torch_threads or max(1, (os.cpu_count() or 1) - 1))
    target = _load_target(args, device)
    draft = _load_draft(args, target)
    tokenizer = (
        None if args.skip_tokenizer_init else TextTokenizer.load(args.tokenizer_path or args.model_path)
    )

    context_length = _context_length(args, target)
    max_running_requests = args.max_running_requests
    assert max_running_requests is not None  # resolved by ServerArgs
    capacity = _capacity(args, target, draft, context_length, max_running_requests)
    request_rows = RequestRows(
        max_running_requests, num_pages_for(context_length, args.page_size), args.page_size, device
    )
    backend = make_backend("torch_native" if args.attention_backend == "auto" else args.attention_backend)
    runner = ModelRunner(target, draft, request_rows, capacity.num_slots, backend, backend)
    sampling = SamplingRows(max_running_requests, target.config.vocab_size, device)
    worker = SpeculativeWorker(runner, sampling, make_drafter(runner))
    limits = SchedulerLimits(
        context_length=context_length,
        max_running_requests=max_running_requests,
        num_pages=capacity.num_pages,
        page_size=args.page_size,
        chunked_prefill_size=_prefill_budget(args),
        decode_log_interval=args.decode_log_interval,
    )
    eos_token_ids = list(tokenizer.eos_token_ids) if tokenizer else []
    seed = args.random_seed
    assert seed is not None  # resolved by ServerArgs
    scheduler = Scheduler(worker, limits, send, eos_token_ids, tokenizer, seed)
    return scheduler, _ready(args, worker, limits, capacity, eos_token_ids)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch sees no GPU here; use --device cpu, or install a CUDA build of torch"
        )
    if name == "auto":
        name = "cpu"  # the GPU path does not exist yet
    return torch.device(name)


def _load_target(args: ServerArgs, device: torch.device) -> Qwen3:
    progress = _Progress("target")
    target = load_target(
        args.model_path,
        args.dtype,
        device,
        load_format=args.load_format,
        on_progress=progress,
    )
    progress.finish(args.model_path)
    return target


def _load_draft(args: ServerArgs, target: Qwen3) -> DFlashDraft | None:
    if args.speculative_draft_model_path is None:
        return None
    progress = _Progress("draft")
    draft = load_draft(
        args.speculative_draft_model_path,
        target,
        block_size=args.speculative_num_draft_tokens or args.speculative_dflash_block_size,
        load_format=args.speculative_draft_load_format or args.load_format,
        on_progress=progress,
    )
    progress.finish(args.speculative_draft_model_path)
    return draft


class _Progress:
    """A line per load while it lasts: at most one a second."""

    def __init__(self, what: str) -> None:
        self._what, self._started, self._shown = what, time.monotonic(), time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._shown >= 1.0:
            self._shown = time.monotonic()
            logger.info("loading the %s: %d of %d tensors", self._what, done, total)

    def finish(self, path: str) -> None:
        """The last line."""
        logger.info("loaded the %s from %s in %.1f s", self._what, path, time.monotonic() - self._started)


def _context_length(args: ServerArgs, target: Qwen3) -> int:
    trained = target.config.max_position_embeddings
    if args.context_length is None:
        return trained
    if args.context_length > trained:
        raise ValueError(
            f"--context-length {args.context_length}: the model's config allows {trained} positions; "
            "lower the flag, or give the model rope scaling through --json-model-override-args"
        )
    return args.context_length


def _capacity(
    args: ServerArgs, target: Qwen3, draft: DFlashDraft | None, context_length: int, max_running_requests: int
) -> KVCapacity:
    bytes_per_token = _kv_bytes_per_token(target) + (_kv_bytes_per_token(draft) if draft else 0)
    capacity = decide_capacity(
        args.max_total_tokens,
        context_length,
        max_running_requests,
        args.page_size,
        bytes_per_token,
        available_memory_bytes(),
    )
    logger.info(
        "KV pool: %d tokens (%s), %.2f GiB; context length %d; at most %d running requests",
        capacity.num_tokens,
        capacity.reason,
        capacity.num_slots * bytes_per_token / 2**30,
        context_length,
        max_running_requests,
    )
    return capacity


def _kv_bytes_per_token(model: Qwen3 | DFlashDraft) -> int:
    config = model.config
    return KVPool.bytes_per_slot(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim, model.dtype
    )


def _prefill_budget(args: ServerArgs) -> int:
    chunk = args.chunked_prefill_size or DEFAULT_CHUNKED_PREFILL_SIZE
    return args.max_prefill_tokens if chunk < 0 else min(chunk, args.max_prefill_tokens)


def _ready(
    args: ServerArgs,
    worker: SpeculativeWorker,
    limits: SchedulerLimits,
    capacity: KVCapacity,
    eos_token_ids: list[int],
) -> SchedulerReady:
    config = worker.runner.target.config
    return SchedulerReady(
        context_length=limits.context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids,
        max_total_num_tokens=limits.max_total_num_tokens,
        max_running_requests=limits.max_running_requests,
        info={
            "architectures": [config.architecture],
            "dtype": str(worker.runner.target.dtype).removeprefix("torch."),
            "device": str(worker.runner.device),
            "torch_threads": torch.get_num_threads(),
            "chunked_prefill_size": limits.chunked_prefill_size,
            "speculative_num_draft_tokens": worker.width if worker.gamma else None,
            "kv_bytes_per_token": capacity.bytes_per_token,
            "kv_capacity_reason": capacity.reason,
        },
    )
