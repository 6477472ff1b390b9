"""DFlash v1: a draft of a few layers that fills a block of masked rows at once.

Its context is no text but the target's own hidden states: fused, and injected as keys and values of every layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashspark.attention.interface import AttentionBackend, BlockQueries
from flashspark.attention.kv_pool import KVPool
from flashspark.kernels.dispatch import runs_triton
from flashspark.kernels.qk_norm_rope import qk_norm_rope_write
from flashspark.kernels.rms_norm import rms_norm
from flashspark.layers.attention import MLP, AttentionProjections
from flashspark.layers.linear import ColumnLinear, Linear
from flashspark.layers.norm import RMSNorm
from flashspark.layers.parameters import NamedParameters, Parameter, prefixed
from flashspark.layers.residual import ResidualStream
from flashspark.layers.rotary import RopeTables, RotaryEmbedding
from flashspark.models.config import DraftConfig


class DFlashLayer:
    """One draft layer: attention of a block over its context and itself, then SwiGLU, pre-norm."""

    def __init__(
        self, config: DraftConfig, index: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.causal, self.window = config.layer_causal[index], config.layer_windows[index]
        self.value_scale = config.attention_value_scale
        self.input_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.attention = AttentionProjections(config, dtype=dtype, device=device)
        self.post_attention_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = MLP(hidden, config.intermediate_size, dtype=dtype, device=device)

    def __call__(
        self,
        stream: ResidualStream,
        rope: RopeTables,
        block: BlockQueries,
        pool: KVPool,
        backend: AttentionBackend,
    ) -> None:
        """Moves the residual stream [R, B, H] on by this layer."""
        out = self.attend(stream.normed(self.input_norm), rope, block, pool, backend)
        stream.add_product(self.attention.output, out)
        self.mlp.add_to(stream, stream.normed(self.post_attention_norm))

    def attend(
        self, x: Tensor, rope: RopeTables, block: BlockQueries, pool: KVPool, backend: AttentionBackend
    ) -> Tensor:
        """Attention before its output projection: `x` [R, B, H] -> [R, B, Hq * D]."""
        q, k, v = self.attention.project(x, rope)
        if self.value_scale != 1.0:
            v = v * self.value_scale
        index = self.index
        scale = self.attention.scale
        out = backend.block(q, k, v, pool.k[index], pool.v[index], block, scale, self.causal, self.window)
        return out.reshape(*x.shape[:2], -1)

    def parameters(self) -> NamedParameters:
        yield from prefixed("input_layernorm", self.input_norm.parameters())
        yield from prefixed("self_attn", self.attention.parameters())
        yield from prefixed("post_attention_layernorm", self.post_attention_norm.parameters())
        yield from prefixed("mlp", self.mlp.parameters())


class ContextProjections:
    """Keys and values of context tokens for all layers, in one product.

    A second copy of the layers' k and v weights, laid out side by side: `[layer, key or value, head, feature]`.
    Nothing but `fc` and `hidden_norm` touches a context token before it: no input norm, no convolution.
    """

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.num_layers, self.num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.value_scale = config.attention_value_scale
        size = self.num_kv_heads * self.head_dim
        parts = {
            f"layers.{i}.self_attn.{name}": size
            for i in range(self.num_layers)
            for name in ("k_proj", "v_proj")
        }
        self.linear = ColumnLinear(
            config.hidden_size, parts, bias=config.attention_bias, dtype=dtype, device=device
        )
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        self.key_norm = torch.empty(shape, dtype=dtype, device=device)

    def write(self, context: Tensor, rope: RopeTables, slots: Tensor, pool: KVPool) -> None:
        """`context` [M, H] -> K/V of every layer at `slots` [M]; `rope` as of the context tokens' positions."""
        kv = self.linear(context).view(-1, self.num_layers, 2, self.num_kv_heads, self.head_dim)
        if runs_triton(kv):
            for layer, heads in enumerate(kv.flatten(2, 3).unbind(1)):
                qk_norm_rope_write(
                    heads,
                    self.key_norm[layer],
                    self.eps,
                    rope.cos,
                    rope.sin,
                    slots,
                    pool.k[layer],
                    pool.v[layer],
                    self.value_scale,
                )
            return
        keys, values = kv.unbind(2)
        keys = rms_norm(keys, self.key_norm, self.eps).flatten(1, 2)
        keys = rope.turn(keys).view(values.shape)
        if self.value_scale != 1.0:
            values = values * self.value_scale
        for layer in range(self.num_layers):
            pool.write(layer, slots, keys[:, layer], values[:, layer])

    def parameters(self) -> NamedParameters:
        yield from self.linear.parameters()
        for i in range(self.num_layers):
            name = f"layers.{i}.self_attn.k_norm.weight"
            yield name, Parameter((self.head_dim,), (self.key_norm[i],))


