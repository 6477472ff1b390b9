"""From options to a model runner: device, weights, and pools of the right size."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashspark.attention.interface import AttentionBackend
from flashspark.attention.kv_pool import KVPool
from flashspark.attention.registry import make_backend
from flashspark.models.config import DraftConfig
from flashspark.models.dflash import DFlashDraft
from flashspark.models.qwen3 import Qwen3

from .capacity import (
    DEFAULT_MEM_FRACTION,
    KVCapacity,
    KVMemory,
    available_memory_bytes,
    cpu_memory,
    decide_capacity,
    gpu_memory,
)
from .loader import load_draft, load_target
from .model_runner import ModelRunner
from .request_rows import RequestRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """What the engine needs to know of the flags; names as there. None: decided here."""

    model_path: str
    draft_path: str | None
    max_running_requests: int
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    draft_load_format: str = "auto"
    model_overrides: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json
    algorithm: str | None = None  # that runs the draft
    block_size: int | None = None  # as the draft's config.json counts
    context_length: int | None = None
    max_total_tokens: int | None = None
    page_size: int = 16
    attention_backend: str = "auto"
    prefill_attention_backend: str | None = None  # None: `attention_backend`
    decode_attention_backend: str | None = None  # None: `attention_backend`
    draft_attention_backend: str | None = None  # None: that of decoding
    torch_threads: int | None = None
    mem_fraction_static: float | None = None  # of a GPU's memory, for weights and KV together


@dataclass(frozen=True)
class Engine:
    """A runner that is ready to serve, and the limits it was built with."""

    runner: ModelRunner
    capacity: KVCapacity
    context_length: int


def verify_width(options: EngineOptions) -> int:
    """Rows of a full block, from the draft's config.json alone; 1 without a draft."""
    if options.draft_path is None:
        return 1
    return DraftConfig.load(Path(options.draft_path), options.block_size).verify_width


