"""Train a DFlash2 draft on the frozen target's own generations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import loop
from .draft_model import CandidateSelector, DFlash2
from .generate import Written
from .optim import MuonAdamW
from .settings import DraftRecipe, Settings
from .target_model import Target
from .train_target import compile_layers


def draw_anchors(prompt_lengths: Tensor, num_anchors: int, length: int, block_size: int) -> Tensor:
    """Anchors [rows, num_anchors] from the prompt's last token to the last place with a whole block behind it."""
    low = (prompt_lengths - 1)[:, None]
    high = length - block_size
    noise = torch.rand(len(prompt_lengths), num_anchors, device=prompt_lengths.device)
    return (low + (noise * (high + 1 - low)).long()).clamp(max=high)


def block_losses(
    hidden: Tensor,
    teacher_hidden: Tensor,
    labels: Tensor,
    predecessors: Tensor,
    head: Tensor,
    selector: CandidateSelector,
    recipe: DraftRecipe,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Loss and figures [3, g] of blocks: hidden, teacher_hidden [n, g, H]; labels, predecessors [n, g].

    Unary: cross entropy to the label and total variation to the target's distribution. Selector: the same two on
    the current best `top_k` candidates with the true predecessor; a label that is no candidate adds no cross entropy.
    Figures: share of rows where the selector picks the label, expected acceptance at temperature 1, candidate recall.
    """
    with torch.no_grad():
        teacher = torch.softmax(F.linear(teacher_hidden, head.to(teacher_hidden.dtype)).float(), dim=-1)
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    log_q = torch.log_softmax(logits, dim=-1)
    unary_ce = -log_q.gather(-1, labels[..., None]).squeeze(-1)
    unary_tv = 0.5 * (log_q.exp() - teacher).abs().sum(-1)
    candidates = logits.detach().topk(top_k, dim=-1).indices
    scores = logits.gather(-1, candidates) + selector(hidden, predecessors, candidates)
    log_path = torch.log_softmax(scores, dim=-1)
    is_label = candidates == labels[..., None]
    selector_ce = -(log_path * is_label).sum(-1)
    accepted = torch.minimum(log_path.exp(), teacher.gather(-1, candidates)).sum(-1)
    per_row = recipe.unary_ce * unary_ce + recipe.unary_tv * unary_tv
    per_row = per_row + recipe.selector_ce * selector_ce + recipe.selector_tv * (1.0 - accepted)
    weights = torch.exp(-torch.arange(labels.shape[-1], device=labels.device) / recipe.decay)
    loss = (per_row * weights).sum() / (len(labels) * weights.sum())
    with torch.no_grad():
        recalled = is_label.any(-1)
        chosen = candidates.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1) == labels
        figures = torch.stack((chosen.float().mean(0), accepted.mean(0), recalled.float().mean(0)))
    return loss, figures


class DraftStep:
    """One training step on random rows of the written data."""

    def __init__(self, settings: Settings, target: Target, draft: DFlash2, data: Written) -> None:
        self.settings, self.target, self.draft, self.data = settings, target, draft, data
        self.losses = block_losses
        if settings.compile:
            self.losses = torch.compile(block_losses, dynamic=False)
            compile_layers(target)
            for layer in draft.layers:
                layer.compile(dynamic=False)

    def __call__(self) -> tuple[Tensor, dict[str, Tensor]]:
        recipe, shape = self.settings.draft_recipe, self.settings.draft
        rows = torch.randint(len(self.data.ids), (recipe.batch_size,), device=self.data.ids.device)
        ids = self.data.ids[rows].long()
        anchors = draw_anchors(
            self.data.prompt_lengths[rows], recipe.num_anchors, ids.shape[1], shape.block_size
        )
        return self.on(ids, anchors)

    def on(self, ids: Tensor, anchors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and figures of the blocks at `anchors` [B, N] of the rows `ids` [B, L]."""
        shape = self.settings.draft
        with torch.no_grad():
            features, final = self.target.hidden(ids, shape.target_layer_ids)
        places = anchors[..., None] + torch.arange(shape.block_size, device=ids.device)
        blocks = ids[:, None].expand(-1, anchors.shape[1], -1).gather(2, places)
        teacher_rows = final[torch.arange(len(ids), device=ids.device)[:, None, None], places[..., :-1]]
        hidden = self.draft.block_hidden(self.target, features, blocks[..., 0], anchors)[..., 1:, :]
        loss, figures = self.losses(
            hidden.flatten(0, 1),
            teacher_rows.flatten(0, 1),
            blocks[..., 1:].flatten(0, 1),
            blocks[..., :-1].flatten(0, 1),
            self.target.model.embed_tokens.weight,
            self.draft.candidate_selector,
            self.settings.draft_recipe,
            shape.selector_top_k,
        )
        return loss, {"label": figures[0], "accept": figures[1], "recall": figures[2]}


def train(
    settings: Settings,
    target: Target,
    draft: DFlash2,
    data: Written,
    work: Path,
    seconds: float,
    max_steps: int | None,
) -> dict[str, Any]:
    """Run (or resume) the draft's phase."""
    recipe = settings.draft_recipe
    optimizer = MuonAdamW(
        draft.named_parameters(), recipe.muon_lr, recipe.adam_lr, recipe.weight_decay, settings.compile
    )
    plan = loop.LoopPlan(
        "dflash2", seconds, recipe.warmup, recipe.final_lr, work / "dflash2.ckpt", max_steps=max_steps
    )
    result = loop.run(plan, draft, optimizer, DraftStep(settings, target, draft, data))
    return {**result, "blocks": result["steps"] * recipe.batch_size * recipe.num_anchors}
