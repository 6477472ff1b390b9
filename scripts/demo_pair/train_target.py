"""Train the target on the packed corpus."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import loop, target_model
from .data import Windows
from .optim import MuonAdamW
from .settings import Settings
from .target_model import Target


def train(
    settings: Settings, target: Target, windows: Windows, work: Path, seconds: float, max_steps: int | None
) -> dict[str, Any]:
    """Run (or resume) the target's phase; the result states steps, tokens and whether it is complete."""
    recipe = settings.target_recipe
    compiled = settings.compile
    optimizer = MuonAdamW(
        target.named_parameters(), recipe.muon_lr, recipe.adam_lr, recipe.weight_decay, compiled
    )
    loss_of = target_model.token_loss
    if compiled:
        loss_of = torch.compile(loss_of, dynamic=False)
        compile_layers(target)
    head = target.model.embed_tokens.weight

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        batch = windows.mixed(
            "train",
            recipe.batch_size,
            recipe.sequence_length + 1,
            recipe.chat_share,
            recipe.document_start_share,
        )
        _, hidden = target.hidden(batch[:, :-1])
        return loss_of(hidden, head, batch[:, 1:].contiguous()), {}

    plan = loop.LoopPlan(
        "target", seconds, recipe.warmup, recipe.final_lr, work / "target.ckpt", max_steps=max_steps
    )
    result = loop.run(plan, target, optimizer, step)
    tokens = result["steps"] * recipe.batch_size * recipe.sequence_length
    return {**result, "tokens": tokens, "tokens_per_s": round(tokens / max(result["seconds"], 1e-6))}


def compile_layers(target: Target) -> None:
    """Compile the decoder layer once; the layers share the compiled code."""
    for layer in target.model.layers:
        layer.compile(dynamic=False)


@torch.no_grad()
def bits_per_byte(
    target: Target,
    stream: Tensor,
    bytes_per_id: np.ndarray,
    length: int,
    max_tokens: int = 600_000,
    batch: int = 32,
) -> dict[str, float]:
    """Bits per byte and nats per token of a stream, in windows of `length` that do not overlap."""
    sizes = torch.from_numpy(bytes_per_id).to(stream.device)
    count = max(1, min(len(stream) - 1, max_tokens) // length)
    count -= count % batch if count > batch else 0  # whole batches: one compiled shape
    nats, num_bytes, num_tokens = 0.0, 0, 0
    begin = time.monotonic()
    for first in range(0, count, batch):
        starts = torch.arange(first, min(count, first + batch), device=stream.device) * length
        block = stream[starts[:, None] + torch.arange(length + 1, device=stream.device)].long()
        labels = block[:, 1:]
        logits = target.logits(target.hidden(block[:, :-1])[1]).float()
        nats += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        num_bytes += int(sizes[labels].sum())
        num_tokens += labels.numel()
    return {
        "bits_per_byte": nats / math.log(2) / max(1, num_bytes),
        "nats_per_token": nats / num_tokens,
        "tokens": num_tokens,
        "seconds": round(time.monotonic() - begin, 2),
    }