def build_engine(options: EngineOptions) -> Engine:
    """Loads the models and allocates the pools.

    Raises:
        ValueError (ModelFormatError among them): a folder, draft or limit that cannot be served; the message names
            the remedy.
    """
    device = _device(options.device)
    backends = _make_backends(options, device)  # refused before a model is loaded
    # One core stays free for the API process: a decode step never waits for it, but its clients do.
    torch.set_num_threads(options.torch_threads or max(1, (os.cpu_count() or 1) - 1))
    target = _load_target(options, device)
    draft = _load_draft(options, target)
    _prepare_backends(backends, target, draft)
    context_length = _context_length(options, target)
    capacity = _capacity(options, target, draft, context_length)
    # A step that was launched before its request was known to be at its end begins there.
    num_positions = context_length + (draft.config.verify_width if draft else 1)
    max_pages_per_req = -(-num_positions // options.page_size)
    request_rows = RequestRows(options.max_running_requests, max_pages_per_req, options.page_size, device)
    runner = ModelRunner(
        target,
        draft,
        request_rows,
        capacity.num_slots,
        backends.decode.backend,
        backends.draft.backend,
        backends.prefill.backend,
    )
    return Engine(runner, capacity, context_length)


@dataclass(frozen=True)
class _Chosen:
    """A backend, and the flag that asked for it."""

    flag: str
    backend: AttentionBackend


@dataclass(frozen=True)
class _Backends:
    """Who runs the attention of which part."""

    prefill: _Chosen
    decode: _Chosen
    draft: _Chosen


def _make_backends(options: EngineOptions, device: torch.device) -> _Backends:
    """One of each kind that is asked for. ValueError: one cannot run here, or cannot do its part."""
    made: dict[str, AttentionBackend] = {}

    def choose(*flags: tuple[str, str | None]) -> _Chosen:
        flag, name = next((flag, name) for flag, name in flags if name is not None)
        if name not in made:
            made[name] = make_backend(name, device.type, flag)
        return _Chosen(flag, made[name])

    usual = ("--attention-backend", options.attention_backend)
    of_decode = ("--decode-attention-backend", options.decode_attention_backend)
    draft = ("--speculative-draft-attention-backend", options.draft_attention_backend)
    prefill = choose(("--prefill-attention-backend", options.prefill_attention_backend), usual)
    chosen = _Backends(prefill, choose(of_decode, usual), choose(draft, of_decode, usual))
    backend = chosen.draft.backend
    if options.draft_path is not None and not backend.capabilities.supports_draft_block:
        raise ValueError(
            f"{chosen.draft.flag} {backend.name} cannot run a draft's attention: "
            "give --speculative-draft-attention-backend triton"
        )
    return chosen


def _prepare_backends(backends: _Backends, target: Qwen3, draft: DFlashDraft | None) -> None:
    """Compiles what steps should not wait for. ValueError: a backend cannot run the heads or the type of its model."""
    parts: list[tuple[_Chosen, Qwen3 | DFlashDraft]] = [(backends.prefill, target), (backends.decode, target)]
    if draft is not None:
        parts.append((backends.draft, draft))
    done = set()
    for chosen, model in parts:
        config, name = model.config, chosen.backend.name
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        if (name, heads) in done:
            continue
        done.add((name, heads))
        try:
            chosen.backend.prepare(*heads, model.dtype)
        except ValueError as error:
            raise ValueError(f"{chosen.flag} {name} {error}") from error


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch sees no GPU here; use --device cpu, or install a CUDA build of torch"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _load_target(options: EngineOptions, device: torch.device) -> Qwen3:
    progress = _Progress("target")
    target = load_target(
        options.model_path,
        options.dtype,
        device,
        load_format=options.load_format,
        overrides=options.model_overrides,
        on_progress=progress,
    )
    progress.finish(options.model_path)
    return target


def _load_draft(options: EngineOptions, target: Qwen3) -> DFlashDraft | None:
    if options.draft_path is None:
        return None
    progress = _Progress("draft")
    draft = load_draft(
        options.draft_path,
        target,
        block_size=options.block_size,
        load_format=options.draft_load_format,
        algorithm=options.algorithm,
        on_progress=progress,
    )
    progress.finish(options.draft_path)
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


def _context_length(options: EngineOptions, target: Qwen3) -> int:
    trained = target.config.max_position_embeddings
    if options.context_length is None:
        return trained
    if options.context_length > trained:
        raise ValueError(
            f"--context-length {options.context_length}: the model's config allows {trained} positions; "
            "lower the flag, or give the model rope scaling through --json-model-override-args"
        )
    return options.context_length


def _capacity(
    options: EngineOptions, target: Qwen3, draft: DFlashDraft | None, context_length: int
) -> KVCapacity:
    bytes_per_token = _kv_bytes_per_token(target) + (_kv_bytes_per_token(draft) if draft else 0)
    capacity = decide_capacity(
        options.max_total_tokens,
        context_length,
        options.max_running_requests,
        options.page_size,
        bytes_per_token,
        _kv_memory(options, target, draft),
    )
    logger.info(
        "KV pool: %d tokens (%s), %.2f GiB; context length %d; at most %d running requests",
        capacity.num_tokens,
        capacity.reason,
        capacity.num_slots * bytes_per_token / 2**30,
        context_length,
        options.max_running_requests,
    )
    return capacity


def _kv_memory(options: EngineOptions, target: Qwen3, draft: DFlashDraft | None) -> KVMemory:
    """What the pools may take, once the weights are in place."""
    if target.device.type != "cuda":
        return cpu_memory(available_memory_bytes())
    rows = options.max_running_requests * (draft.config.verify_width if draft else 1)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(target.device)
    fraction = DEFAULT_MEM_FRACTION if options.mem_fraction_static is None else options.mem_fraction_static
    # A DSpark's drafts come with their distributions over the vocabulary: as they are drawn, and kept for judging.
    copies = 3 if draft is not None and draft.config.algorithm == "DSPARK" else 1
    return gpu_memory(free, total, fraction, copies * rows * target.config.vocab_size * 4)


def _kv_bytes_per_token(model: Qwen3 | DFlashDraft) -> int:
    config = model.config
    return KVPool.bytes_per_slot(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim, model.dtype
    )
