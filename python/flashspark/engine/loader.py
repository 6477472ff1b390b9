"""From a model folder to a model on a device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashspark.engine.weights import Progress, collect, load_weights, random_weights
from flashspark.models.config import DraftConfig, TargetConfig, check_draft_fits
from flashspark.models.config_file import ModelFormatError
from flashspark.models.dflash import DFlashDraft
from flashspark.models.qwen3 import Qwen3
from flashspark.models.registry import draft_class, target_class

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHARED = ("embed_tokens.weight", "lm_head.weight")  # copies of the target's in draft files
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}


def resolve_dtype(name: str, torch_dtype: str | None, device: torch.device | str) -> torch.dtype:
    """`--dtype`: auto is float32 on a CPU, and elsewhere what the file holds (bfloat16 if it does not say)."""
    if name == "auto":
        if torch.device(device).type == "cpu":
            return torch.float32
        name = torch_dtype or "bfloat16"
    if name in ("half", "float"):
        name = {"half": "float16", "float": "float32"}[name]
    if name not in _DTYPES:
        raise ValueError(f"--dtype {name!r} is not known; choose one of: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_target(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    *,
    load_format: str = "safetensors",
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Qwen3:
    """The target in folder `path`. `load_format` dummy takes random weights from `seed` and reads only config.json.

    `overrides` replace keys of config.json. ModelFormatError names what is wrong with the folder.
    """
    folder = Path(path)
    config = TargetConfig.load(folder, overrides)
    if isinstance(dtype, str):
        dtype = resolve_dtype(dtype, config.torch_dtype, device)
    model = target_class(config)(config, dtype=dtype, device=device)
    parameters = collect(model.parameters())
    if load_format == "dummy":
        random_weights(parameters, seed, on_progress)
        return model

    def skip(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and config.tie_word_embeddings
        )

    def rename(name: str) -> str:
        return name.removeprefix("model.")

    dtypes = load_weights(folder, parameters, rename=rename, skip=skip, on_progress=on_progress)
    if _holds_half(dtypes, dtype):
        model.hold_half()
    return model


def load_draft(
    path: str | Path,
    target: Qwen3,
    dtype: str | torch.dtype | None = None,
    device: torch.device | str | None = None,
    block_size: int | None = None,
    *,
    load_format: str = "safetensors",
    seed: int = 1,
    algorithm: str | None = None,
    on_progress: Progress | None = None,
) -> DFlashDraft:
    """The draft in folder `path` for `target`, by default in its dtype and on its device.

    `block_size` runs it in smaller blocks than it was trained for, counted as in its config.json. `algorithm` is the
    one that will run it. ModelFormatError says what is wrong with the folder, or why the draft fits neither this
    target nor the algorithm.
    """
    folder = Path(path)
    config = DraftConfig.load(folder)
    if algorithm not in (None, config.algorithm):
        raise ModelFormatError(
            f"--speculative-algorithm {algorithm}: the draft of --speculative-draft-model-path {folder} is a "
            f"{config.architecture} ({config.family}); use --speculative-algorithm {config.algorithm}, or another "
            "draft"
        )
    if block_size is not None:
        config = config.with_block_size(block_size, folder / "config.json")
    try:
        check_draft_fits(config, target.config)
    except ModelFormatError as error:
        raise ModelFormatError(f"{folder}: {error}") from error
    config = replace(config, vocab_size=target.config.vocab_size)
    device = target.device if device is None else device
    if dtype is None:
        dtype = target.dtype
    elif isinstance(dtype, str):
        dtype = resolve_dtype(dtype, None, device)
    if (folder / "mask_embedding.pt").exists():
        raise ModelFormatError(f"{folder}: mask_embedding.pt: a mask embedding of its own is not supported")
    model = draft_class(config)(config, dtype=dtype, device=device)
    parameters = collect(model.parameters())
    if load_format == "dummy":
        random_weights(parameters, seed, on_progress)
        return model

    def rename(name: str) -> str:
        name = name.removeprefix("model.")
        return _ALIASES.get(name, name)

    def skip(name: str) -> bool:
        return name in _SHARED or "rotary_emb" in name

    dtypes = load_weights(folder, parameters, rename=rename, skip=skip, on_progress=on_progress)
    if _holds_half(dtypes, dtype):
        model.hold_half()
    return model


def _holds_half(in_file: set[torch.dtype], dtype: torch.dtype) -> bool:
    """Computing in float32 what the file has in half precision: only then can weights be held so for nothing."""
    return dtype == torch.float32 and in_file <= {torch.bfloat16, torch.float16}
