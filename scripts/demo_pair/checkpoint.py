"""Shipped files: bfloat16 safetensors and their way back into the training modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .draft_model import DFlash2, DSpark
from .settings import DraftShape, DSparkShape, TargetShape
from .target_model import Target


def save_bf16(module: nn.Module, path: Path) -> None:
    """Write the module's parameters, rounded to bfloat16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().to(torch.bfloat16).contiguous().cpu() for n, t in module.state_dict().items()}
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(path)


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a safetensors file whose names and shapes must be exactly the module's; values become float32."""
    module.load_state_dict({n: t.float() for n, t in load_file(path).items()}, strict=True)


def round_to_bf16(module: nn.Module) -> None:
    """Replace the parameters by their bfloat16 roundings and freeze them: what is shipped is what drafts learn from."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(parameter.to(torch.bfloat16).float())


def target_shape(config: dict[str, Any]) -> TargetShape:
    """The shape a config.json describes."""
    names = TargetShape.__dataclass_fields__
    return TargetShape(**{n: config[n] for n in names})


def load_target(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
    """The target of a Hugging Face folder, frozen."""
    target = Target(target_shape(json.loads((folder / "config.json").read_text())), dtype)
    load_weights(target, folder / "model.safetensors")
    return target.requires_grad_(False).to(device)


def load_dflash2(folder: Path, target: Target) -> DFlash2:
    """The DFlash2 draft of a Hugging Face folder, frozen, on the target's device."""
    config = json.loads((folder / "config.json").read_text())
    special = config["dflash_config"]
    shape = DraftShape(
        target=target.shape,
        target_layer_ids=tuple(special["target_layer_ids"]),
        num_hidden_layers=config["num_hidden_layers"],
        intermediate_size=config["intermediate_size"],
        block_size=special["block_size"],
        mask_token_id=special["mask_token_id"],
        conv_kernel_size=special["conv_kernel_size"],
        conv_group_size=special["conv_group_size"],
        selector_rank=special["selector_rank"],
        selector_top_k=special["selector_top_k"],
    )
    draft = DFlash2(shape)
    load_weights(draft, folder / "model.safetensors")
    return draft.requires_grad_(False).to(target.cos.device)


def load_dspark(folder: Path, target: Target) -> DSpark:
    """The DSpark draft of a Hugging Face folder, frozen, on the target's device."""
    config = json.loads((folder / "config.json").read_text())
    names = [n for n in DSparkShape.__dataclass_fields__ if n not in ("target", "target_layer_ids")]
    layer_ids = tuple(config["target_layer_ids"])
    draft = DSpark(DSparkShape(target.shape, layer_ids, **{n: config[n] for n in names}))
    load_weights(draft, folder / "model.safetensors")
    return draft.requires_grad_(False).to(target.cos.device)


def load_draft(folder: Path, target: Target) -> DFlash2 | DSpark:
    """The draft of a Hugging Face folder, its kind read from config.json."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return load_dspark(folder, target) if "DSpark" in architecture else load_dflash2(folder, target)
