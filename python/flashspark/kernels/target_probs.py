"""From logits to the distribution a request asked for, row by row along its drafted prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton


def adjust_logits(
    logits: Tensor,
    output_counts: Tensor,
    prompt_seen: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
    bias: Tensor,
    suppressed: Tensor,
    implementation: Implementation | None = None,
) -> Tensor:
    """Penalties, logit bias and suppressed tokens, in this order.

    Args:
        logits: float32 [N, V].
        output_counts: [N, V], how often each token stands in the output *before* this row's token, drafted
            tokens of the prefix included.
        prompt_seen: bool [N, V], tokens of the prompt.
        repetition_penalty, frequency_penalty, presence_penalty: float32 [N]; 1, 0, 0 are neutral. Repetition
            (over prompt and output) divides positive logits and multiplies negative ones, as in CTRL
            (Keskar et al. 2019); the other two are OpenAI's, over the output.
        bias: float32 [N, V], added.
        suppressed: bool [N, V], set to -inf.

    Returns:
        float32 [N, V], a new tensor.
    """
    if runs_triton(logits, implementation):
        from .triton import target_probs as twin

        return twin.adjust_logits(
            logits,
            output_counts,
            prompt_seen,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            bias,
            suppressed,
        )
    counts = output_counts.to(logits.dtype)
    in_output = counts > 0
    factor = torch.where(in_output | prompt_seen, repetition_penalty[:, None], torch.ones_like(logits))
    adjusted = torch.where(logits > 0, logits / factor, logits * factor)
    adjusted -= frequency_penalty[:, None] * counts
    adjusted -= presence_penalty[:, None] * in_output.to(logits.dtype)
    adjusted += bias
    return adjusted.masked_fill_(suppressed, float("-inf"))


def target_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    implementation: Implementation | None = None,
) -> Tensor:
    """The serving distribution: temperature, then top-k, top-p, min-p, each on what the one before left.

    Top-k keeps the k largest logits; ties at the k-th value are kept in token order until k are held. Top-p
    keeps the smallest prefix of the sorted, renormalised rest whose mass reaches p (at least one token). Min-p
    keeps tokens with at least `min_p` times the largest probability.

    Args:
        logits: float32 [N, V].
        temperature: float32 [N], above 0.
        top_k: int64 [N]; V or more, or below 1, means all.
        top_p, min_p: float32 [N]; 1 and 0 are neutral.

    Returns:
        float32 [N, V], each row summing to 1.
    """
    if runs_triton(logits, implementation):
        from .triton import target_probs as twin

        return twin.target_probs(logits, temperature, top_k, top_p, min_p)
    probs = torch.softmax(logits / temperature[:, None], dim=-1)
    vocab_size = logits.shape[-1]
    limit = torch.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k)
    # Sorted by logit, not probability: far tails underflow to equal zeros, and ties must not decide by chance.
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ranked = probs.gather(-1, order).to(torch.float64)
    rank = torch.arange(vocab_size, device=logits.device)
    ranked = ranked.masked_fill(rank >= limit[:, None], 0.0)
    ranked /= ranked.sum(-1, keepdim=True)
    mass_before = ranked.cumsum(-1) - ranked
    wanted = torch.where(top_p >= 1.0, 2.0, top_p.to(torch.float64))  # rounding must not cut a neutral top-p
    ranked = ranked.masked_fill((mass_before >= wanted[:, None]) & (rank > 0), 0.0)
    ranked = ranked.masked_fill(ranked < min_p.to(torch.float64)[:, None] * ranked[:, :1], 0.0)
    ranked /= ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, ranked.to(probs.dtype))


def sample_categorical(
    weights: Tensor, uniforms: Tensor, implementation: Implementation | None = None
) -> Tensor:
    """Inverse-CDF draw from unnormalised weights.

    Args:
        weights: [N, V], non-negative, a positive sum per row.
        uniforms: float64 [N], in (0, 1).

    Returns:
        int64 [N]: the first token whose cumulative weight exceeds `uniform * total`; never one of weight 0.
    """
    if runs_triton(weights, implementation):
        from .triton import sampling as twin

        return twin.sample_categorical(weights, uniforms)
    cdf = weights.to(torch.float64).cumsum(-1)
    wanted = uniforms[:, None] * cdf[:, -1:]
    drawn = torch.searchsorted(cdf, wanted, right=True).squeeze(-1)
    # Rounding can push `wanted` up to the total: then the last token that has weight.
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous()).squeeze(-1)
    # NaN (broken weights, everything suppressed) is larger than any number: the id has to stay one.
    return torch.minimum(drawn, last).clamp_(max=weights.shape[-1] - 1)
