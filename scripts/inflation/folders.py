"""Model folders in Hugging Face layout: indexed shards written while the next one is made, then config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .geometry import Geometry

SHARD_BYTES = 2 << 30
PENDING_SHARDS = 1  # being written; another one is being filled: so much host memory is used, and no more


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> tuple[int, int]:
    """Writes `tensors` as shards of some `shard_bytes`, an index and, last, config.json.

    A folder that was not finished has no config.json. Returns the number of parameters and of bytes.
    """
    folder.mkdir(parents=True)
    writer = _ShardWriter(folder, shard_bytes)
    num_parameters = num_bytes = 0
    with ThreadPoolExecutor(1) as pool:
        for name, tensor in tensors:
            num_parameters, num_bytes = num_parameters + tensor.numel(), num_bytes + tensor.nbytes
            writer.add(pool, name, tensor)
        writer.finish(pool)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": writer.name_shards()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return num_parameters, num_bytes


class _ShardWriter:
    """Shards get their final names when it is known how many there are."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._part: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._pending: list[Future[None]] = []

    def _partial(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.partial"

    def add(self, pool: ThreadPoolExecutor, name: str, tensor: Tensor) -> None:
        self._part[name] = tensor.contiguous().cpu()
        if sum(t.nbytes for t in self._part.values()) >= self._shard_bytes:
            self._write(pool)

    def _write(self, pool: ThreadPoolExecutor) -> None:
        while len(self._pending) >= PENDING_SHARDS:
            self._pending.pop(0).result()
        file, part = self._partial(len(self._names)), self._part
        self._names.append(list(part))
        self._part = {}
        self._pending.append(pool.submit(save_file, part, file, {"format": "pt"}))

    def finish(self, pool: ThreadPoolExecutor) -> None:
        if self._part:
            self._write(pool)
        for future in self._pending:
            future.result()

    def name_shards(self) -> dict[str, str]:
        """Gives the shards their names; which tensor is in which."""
        weight_map: dict[str, str] = {}
        for shard, names in enumerate(self._names):
            file = f"model-{shard + 1:05d}-of-{len(self._names):05d}.safetensors"
            self._partial(shard).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        return weight_map


def target_config(small: dict[str, Any], geometry: Geometry, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the wide target."""
    return small | {
        **_sizes(geometry, dtype),
        "num_hidden_layers": geometry.num_hidden_layers,
        "tie_word_embeddings": False,
    }


def draft_config(small: dict[str, Any], geometry: Geometry, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a wide draft, with the keys where the small one has them."""
    num_layers = geometry.num_draft_layers
    config = small | {
        **_sizes(geometry, dtype),
        "num_hidden_layers": num_layers,
        "num_target_layers": geometry.num_hidden_layers,
        "layer_types": ["full_attention"] * num_layers,
    }
    own = {"target_layer_ids": list(geometry.target_layer_ids)}
    if "dflash_config" in small:
        own["selector_rank"] = geometry.rank  # type: ignore[assignment]
        config["dflash_config"] = small["dflash_config"] | own
    else:
        config |= own | {"markov_rank": geometry.rank}
    return config


def _sizes(geometry: Geometry, dtype: torch.dtype) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = {name: getattr(geometry, name) for name in names}
    return sizes | {"torch_dtype": str(dtype).removeprefix("torch.")}


def check_draft(kind: str, config: dict[str, Any], target: dict[str, Any]) -> None:
    """ValueError where a draft is not what the recipe was made for."""
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    problems = [
        f"{name} {config[name]} is not the target's {target[name]}"
        for name in (*sizes, "rms_norm_eps", "vocab_size")
        if config[name] != target[name]
    ]
    if config.get("attention_bias") or target.get("attention_bias"):
        problems.append("attention_bias is not supported")
    if set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        problems.append("only full_attention layers are supported")
    if kind == "dspark":
        wanted = {
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        problems += [f"{key} must be {value!r}" for key, value in wanted.items() if config.get(key) != value]
    if problems:
        raise ValueError(f"the {kind} draft cannot be widened: {'; '.join(problems)}")