class DFlashDraft:
    """The draft. It owns no embedding and no head: rows come in embedded, and go out to the target's head."""

    layer_class: type[DFlashLayer] = DFlashLayer

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        fused = len(config.target_layer_ids) * hidden
        self.fc = Linear(fused, {"fc": hidden}, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.layers = [
            self.layer_class(config, i, dtype=dtype, device=device) for i in range(config.num_hidden_layers)
        ]
        self.context = ContextProjections(config, dtype=dtype, device=device)
        self.norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, dtype=dtype, device=device)
        largest = config.with_block_size(config.trained_block_size)
        self._row_offsets = torch.arange(largest.draft_rows, device=device)

    def make_kv_pool(self, num_slots: int) -> KVPool:
        """A zeroed context pool of this draft's geometry, owned by the caller; slots are the target's."""
        config = self.config
        return KVPool(
            config.num_hidden_layers,
            num_slots,
            config.num_key_value_heads,
            config.head_dim,
            self.dtype,
            self.device,
        )

    def inject(self, features: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        """Makes tokens part of the context: `features` [M, m * H] of the target at `positions` [M], to `slots` [M].

        A map per token: chunks of any size give the same context, and rows written for rejected tokens are
        overwritten when their positions come up again.
        """
        context = self.hidden_norm(self.fc(features))
        self.context.write(context, self.rotary.tables(positions), slots, pool)

    def forward_block(
        self, embeddings: Tensor, block: BlockQueries, pool: KVPool, backend: AttentionBackend
    ) -> Tensor:
        """`embeddings` [R, B, H] of anchor and masks -> final-normed hidden states z [R, B, H].

        Row 0 sits at position `context_lens`, the anchor's own. Which token a row predicts is up to the family: the
        one at its own position (so row 0 none), or the one after. Nothing is written to the pool.
        """
        positions = block.context_lens.unsqueeze(1) + self._row_offsets[: block.width]
        rope = self.rotary.tables(positions)
        if self.config.input_embedding_scale != 1.0:
            embeddings = embeddings * self.config.input_embedding_scale
        stream = ResidualStream(embeddings)
        for layer in self.layers:
            layer(stream, rope, block, pool, backend)
        return stream.normed(self.norm)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Output multiplier and softcap on the target head's logits (any shape, float32); both keep the order."""
        config = self.config
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        if config.final_logit_softcapping is not None:
            cap = config.final_logit_softcapping
            logits = (logits / cap).tanh_().mul_(cap)
        return logits

    def hold_half(self) -> None:
        """After loading a checkpoint in half precision: hold the weights as it does (`kernels.half_linear`)."""
        for linear in self.linears():
            linear.hold_half()

    def linears(self) -> Iterator[Linear]:
        """The products of context and layers."""
        yield from (self.fc, self.context.linear)
        for layer in self.layers:
            yield from (*layer.attention.linears(), *layer.mlp.linears())

    def parameters(self) -> NamedParameters:
        """Every tensor of the checkpoint; k and v of the layers occur twice, for block rows and for context."""
        yield from self.fc.parameters()
        yield from prefixed("hidden_norm", self.hidden_norm.parameters())
        for index, layer in enumerate(self.layers):
            yield from prefixed(f"layers.{index}", layer.parameters())
        yield from self.context.parameters()
        yield from prefixed("norm", self.norm.parameters())
