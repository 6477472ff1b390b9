"""DFlash2's path selector: candidates per slot, pair scores between neighbours, one walk from left to right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .dispatch import Implementation, runs_triton
from .estimator import FEATURE_LIMIT, RowEstimator, logit_of_largest, predict_rows

MIN_TEMPERATURE = 1e-5  # below it a softmax over score differences overflows; such rows are greedy anyway


def top_candidates(
    logits: Tensor,
    k: int,
    forbidden_ids: Tensor | Sequence[int] = (),
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row: `(ids [N, k] int64, scores [N, k] float32)`, best first.

    `logits` [N, V] float32. `forbidden_ids` (a few integers, or a tensor [F] int64 on the same device: the mask
    token, padding of the vocabulary) are never candidates: their logits are overwritten with -inf in place, so
    hand over logits of your own.
    """
    if runs_triton(logits, implementation):
        from .triton import top_tokens as twin

        return twin.top_tokens(logits, k, forbidden_ids)
    if isinstance(forbidden_ids, Tensor):
        logits.index_fill_(-1, forbidden_ids, float("-inf"))
    else:
        for token_id in forbidden_ids:
            logits[:, token_id].fill_(float("-inf"))
    if k == 1:  # argmax takes a third of the time
        ids = logits.argmax(dim=-1, keepdim=True)
        return ids, logits.gather(-1, ids)
    scores, ids = logits.topk(k, dim=-1)
    return ids, scores


def pair_scores(
    scores: Tensor, ids: Tensor, anchors: Tensor, projected: Tensor, predecessors: Tensor, successors: Tensor
) -> Tensor:
    """`S[r, l, a, b] = scores[r, l, b] + sum_j A[pred(a), j] * projected[r, l, j] * Bk[ids[r, l, b], j]`.

    pred(a) is `ids[r, l - 1, a]`, and the anchor for l = 0 whatever a. Shapes as in `selector_walk`; the result is
    [R, g, K, K] float32. Scoring the whole lattice at once costs 16 times the multiplications of the rows that the
    walk takes, and yet less time: two gathers and one batched product against five calls per slot.
    """
    num_reqs, num_slots, k = ids.shape
    before = torch.cat((anchors.view(num_reqs, 1, 1).expand(-1, 1, k), ids[:, :-1]), dim=1)
    left = embedding(before, predecessors) * projected.unsqueeze(2)  # indexing would take twice as long
    right = embedding(ids, successors)
    left, right = left.flatten(0, 1), right.flatten(0, 1).transpose(1, 2)
    bias = scores.view(-1, 1, k)
    if left.dtype == torch.float32:
        pairs = torch.baddbmm(bias, left, right)
    else:  # products in the codebooks' precision, sums with the scores in float32
        pairs = torch.bmm(left, right).float() + bias
    return pairs.view(num_reqs, num_slots, k, k)


