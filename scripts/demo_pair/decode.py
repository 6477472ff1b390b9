"""A plain speculative decoder with key-value caches: the yardstick for acceptance, written for reading.

It follows docs/demo-pair.md: the draft starts from the last prompt token, greedy rows walk the argmax of its selector
or Markov head, other rows sample it and are verified by rejection sampling over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draft_model import Backbone, DFlash2, DSpark
from .layers import grouped_attention
from .target_model import Target
from .tokens import END_OF_TEXT, IM_END

MAX_PERIOD, MIN_REPEATS = 32, 4


class Cache:
    """Keys and values [layers, rows, kv_heads, capacity, head_dim], written by position."""

    def __init__(self, target: Target, num_layers: int, num_rows: int, capacity: int) -> None:
        shape = target.shape
        size = (num_layers, num_rows, shape.num_key_value_heads, capacity, shape.head_dim)
        self.keys = torch.zeros(size, dtype=target.dtype, device=target.cos.device)
        self.values = torch.zeros_like(self.keys)

    def write(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """positions [B, T]; keys, values [B, T, kv_heads, head_dim]."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[layer, rows, :, positions] = keys
        self.values[layer, rows, :, positions] = values

    def row(self, index: int) -> Cache:
        """One row, sharing this cache's memory."""
        part = object.__new__(Cache)
        part.keys, part.values = self.keys[:, index : index + 1], self.values[:, index : index + 1]
        return part

    def keep(self, rows: Tensor) -> None:
        """Keep only the given rows."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


def target_forward(
    target: Target, cache: Cache, ids: Tensor, positions: Tensor, layer_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """ids, positions [B, T] -> (features [B, T, m * H], final-normed hidden [B, T, H]), causal by position."""
    x = target.embed(ids)
    num_keys = int(positions.max()) + 1
    visible = torch.arange(num_keys, device=ids.device) <= positions[..., None]
    cos, sin = target.cos[positions], target.sin[positions]
    taken = []
    for index, layer in enumerate(target.model.layers):
        attention = layer.self_attn
        h = layer.input_layernorm(x)
        cache.write(index, positions, *attention.keys_values(h, cos, sin))
        keys, values = cache.keys[index, :, :, :num_keys], cache.values[index, :, :, :num_keys]
        out = grouped_attention(attention.queries(h, cos, sin), keys, values, visible)
        x = x + attention.o_proj(out)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if index in layer_ids:
            taken.append(x)
    return torch.cat(taken, dim=-1), target.model.norm(x)


def inject(draft: Backbone, target: Target, cache: Cache, features: Tensor, positions: Tensor) -> None:
    """Write the context keys and values of verified tokens; features [B, T, m * H], positions [B, T]."""
    context = draft.hidden_norm(draft.fc(features))
    cos, sin = target.cos[positions], target.sin[positions]
    for index, layer in enumerate(draft.layers):
        cache.write(index, positions, *layer.self_attn.keys_values(context, cos, sin))


def draft_hidden(
    draft: Backbone, target: Target, cache: Cache, anchor_ids: Tensor, lengths: Tensor
) -> Tensor:
    """Final-normed hidden states [B, S, H] of one block per row; `lengths` [B] committed positions are visible."""
    size = draft.shape.block_size
    ids = anchor_ids[:, None].expand(-1, size).clone()
    ids[:, 1:] = draft.shape.mask_token_id
    positions = lengths[:, None] + torch.arange(size, device=ids.device)
    cos, sin = target.cos[positions], target.sin[positions]
    num_keys = int(lengths.max())
    visible = (torch.arange(num_keys + size, device=ids.device) < lengths[:, None])[:, None].clone()
    visible[..., num_keys:] = True
    h = target.embed(ids)
    for index, layer in enumerate(draft.layers):
        attention = layer.self_attn
        x = layer.input_layernorm(h)
        if layer.attention_conv is not None:
            offsets = layer.attention_conv.offsets(x)
            x = layer.attention_conv(x, offsets, 0)
        own_k, own_v = (t.transpose(1, 2) for t in attention.keys_values(x, cos, sin))
        keys = torch.cat((cache.keys[index, :, :, :num_keys], own_k), dim=2)
        values = torch.cat((cache.values[index, :, :, :num_keys], own_v), dim=2)
        out = attention.o_proj(grouped_attention(attention.queries(x, cos, sin), keys, values, visible))
        h = h + (out if layer.attention_conv is None else layer.attention_conv(out, offsets, 1))
        x = layer.post_attention_layernorm(h)
        if layer.mlp_conv is None:
            h = h + layer.mlp(x)
        else:
            offsets = layer.mlp_conv.offsets(x)
            h = h + layer.mlp_conv(layer.mlp(layer.mlp_conv(x, offsets, 0)), offsets, 1)
    return draft.norm(h)


@dataclass(frozen=True)
class Proposal:
    """Drafted ids [B, g]; for sampled rows also the candidates [B, g, K] and their probabilities.

    `confidence` [B, g]: raw logits of a DSpark draft's confidence head.
    """

    ids: Tensor
    candidates: Tensor | None = None
    probabilities: Tensor | None = None
    confidence: Tensor | None = None


def propose(
    draft: DFlash2 | DSpark,
    target: Target,
    hidden: Tensor,
    anchor_ids: Tensor,
    temperature: float,
    use_selector: bool = True,
) -> Proposal:
    """Walk the block from left to right; without `use_selector` each row drafts by its own logits alone."""
    walk = propose_dspark if isinstance(draft, DSpark) else propose_dflash2
    return walk(draft, target, hidden, anchor_ids, temperature, use_selector)  # type: ignore[arg-type]


def propose_dflash2(
    draft: DFlash2, target: Target, hidden: Tensor, anchor_ids: Tensor, temperature: float, use_selector: bool
) -> Proposal:
    """The selector over the best candidates: argmax at temperature 0, otherwise a draw from the candidates."""
    rows = hidden[:, 1:]
    unary, candidates = target.logits(rows).float().topk(draft.shape.selector_top_k, dim=-1)
    predecessor = anchor_ids
    ids, probabilities = [], []
    for slot in range(rows.shape[1]):
        scores = unary[:, slot]
        if use_selector:
            scores = scores + draft.candidate_selector(rows[:, slot], predecessor, candidates[:, slot])
        if temperature == 0:
            choice = scores.argmax(-1, keepdim=True)
        else:
            probabilities.append(torch.softmax(scores / temperature, dim=-1))
            choice = torch.multinomial(probabilities[-1], 1)
        predecessor = candidates[:, slot].gather(-1, choice)[:, 0]
        ids.append(predecessor)
    if temperature == 0:
        return Proposal(torch.stack(ids, dim=1))
    return Proposal(torch.stack(ids, dim=1), candidates, torch.stack(probabilities, dim=1))


def propose_dspark(
    draft: DSpark, target: Target, hidden: Tensor, anchor_ids: Tensor, temperature: float, use_markov: bool
) -> Proposal:
    """The Markov head over the whole vocabulary: argmax at temperature 0, otherwise a draw."""
    head = target.model.embed_tokens.weight
    predecessor = anchor_ids
    ids, probabilities, confidence = [], [], []
    for slot in range(hidden.shape[1]):
        logits, sure = draft.heads(hidden[:, slot], predecessor, head)
        if not use_markov:
            logits = target.logits(hidden[:, slot]).float()
        if temperature == 0:
            predecessor = logits.argmax(-1)
        else:
            probabilities.append(torch.softmax(logits / temperature, dim=-1))
            predecessor = torch.multinomial(probabilities[-1], 1)[:, 0]
        ids.append(predecessor)
        confidence.append(sure)
    drafted, raw = torch.stack(ids, dim=1), torch.stack(confidence, dim=1)
    if temperature == 0:
        return Proposal(drafted, confidence=raw)
    vocabulary = torch.arange(len(head), device=drafted.device).expand(*drafted.shape, -1)
    return Proposal(drafted, vocabulary, torch.stack(probabilities, dim=1), raw)


def verify(proposal: Proposal, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Accepted counts [B] and the token behind them [B]; logits [B, g + 1, V] of the verified rows."""
    ids = proposal.ids
    if temperature == 0:
        best = logits.argmax(-1)
        accepted = (ids == best[:, :-1]).long().cumprod(1).sum(1)
        return accepted, best.gather(1, accepted[:, None])[:, 0]
    assert proposal.candidates is not None and proposal.probabilities is not None
    p = torch.softmax(logits.float() / temperature, dim=-1)
    p_drafted = p[:, :-1].gather(2, ids[..., None])[..., 0]
    is_drawn = proposal.candidates == ids[..., None]
    q_drafted = (proposal.probabilities * is_drawn).sum(-1)
    passed = torch.rand_like(p_drafted) * q_drafted < p_drafted
    accepted = passed.long().cumprod(1).sum(1)
    rows = torch.arange(len(ids), device=ids.device)
    at_row = p[rows, accepted]
    slot = accepted.clamp(max=ids.shape[1] - 1)
    rejected_q = torch.where((accepted < ids.shape[1])[:, None], proposal.probabilities[rows, slot], 0.0)
    residual = at_row.scatter_add(1, proposal.candidates[rows, slot], -rejected_q).clamp_min(0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at_row)
    return accepted, torch.multinomial(residual, 1)[:, 0]


