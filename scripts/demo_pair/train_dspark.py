"""Train a DSpark draft on the frozen target's own generations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import loop
from .draft_model import DSpark
from .generate import Written
from .optim import MuonAdamW
from .settings import DSparkRecipe, Settings
from .target_model import Target
from .train_draft import draw_anchors
from .train_target import compile_layers


def block_losses(
    hidden: Tensor,
    teacher_hidden: Tensor,
    labels: Tensor,
    predecessors: Tensor,
    head: Tensor,
    draft: DSpark,
    recipe: DSparkRecipe,
) -> tuple[Tensor, Tensor]:
    """Loss and figures [3, g] of blocks: hidden, teacher_hidden [n, g, H]; labels, predecessors [n, g].

    On the corrected logits with the true predecessor: cross entropy to the label, total variation to the target's
    distribution at temperature 1, and the confidence head's binary cross entropy to one minus that variation, the
    probability that rejection sampling accepts the row. Figures: share of rows whose best token is the label, that
    probability, the head's mean absolute error about it.
    """
    with torch.no_grad():
        teacher = torch.softmax(F.linear(teacher_hidden, head.to(teacher_hidden.dtype)).float(), dim=-1)
    logits, confidence = draft.heads(hidden, predecessors, head)
    log_q = torch.log_softmax(logits, dim=-1)
    ce = -log_q.gather(-1, labels[..., None]).squeeze(-1)
    tv = 0.5 * (log_q.exp() - teacher).abs().sum(-1)
    accepted = (1.0 - tv).detach().clamp(0.0, 1.0)
    bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    per_row = recipe.ce * ce + recipe.tv * tv + recipe.confidence * bce
    weights = torch.exp(-torch.arange(labels.shape[-1], device=labels.device) / recipe.decay)
    loss = (per_row * weights).sum() / (len(labels) * weights.sum())
    with torch.no_grad():
        chosen = (logits.argmax(-1) == labels).float().mean(0)
        error = (torch.sigmoid(confidence) - accepted).abs().mean(0)
        figures = torch.stack((chosen, accepted.mean(0), error))
    return loss, figures


class DSparkStep:
    """One training step on random rows of the written data."""

    def __init__(self, settings: Settings, target: Target, draft: DSpark, data: Written) -> None:
        self.settings, self.target, self.draft, self.data = settings, target, draft, data
        self.losses = block_losses
        if settings.compile:
            self.losses = torch.compile(block_losses, dynamic=False)
            compile_layers(target)
            for layer in draft.layers:
                layer.compile(dynamic=False)

    def __call__(self) -> tuple[Tensor, dict[str, Tensor]]:
        recipe, gamma = self.settings.dspark_recipe, self.settings.dspark.block_size
        rows = torch.randint(len(self.data.ids), (recipe.batch_size,), device=self.data.ids.device)
        ids = self.data.ids[rows].long()
        lengths = self.data.prompt_lengths[rows]
        return self.on(ids, draw_anchors(lengths, recipe.num_anchors, ids.shape[1], gamma + 1))

    def on(self, ids: Tensor, anchors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and figures of the blocks at `anchors` [B, N] of the rows `ids` [B, L]; row k's label is k + 1 on."""
        shape = self.settings.dspark
        with torch.no_grad():
            features, final = self.target.hidden(ids, shape.target_layer_ids)
        places = anchors[..., None] + torch.arange(shape.block_size + 1, device=ids.device)
        blocks = ids[:, None].expand(-1, anchors.shape[1], -1).gather(2, places)
        teacher_rows = final[torch.arange(len(ids), device=ids.device)[:, None, None], places[..., :-1]]
        hidden = self.draft.block_hidden(self.target, features, blocks[..., 0], anchors)
        loss, figures = self.losses(
            hidden.flatten(0, 1),
            teacher_rows.flatten(0, 1),
            blocks[..., 1:].flatten(0, 1),
            blocks[..., :-1].flatten(0, 1),
            self.target.model.embed_tokens.weight,
            self.draft,
            self.settings.dspark_recipe,
        )
        return loss, {"label": figures[0], "accept": figures[1], "confidence_error": figures[2]}


def train(
    settings: Settings,
    target: Target,
    draft: DSpark,
    data: Written,
    work: Path,
    seconds: float,
    max_steps: int | None,
) -> dict[str, Any]:
    """Run (or resume) the draft's phase."""
    recipe = settings.dspark_recipe
    optimizer = MuonAdamW(
        draft.named_parameters(), recipe.muon_lr, recipe.adam_lr, recipe.weight_decay, settings.compile
    )
    plan = loop.LoopPlan(
        "dspark", seconds, recipe.warmup, recipe.final_lr, work / "dspark.ckpt", max_steps=max_steps
    )
    result = loop.run(plan, draft, optimizer, DSparkStep(settings, target, draft, data))
    return {**result, "blocks": result["steps"] * recipe.batch_size * recipe.num_anchors}