def selector_walk(
    scores: Tensor,
    ids: Tensor,
    anchors: Tensor,
    projected: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    temperature: Tensor,
    greedy: Tensor,
    uniforms: Tensor,
    any_sampled: bool = True,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per slot, each scored against the token really chosen before it.

    - `scores`, `ids` [R, g, K]: candidates of each slot (float32 after multiplier and softcap, int64).
    - `anchors` [R] int64; `projected` [R, g, r]: the selector's projection of each slot's hidden state.
    - `predecessor_codebook`, `successor_codebook` [V, r].
    - `temperature` [R] float32, `greedy` [R] bool.
    - `uniforms` [R, g] in [0, 1), float32 or float64; not looked at for greedy rows.
    - `any_sampled`: False when the caller knows that every row is greedy; saves what only samples need.

    Returns `(tokens [R, g] int64, q [R, g, K] float32)`: greedy rows take the best candidate and store a point
    mass, the others draw from `softmax(S / temperature)` over the K candidates by inverse CDF and store it. `q` is
    the distribution of the row that the realised predecessor selects; off the candidates it is zero.
    """
    lattice = (scores, ids, anchors, projected, predecessor_codebook, successor_codebook)
    draw = (temperature, greedy, uniforms, any_sampled)
    if runs_triton(scores, implementation):
        from .triton import selector as twin

        return twin.selector_walk(*lattice, *draw, MIN_TEMPERATURE, None)[:2]
    pairs = pair_scores(*lattice)
    return _walk(pairs, ids, *draw)[:2]


def selector_walk_with_feature(
    scores: Tensor,
    ids: Tensor,
    anchors: Tensor,
    projected: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    temperature: Tensor,
    greedy: Tensor,
    uniforms: Tensor,
    any_sampled: bool = True,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`selector_walk`, and beside its two results the acceptance feature [R, g] float32 of every slot.

    The feature is `logit(q_max)` (`logit_of_largest`) of the row that the realised predecessor selects, at the
    request's temperature, and at 1 for greedy rows: from the softmax that their point mass replaced. It depends on
    the tokens chosen before the slot and never on the slot's own.
    """
    lattice = (scores, ids, anchors, projected, predecessor_codebook, successor_codebook)
    draw = (temperature, greedy, uniforms, any_sampled)
    if runs_triton(scores, implementation):
        from .triton import selector as twin

        return twin.selector_walk(*lattice, *draw, MIN_TEMPERATURE, FEATURE_LIMIT)[:3]
    pairs = pair_scores(*lattice)
    tokens, q, rows = _walk(pairs, ids, *draw)
    realised = pairs.gather(2, rows)[:, :, 0]
    divisor = temperature.clamp_min(MIN_TEMPERATURE).masked_fill(greedy, 1.0)
    return tokens, q, logit_of_largest(realised, divisor[:, None])


def selector_walk_with_confidence(
    scores: Tensor,
    ids: Tensor,
    anchors: Tensor,
    projected: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    temperature: Tensor,
    greedy: Tensor,
    uniforms: Tensor,
    any_sampled: bool,
    rows: Tensor,
    estimator: RowEstimator,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`selector_walk_with_feature` and `kernels.estimator.predict_rows` of its feature, in one launch.

    `rows` [R] int64, the request rows; -1 is the last of them all. Returns the walk's three results and the confidence
    [R, g] float32; feature and confidence are also left in `estimator.values`, by row.
    """
    walk = (scores, ids, anchors, projected, predecessor_codebook, successor_codebook, temperature, greedy)
    draw = (uniforms, any_sampled)
    if runs_triton(scores, implementation):
        from .triton import selector as twin

        return twin.selector_walk(*walk, *draw, MIN_TEMPERATURE, FEATURE_LIMIT, rows, estimator)
    tokens, q, feature = selector_walk_with_feature(*walk, *draw, "torch")
    return tokens, q, feature, predict_rows(feature, rows, *estimator, "torch")


def _walk(
    pairs: Tensor, ids: Tensor, temperature: Tensor, greedy: Tensor, uniforms: Tensor, any_sampled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, q, and the realised predecessor of each slot as a gather index into `pairs`, int64 [R, g, 1, K]."""
    num_reqs, num_slots, k = ids.shape
    # The choice after every possible predecessor first, then the walk is one look-up per slot.
    best = pairs.argmax(dim=-1)
    if any_sampled:
        scaled = pairs / temperature.clamp_min(MIN_TEMPERATURE).view(num_reqs, 1, 1, 1)
        probs = scaled.softmax(dim=-1)
        cdf = probs.cumsum(dim=-1)
        # Against u times the total, since a float32 sum may end below 1 and the rest must not go to the last one.
        threshold = uniforms.view(num_reqs, num_slots, 1, 1) * cdf[..., -1:]
        drawn = (cdf <= threshold).sum(dim=-1).clamp_max_(k - 1)
        best = torch.where(greedy.view(num_reqs, 1, 1), best, drawn)
    column = best[:, 0, :1]
    columns = [column]
    for choice in best.unbind(dim=1)[1:]:
        column = choice.gather(1, column)
        columns.append(column)
    chosen = torch.cat(columns, dim=1)  # [R, g]: which of the K candidates
    tokens = ids.gather(2, chosen.unsqueeze(2)).squeeze(2)
    q = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device).scatter_(2, chosen.unsqueeze(2), 1.0)
    before = torch.cat((torch.zeros_like(chosen[:, :1]), chosen[:, :-1]), dim=1)
    rows = before.view(num_reqs, num_slots, 1, 1).expand(-1, -1, 1, k)
    if any_sampled:
        q = torch.where(greedy.view(num_reqs, 1, 1), q, probs.gather(2, rows).squeeze(2))
    return tokens, q, rows