def loop_end(ids: Sequence[int], start: int = 0) -> int | None:
    """How many ids there are when a period of at most 32 has just been repeated 4 times, or None.

    `start`: the ids before this index are known to hold no loop yet.
    """
    run = [0] * (MAX_PERIOD + 1)
    for index in range(len(ids)):
        for period in range(1, min(MAX_PERIOD, index) + 1):
            run[period] = run[period] + 1 if ids[index] == ids[index - period] else 0
            if index >= start and run[period] >= period * (MIN_REPEATS - 1):
                return index + 1
    return None


@dataclass
class Trace:
    """What one request did: its ids, and by verify step the drafts accepted, the tokens kept and raw confidences."""

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    confidence: list[list[float]] = field(default_factory=list)
    finish: str = ""

    def take(self, new: list[int], accepted: int, max_new: int) -> bool:
        """Add one step's tokens, cut at a stop token, a loop or the limit; False where the request ends."""
        before = len(self.ids)
        self.ids += new
        self.accepted.append(accepted)
        stop = next(
            (i + 1 for i in range(before, len(self.ids)) if self.ids[i] in (IM_END, END_OF_TEXT)), None
        )
        looped = loop_end(self.ids, before)
        limit = max_new if len(self.ids) >= max_new else None
        ends = [
            (end, name)
            for end, name in ((stop, "stop"), (looped, "loop"), (limit, "length"))
            if end is not None
        ]
        if ends:
            end, self.finish = min(ends)
            del self.ids[end:]
        self.kept.append(len(self.ids) - before)
        return not ends


