"""The frozen target writes the text that the drafts learn from: cached, in lock step, on a GPU as replayed graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import Windows
from .layers import grouped_attention
from .loop import log
from .settings import GenerationRecipe
from .target_model import Target

_BUCKET = 64


@dataclass(frozen=True)
class Written:
    """Generated rows: ids [rows, length] int16 and the prompt's length of each."""

    ids: Tensor
    prompt_lengths: Tensor
    looping_share: float


class LockStepSampler:
    """Writes one token per step for a fixed number of rows that all have the same length."""

    def __init__(self, target: Target, num_rows: int, total_length: int) -> None:
        shape, device = target.shape, target.cos.device
        self.target = target
        self.total_length = math.ceil(total_length / _BUCKET) * _BUCKET
        size = (
            shape.num_hidden_layers,
            num_rows,
            shape.num_key_value_heads,
            self.total_length,
            shape.head_dim,
        )
        self.keys = torch.zeros(size, dtype=target.dtype, device=device)
        self.values = torch.zeros(size, dtype=target.dtype, device=device)
        self.ids = torch.zeros(num_rows, self.total_length, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.temperatures = torch.zeros(num_rows, 1, device=device)
        self._graphs: dict[int, Callable[[], None]] = {}

    def _layers(self, x: Tensor, positions: Tensor, visible: Tensor, num_keys: int) -> Tensor:
        """Run new rows x [B, T, H] at `positions` [T], writing their keys and values; final-normed hidden states."""
        cos, sin = self.target.cos[positions], self.target.sin[positions]
        for index, layer in enumerate(self.target.model.layers):
            attention = layer.self_attn
            h = layer.input_layernorm(x)
            k, v = attention.keys_values(h, cos, sin)
            self.keys[index].index_copy_(2, positions, k.transpose(1, 2))
            self.values[index].index_copy_(2, positions, v.transpose(1, 2))
            q = attention.queries(h, cos, sin)
            out = grouped_attention(
                q, self.keys[index, :, :, :num_keys], self.values[index, :, :, :num_keys], visible
            )
            x = x + attention.o_proj(out)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.target.model.norm(x)

    def _sample(self, hidden: Tensor) -> Tensor:
        """One id per row; rows with temperature 0 take the best, the others add Gumbel noise."""
        logits = self.target.logits(hidden).float()
        noise = -torch.empty_like(logits).exponential_().log()
        warm = self.temperatures > 0
        return (logits / self.temperatures.clamp_min(1e-4) + noise * warm).argmax(-1)

    def _step(self, num_keys: int) -> None:
        """Read the token at `position`, write the one behind it, move on."""
        device = self.ids.device
        visible = (torch.arange(num_keys, device=device) <= self.position)[None, None]
        x = self.target.embed(self.ids.index_select(1, self.position))
        hidden = self._layers(x, self.position, visible, num_keys)
        self.position.add_(1)
        self.ids.index_copy_(1, self.position, self._sample(hidden[:, 0])[:, None])

    def _stepper(self, num_keys: int) -> Callable[[], None]:
        if self.ids.device.type != "cuda":
            return lambda: self._step(num_keys)
        if num_keys not in self._graphs:
            saved = self.ids.clone(), self.position.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(num_keys)
            torch.cuda.current_stream().wait_stream(stream)
            self.ids.copy_(saved[0])
            self.position.copy_(saved[1])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(num_keys)
            self._graphs[num_keys] = graph.replay
        return self._graphs[num_keys]

    @torch.no_grad()
    def write(self, prompts: Tensor, temperatures: Tensor, total_length: int) -> Tensor:
        """Continue prompts [rows, P] to `total_length` ids."""
        num_prompt = prompts.shape[1]
        self.ids[:, :num_prompt] = prompts
        self.temperatures.copy_(temperatures[:, None])
        self.position.zero_()
        device = self.ids.device
        if num_prompt > 1:
            positions = torch.arange(num_prompt - 1, device=device)
            visible = (positions[None] <= positions[:, None])[None]
            for rows in torch.arange(len(prompts), device=device).split(1024):
                self._prefill(rows, prompts, positions, visible)
        self.position.fill_(num_prompt - 1)
        for position in range(num_prompt - 1, total_length - 1):
            self._stepper(math.ceil((position + 1) / _BUCKET) * _BUCKET)()
        return self.ids[:, :total_length].clone()

    def _prefill(self, rows: Tensor, prompts: Tensor, positions: Tensor, visible: Tensor) -> None:
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        whole = self.keys, self.values
        self.keys, self.values = self.keys[:, part], self.values[:, part]
        self._layers(self.target.embed(prompts[part, :-1]), positions, visible, len(positions))
        self.keys, self.values = whole


def draw_prompts(recipe: GenerationRecipe, windows: Windows, closing_ids: Tensor, length: int) -> Tensor:
    """Prompts from training files and from files the target never saw: chats, ends of docstrings, starts, middles."""
    num_chat = round(recipe.batch_size * recipe.chat_share)
    parts = [windows.document_starts("chat", num_chat, length)]
    num_reserved = round((recipe.batch_size - num_chat) * recipe.reserved_share)
    for name, count in (("reserved", num_reserved), ("train", recipe.batch_size - num_chat - num_reserved)):
        num_docstring = round(count * recipe.docstring_end_share)
        num_start = round(count * recipe.document_start_share)
        parts.append(windows.ending_with(name, closing_ids, num_docstring, length))
        parts.append(windows.document_starts(name, num_start, length))
        parts.append(windows.anywhere(name, count - num_docstring - num_start, length))
    return torch.cat(parts)


def looping_rows(ids: Tensor) -> Tensor:
    """Rows whose last third consists mostly of repeated 3-grams."""
    tail = ids[:, -(ids.shape[1] // 3) :].long()
    grams = ((tail[:, :-2] * 65536 + tail[:, 1:-1]) * 65536 + tail[:, 2:]).sort(dim=1).values
    distinct = (grams[:, 1:] != grams[:, :-1]).float().mean(1)
    return distinct < 0.4


def write_data(
    recipe: GenerationRecipe,
    target: Target,
    windows: Windows,
    closing_ids: Tensor,
    seconds: float,
    max_batches: int,
) -> Written:
    """Generate batches until the time is used up (at least one batch), most looping rows left out."""
    device = target.cos.device
    sampler = LockStepSampler(target, recipe.batch_size, recipe.total_length)
    values = torch.tensor([t for t, _ in recipe.temperature_shares], device=device)
    shares = torch.tensor([s for _, s in recipe.temperature_shares], device=device)
    begin = time.monotonic()
    rows, lengths, looping, total, slowest = [], [], 0, 0, 0.0
    for index in range(max_batches):
        started = time.monotonic()
        if index and started - begin + slowest > seconds:
            break
        length = recipe.prompt_lengths[index % len(recipe.prompt_lengths)]
        prompts = draw_prompts(recipe, windows, closing_ids, length)
        temperatures = values[torch.multinomial(shares, recipe.batch_size, replacement=True)]
        ids = sampler.write(prompts, temperatures, recipe.total_length)
        loops = looping_rows(ids)
        keep = ~loops | (torch.rand(len(ids), device=device) < recipe.keep_looping)
        rows.append(ids[keep].to(torch.int16))
        lengths.append(torch.full((len(rows[-1]),), length, device=device))
        looping, total = looping + int(loops.sum()), total + len(ids)
        slowest = max(slowest if index > 1 else 0.0, time.monotonic() - started)
    written = Written(torch.cat(rows), torch.cat(lengths), looping / total)
    took = time.monotonic() - begin
    log(
        f"generated {written.ids.numel() / 1e6:.2f} M tokens in {len(rows)} batches, {took:.1f} s,"
        f" {looping / total:.1%} of the rows loop"
    )
    return written
