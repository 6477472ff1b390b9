"""The target: a Qwen3 decoder whose tensor names are those of transformers' Qwen3ForCausalLM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import AttentionWeights, Mlp, RmsNorm, rope_tables
from .settings import TargetShape


class TargetLayer(nn.Module):
    """One decoder layer over whole sequences."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionWeights(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention = self.self_attn
        h = self.input_layernorm(x)
        q = attention.queries(h, cos, sin).transpose(1, 2)
        k, v = (t.transpose(1, 2) for t in attention.keys_values(h, cos, sin))
        repeats = attention.num_heads // attention.num_kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    """A table of token vectors."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_rows, size) * 0.02)


class _Body(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)


class Target(nn.Module):
    """The decoder; `dtype` is the dtype of its activations."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: TargetShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = _Body(shape)
        cos, sin = rope_tables(shape.max_position_embeddings + 64, shape.head_dim, shape.rope_theta, "cpu")
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Token vectors in the activations' dtype."""
        return F.embedding(ids, self.model.embed_tokens.weight).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The tied head on final-normed hidden states."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def hidden(self, ids: Tensor, layer_ids: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> (residual streams after `layer_ids` [B, T, m * hidden], final-normed hidden [B, T, hidden])."""
        x = self.embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        taken = []
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if index in layer_ids:
                taken.append(x)
        features = torch.cat(taken, dim=-1) if taken else x[..., :0]
        return features, self.model.norm(x)

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in nats."""
        return token_loss(self.hidden(ids)[1], self.model.embed_tokens.weight, labels)


def token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the tied head (a function of its own so that it can be compiled)."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
