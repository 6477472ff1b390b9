"""DSpark: DFlash's backbone, a Markov head that corrects the slots' logits in order, and a confidence head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from flashspark.kernels.markov_walk import MarkovWeights
from flashspark.layers.linear import Linear
from flashspark.layers.parameters import NamedParameters, Parameter, prefixed
from flashspark.models.config import DraftConfig
from flashspark.models.dflash import DFlashDraft


class MarkovHead:
    """Weights of the correction by the previous token; the walk is `kernels.markov_walk`.

    The gate of a gated head reads `[z; e]`, the joint projection of an rnn head `[s; e; z]`. Their parts for the
    hidden state z are applied to all slots at once (`project`), the others inside the walk (`weights`). None of them
    is held in half precision: the walk takes them apart.
    """

    def __init__(
        self, config: DraftConfig, vocab_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind, self.rank, self.hidden_size = config.markov_head_type, rank, hidden
        self.embedding = torch.empty(vocab_size, rank, dtype=dtype, device=device)
        self.output = Linear(rank, {"markov_w2": vocab_size}, dtype=dtype, device=device)
        self.inner: Linear | None = None
        if self.kind == "gated":
            self.inner = Linear(hidden + rank, {"gate_proj": rank}, bias=True, dtype=dtype, device=device)
        elif self.kind == "rnn":
            parts = {"joint_proj": 3 * rank}
            self.inner = Linear(2 * rank + hidden, parts, bias=True, dtype=dtype, device=device)

    @property
    def weights(self) -> MarkovWeights:
        """What the walk multiplies with; views, nothing is copied."""
        assert self.output.weight is not None
        inner = None
        if self.inner is not None:
            assert self.inner.weight is not None
            weight = self.inner.weight
            inner = weight[self.hidden_size :] if self.kind == "gated" else weight[: 2 * self.rank]
        return MarkovWeights(self.kind, self.embedding, self.output.weight, inner)

    def project(self, z: Tensor) -> Tensor | None:
        """`z` [..., H] -> its part of the gate [..., r] or of the joint projection [..., 3r], bias included."""
        if self.inner is None:
            return None
        assert self.inner.weight is not None and self.inner.bias is not None
        start = 0 if self.kind == "gated" else 2 * self.rank
        weight = self.inner.weight[start : start + self.hidden_size]
        flat = torch.addmm(self.inner.bias, z.reshape(-1, self.hidden_size), weight)
        return flat.view(*z.shape[:-1], self.inner.out_features)

    def parameters(self) -> NamedParameters:
        yield "markov_w1.weight", Parameter(tuple(self.embedding.shape), (self.embedding,))
        yield from self.output.parameters()
        if self.inner is not None:
            yield from self.inner.parameters()


class ConfidenceHead:
    """How likely a slot's draft is accepted if those before it are: one raw logit per slot."""

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.with_markov = config.confidence_head_with_markov
        size = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.projection = Linear(size, {"proj": 1}, bias=True, dtype=dtype, device=device)

    def raw(self, z: Tensor, previous_embedding: Tensor | None) -> Tensor:
        """Float32 logits [...] from `z` [..., H], the final-normed hidden state, and the Markov embedding [..., r] of
        the token before the slot (looked at only where the head was built with it)."""
        weight, bias = self.projection.weight, self.projection.bias
        assert weight is not None and bias is not None
        features = z
        if self.with_markov:
            assert previous_embedding is not None
            features = torch.cat((z, previous_embedding), dim=-1)
        return (features.float() @ weight.float() + bias.float()).squeeze(-1)

    def parameters(self) -> NamedParameters:
        yield from self.projection.parameters()


class DSparkDraft(DFlashDraft):
    """DFlash's layers with `markov` (None at rank 0) and `confidence` (None where the checkpoint has none)."""

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, dtype=dtype, device=device)
        if config.vocab_size is None:
            raise ValueError("a DSpark draft is built for a vocabulary: set vocab_size (the target's)")
        self.markov: MarkovHead | None = None
        self.confidence: ConfidenceHead | None = None
        if config.markov_rank:
            self.markov = MarkovHead(config, config.vocab_size, dtype=dtype, device=device)
        if config.enable_confidence_head:
            self.confidence = ConfidenceHead(config, dtype=dtype, device=device)

    def confidence_logits(self, z: Tensor, previous_ids: Tensor) -> Tensor:
        """Raw confidence [R, g] float32 of the slots with hidden states `z` [R, g, H], each after the token
        `previous_ids` [R, g]: the anchor, then the drafts. What a slot itself drew plays no part."""
        assert self.confidence is not None, "this draft has no confidence head"
        before = None if self.markov is None else embedding(previous_ids, self.markov.embedding)
        return self.confidence.raw(z, before)

    def parameters(self) -> NamedParameters:
        yield from super().parameters()
        if self.markov is not None:
            yield from prefixed("markov_head", self.markov.parameters())
        if self.confidence is not None:
            yield from prefixed("confidence_head", self.confidence.parameters())