@torch.no_grad()
def speculate(
    target: Target,
    draft: DFlash2 | DSpark,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_new: int,
    seed: int = 0,
    use_selector: bool = True,
) -> list[Trace]:
    """Decode every prompt with draft and verify; one trace per prompt."""
    torch.manual_seed(seed)
    device = target.cos.device
    layer_ids = draft.shape.target_layer_ids
    capacity = max(map(len, prompts)) + max_new + 2 * draft.shape.block_size + 2
    caches = [Cache(target, n, len(prompts), capacity) for n in (len(target.model.layers), len(draft.layers))]
    lengths = torch.tensor([len(p) - 1 for p in prompts], device=device)
    anchors = torch.tensor([p[-1] for p in prompts], device=device)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt[:-1]], dtype=torch.long, device=device)
        if ids.numel():
            positions = torch.arange(ids.shape[1], device=device)[None]
            own = [cache.row(row) for cache in caches]
            features, _ = target_forward(target, own[0], ids, positions, layer_ids)
            inject(draft, target, own[1], features, positions)
    traces = [Trace() for _ in prompts]
    live = list(range(len(prompts)))
    while live:
        hidden = draft_hidden(draft, target, caches[1], anchors, lengths)
        proposal = propose(draft, target, hidden, anchors, temperature, use_selector)
        block = torch.cat((anchors[:, None], proposal.ids), dim=1)
        positions = lengths[:, None] + torch.arange(block.shape[1], device=device)
        features, final = target_forward(target, caches[0], block, positions, layer_ids)
        inject(draft, target, caches[1], features, positions)
        accepted, anchors = verify(proposal, target.logits(final), temperature)
        lengths = lengths + accepted + 1
        drafted, counts, bonus = proposal.ids.tolist(), accepted.tolist(), anchors.tolist()
        if proposal.confidence is not None:
            for index, row_confidence in zip(live, proposal.confidence.tolist(), strict=True):
                traces[index].confidence.append(row_confidence)
        going = [
            row
            for row, index in enumerate(live)
            if traces[index].take([*drafted[row][: counts[row]], bonus[row]], counts[row], max_new)
        ]
        if len(going) < len(live):
            rows = torch.tensor(going, dtype=torch.long, device=device)
            live = [live[row] for row in going]
            anchors, lengths = anchors[rows], lengths[rows]
            for cache in caches:
                cache.keep(rows)
    return traces
