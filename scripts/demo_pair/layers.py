"""Building blocks of target and draft. Parameters are float32; the arithmetic follows the activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .settings import TargetShape


class Linear(nn.Module):
    """A bias-free linear map, `weight` [out, in], cast to the input's dtype on use."""

    def __init__(self, num_in: int, num_out: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) * std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RmsNorm(nn.Module):
    """RMSNorm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight.to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        std = 0.7 * hidden**-0.5
        self.gate_proj = Linear(hidden, inner, std)
        self.up_proj = Linear(hidden, inner, std)
        self.down_proj = Linear(inner, hidden, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionWeights(nn.Module):
    """The projections and head norms of a Qwen3 attention layer; how rows attend is up to the model."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        hidden, head = shape.hidden_size, shape.head_dim
        self.head_dim = head
        self.num_heads, self.num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        std = 0.7 * hidden**-0.5
        self.q_proj = Linear(hidden, self.num_heads * head, std)
        self.k_proj = Linear(hidden, self.num_kv_heads * head, std)
        self.v_proj = Linear(hidden, self.num_kv_heads * head, std)
        self.o_proj = Linear(self.num_heads * head, hidden, 0.0)
        self.q_norm = RmsNorm(head, shape.rms_norm_eps)
        self.k_norm = RmsNorm(head, shape.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., T, hidden] -> [..., T, heads, head_dim], normed and rotated; cos, sin [..., T, head_dim]."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        return rotate(self.q_norm(q), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., T, hidden] -> keys and values [..., T, kv_heads, head_dim], keys normed and rotated."""
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return rotate(self.k_norm(k), cos, sin), v


def rope_tables(
    num_positions: int, head_dim: int, theta: float, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head_dim] of the half-split rotary embedding."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(num_positions, device=device, dtype=torch.float32), theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; x [..., T, heads, head_dim], cos and sin [..., T, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return (x.float() * cos.unsqueeze(-2) + swapped * sin.unsqueeze(-2)).to(x.dtype)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Plain attention with grouped heads.

    q [B, T, heads, D]; k, v [B, kv_heads, L, D]; visible bool, broadcastable to [B, T, L]. Returns [B, T, heads * D].
    """
    batch, rows, heads, head_dim = q.shape
    groups = k.shape[1]
    q = q.view(batch, rows, groups, heads // groups, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (q @ k.mT).float() * head_dim**-0.5
    scores = scores.unflatten(2, (heads // groups, rows)).masked_fill(~visible[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(v.dtype).flatten(2, 3)
    out = (weights @ v).unflatten(2, (heads // groups, rows))
    return out.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads * head_dim)
