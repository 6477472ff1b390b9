"""DSpark's walk: logits of all slots at once, then corrected from left to right by a head that sees the last token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .dispatch import Implementation, runs_triton
from .selector import MIN_TEMPERATURE
from .target_probs import sample_categorical


class MarkovWeights(NamedTuple):
    """A Markov head as the walk needs it; products are taken in the weights' dtype, everything else in float32.

    What the head multiplies with the slot's hidden state does not depend on the walk and comes in ready, as
    `projected` of `markov_walk`; here is what meets the previous token's embedding e (and the state s):

    - vanilla: `features = e`;
    - gated: `features = sigmoid(projected + e @ inner) * e`, inner [r, r];
    - rnn: `(f, c, o) = projected + [s; e] @ inner`, inner [2r, 3r]; `features = tanh(o)`, and for the next slot
      `s = sigmoid(f) * s + (1 - sigmoid(f)) * tanh(c)`, from zero at the start of every block.

    The correction is `features @ output`.
    """

    kind: str  # vanilla, gated, rnn
    embedding: Tensor  # [V, r]
    output: Tensor  # [r, V]
    inner: Tensor | None = None


class MarkovWalk(NamedTuple):
    """Tokens and what they were drawn from."""

    tokens: Tensor  # int64 [R, g]
    probs: Tensor | None  # float32 [R, g, V], a point mass for greedy rows; None when every row is greedy
    logits: Tensor  # float32 [R, g, V], corrected


def markov_walk(
    logits: Tensor,
    anchors: Tensor,
    markov: MarkovWeights | None,
    projected: Tensor | None,
    temperature: Tensor,
    greedy: Tensor,
    uniforms: Tensor | None,
    forbidden_ids: Tensor | None = None,
    implementation: Implementation | None = None,
) -> MarkovWalk:
    """One token per slot, from logits that know the token before it: the anchor for slot 0, then the realised one.

    Greedy rows take the argmax; the others draw from `softmax(C / temperature)` over the whole vocabulary, by
    inverse CDF, C being the corrected logits.

    Args:
        logits: float32 [R, g, V]; corrected in place, so hand over logits of your own. Fastest where the rows of
            one slot lie together: a transposed [g, R, V].
        anchors: int64 [R].
        markov: None leaves the slots independent of each other.
        projected: [R, g, r] (gated) or [R, g, 3r] (rnn) in the weights' dtype; None for vanilla.
        temperature: float32 [R].
        greedy: bool [R].
        uniforms: float64 [R, g], not looked at for greedy rows; None when every row is greedy, and then nothing of
            the vocabulary's size is made.
        forbidden_ids: int64 [F], never drawn (the mask token): their logits become -inf.
    """
    num_reqs, num_slots, vocab_size = logits.shape
    with_triton = runs_triton(logits, implementation)
    if forbidden_ids is not None:
        logits.index_fill_(-1, forbidden_ids, float("-inf"))
    probs = None
    if uniforms is not None:
        probs = logits.new_empty(num_slots, num_reqs, vocab_size).transpose(0, 1)
        scale = temperature.clamp_min(MIN_TEMPERATURE).reciprocal()[:, None]
        draws = (~greedy)[:, None].float()
    state = None
    previous = anchors
    chosen = []
    for slot in range(num_slots):
        corrected = logits[:, slot]
        if markov is not None:
            at_slot = None if projected is None else projected[:, slot]
            features, state = _features(markov, embedding(previous, markov.embedding), at_slot, state)
            _add_product(corrected, features, markov.output)
        if with_triton:
            previous = _draw_with_triton(corrected, slot, temperature, greedy, uniforms, probs)
            chosen.append(previous)
            continue
        previous = corrected.argmax(-1)
        if probs is not None and uniforms is not None:
            q = torch.softmax(corrected * scale, dim=-1)
            previous = torch.where(greedy, previous, sample_categorical(q, uniforms[:, slot]))
            torch.mul(q, draws, out=probs[:, slot])  # zero for greedy rows, whose point mass comes last
        chosen.append(previous)
    tokens = torch.stack(chosen, dim=1)
    if probs is not None and not with_triton:
        at_token = torch.where(greedy[:, None], 1.0, probs.gather(2, tokens[..., None]).squeeze(2))
        probs.scatter_(2, tokens[..., None], at_token[..., None])
    return MarkovWalk(tokens, probs, logits)


def _draw_with_triton(
    corrected: Tensor,
    slot: int,
    temperature: Tensor,
    greedy: Tensor,
    uniforms: Tensor | None,
    probs: Tensor | None,
) -> Tensor:
    from .triton import markov_walk as twin

    noise = None if uniforms is None else uniforms[:, slot]
    q = None if probs is None else probs[:, slot]
    return twin.draw_slot(corrected, temperature, greedy, noise, q, MIN_TEMPERATURE)


def _features(
    markov: MarkovWeights, e: Tensor, projected: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What `output` is multiplied with [R, r], and the state of the next slot; `e` [R, r]."""
    if markov.kind == "vanilla":
        return e, None
    assert markov.inner is not None and projected is not None
    if markov.kind == "gated":
        gate = torch.addmm(projected, e, markov.inner).float().sigmoid_()
        return (gate * e).to(e.dtype), None
    assert markov.kind == "rnn", markov.kind
    if state is None:
        state = torch.zeros(e.shape, dtype=torch.float32, device=e.device)
    joint = torch.addmm(projected, torch.cat((state.to(e.dtype), e), dim=1), markov.inner).float()
    forget, candidate, output = joint.chunk(3, dim=1)
    return output.tanh().to(e.dtype), torch.lerp(candidate.tanh(), state, forget.sigmoid())


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """`into += left @ right`, the sum in float32 whatever the factors' dtype."""
    if right.dtype == into.dtype:
        into.addmm_(left, right)
    else:
        into.add_(torch.mm(left, right))
