"""Qwen3, dense, any size: the target whose hidden states feed the draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashspark.attention.interface import AttentionBackend, RaggedQueries
from flashspark.attention.kv_pool import KVPool
from flashspark.kernels.qk_norm_rope import qk_norm_rope_write
from flashspark.layers.attention import MLP, AttentionProjections
from flashspark.layers.embedding import TokenTables
from flashspark.layers.linear import Linear
from flashspark.layers.norm import RMSNorm
from flashspark.layers.parameters import NamedParameters, prefixed
from flashspark.layers.residual import ResidualStream
from flashspark.layers.rotary import RopeTables, RotaryEmbedding
from flashspark.models.config import TargetConfig


class TargetHidden(NamedTuple):
    """What a target forward leaves: `final` [M, H], normed, for the head; `features` [M, m * H], the residual
    stream after each captured layer, concatenated in ascending order of layers, or None when none is."""

    final: Tensor
    features: Tensor | None


class Qwen3Layer:
    """One decoder layer: pre-norm attention and SwiGLU on a residual stream."""

    def __init__(self, config: TargetConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.attention = AttentionProjections(config, dtype=dtype, device=device)
        self.post_attention_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = MLP(hidden, config.intermediate_size, dtype=dtype, device=device)

    def __call__(
        self,
        stream: ResidualStream,
        rope: RopeTables,
        layer: int,
        queries: RaggedQueries,
        pool: KVPool,
        backend: AttentionBackend,
    ) -> None:
        """Moves the residual stream [M, H] on by this layer; writes the rows' K/V to the pool."""
        attention, k_cache, v_cache = self.attention, pool.k[layer], pool.v[layer]
        heads, turn = attention.project_heads(stream.normed(self.input_norm)), attention.turn(rope)
        out = backend.ragged_projected(heads, turn, k_cache, v_cache, queries, attention.scale)
        stream.add_product(attention.output, out)
        self.mlp.add_to(stream, stream.normed(self.post_attention_norm))

    def write_kv(
        self, stream: ResidualStream, rope: RopeTables, layer: int, queries: RaggedQueries, pool: KVPool
    ) -> None:
        """Nothing but the rows' K/V, for rows whose residual stream nobody reads after this layer."""
        attention = self.attention
        heads = attention.project_heads(stream.normed(self.input_norm))
        qk_norm_rope_write(heads, *attention.turn(rope), queries.slots, pool.k[layer], pool.v[layer])

    def parameters(self) -> NamedParameters:
        yield from prefixed("input_layernorm", self.input_norm.parameters())
        yield from prefixed("self_attn", self.attention.parameters())
        yield from prefixed("post_attention_layernorm", self.post_attention_norm.parameters())
        yield from prefixed("mlp", self.mlp.parameters())


class Qwen3:
    """The target. Its weights are uninitialised until a loader has filled `parameters()`."""

    def __init__(self, config: TargetConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.tables = TokenTables(
            config.vocab_size, config.hidden_size, config.tie_word_embeddings, dtype=dtype, device=device
        )
        self.layers = [
            Qwen3Layer(config, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, dtype=dtype, device=device)

    def make_kv_pool(self, num_slots: int) -> KVPool:
        """A zeroed pool of this model's geometry, owned by the caller."""
        config = self.config
        return KVPool(
            config.num_hidden_layers,
            num_slots,
            config.num_key_value_heads,
            config.head_dim,
            self.dtype,
            self.device,
        )

    def embed(self, ids: Tensor) -> Tensor:
        """`ids` int64 of any shape S -> S + [H]."""
        return self.tables.embed(ids)

    def forward(
        self,
        input_ids: Tensor,
        queries: RaggedQueries,
        pool: KVPool,
        backend: AttentionBackend,
        capture_layers: tuple[int, ...] = (),
    ) -> TargetHidden:
        """Runs packed rows `input_ids` [M] int64 and writes their K/V at `queries.slots`.

        `capture_layers`: 0-based and ascending; L is the residual stream after decoder layer L, in transformers'
        terms `hidden_states[L + 1]`, for the last layer too (where that entry is normed and ours is not).
        """
        stream, _ = self._run_layers(len(self.layers), input_ids, queries, pool, backend, capture_layers)
        final = stream.normed(self.norm)
        return TargetHidden(final, _features(stream))

    def fill(
        self,
        input_ids: Tensor,
        queries: RaggedQueries,
        pool: KVPool,
        backend: AttentionBackend,
        capture_layers: tuple[int, ...] = (),
    ) -> Tensor | None:
        """As `forward`, for rows whose logits nobody asks for: a prompt's. Returns the features alone.

        Of the last layer it computes what later tokens attend to, and no more, unless it is captured.
        """
        last = len(self.layers) - 1
        num_whole = len(self.layers) if last in capture_layers else last
        stream, rope = self._run_layers(num_whole, input_ids, queries, pool, backend, capture_layers)
        if num_whole == last:
            self.layers[last].write_kv(stream, rope, last, queries, pool)
        return _features(stream)

    def _run_layers(
        self,
        num_layers: int,
        input_ids: Tensor,
        queries: RaggedQueries,
        pool: KVPool,
        backend: AttentionBackend,
        capture_layers: tuple[int, ...],
    ) -> tuple[ResidualStream, RopeTables]:
        """The residual stream after the first `num_layers` layers, which keeps what is captured; the rows' rope."""
        stream = ResidualStream(self.embed(input_ids))
        rope = self.rotary.tables(queries.positions)
        for index, layer in enumerate(self.layers[:num_layers]):
            layer(stream, rope, index, queries, pool, backend)
            if index in capture_layers:
                stream.keep()
        return stream, rope

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`hidden` [..., H] final-normed (of this model or of its draft) -> [..., V] float32; `out` as of
        `TokenTables.logits`."""
        return self.tables.logits(hidden, out)

    def hold_half(self) -> None:
        """After loading a checkpoint in half precision: hold the weights as it does (`kernels.half_linear`)."""
        self.tables.hold_half()
        for linear in self.linears():
            linear.hold_half()

    def linears(self) -> Iterator[Linear]:
        """The layers' products."""
        for layer in self.layers:
            yield from (*layer.attention.linears(), *layer.mlp.linears())

    def parameters(self) -> NamedParameters:
        """Every tensor of the checkpoint, named without the `model.` prefix."""
        yield from self.tables.parameters("embed_tokens.weight", "lm_head.weight")
        for index, layer in enumerate(self.layers):
            yield from prefixed(f"layers.{index}", layer.parameters())
        yield from prefixed("norm", self.norm.parameters())


def _features(stream: ResidualStream) -> Tensor | None:
    """What the stream has kept, [M, m * H]; to be asked once the stream was read for the last time."""
    stream.value  # noqa: B018 - makes the last sum, if it still waits
    return torch.cat(stream.kept, dim=-1) if stream.kept else None
