"""The projections around attention, and the SwiGLU MLP: what targets and drafts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from flashspark.kernels.qk_norm_rope import HeadTurn, qk_norm_rope
from flashspark.kernels.silu_mul import silu_mul
from flashspark.layers.linear import ColumnLinear, Linear, RowLinear
from flashspark.layers.norm import HeadNorms
from flashspark.layers.parameters import NamedParameters
from flashspark.layers.residual import ResidualStream
from flashspark.layers.rotary import RopeTables


class AttentionShape(Protocol):
    """What of a configuration an attention layer is made from."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def attention_bias(self) -> bool: ...


class AttentionProjections:
    """q, k, v in one product, head norms and rope before attention; the output product after it."""

    def __init__(self, config: AttentionShape, *, dtype: torch.dtype, device: torch.device | str) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        q_size, kv_size = self.num_heads * head_dim, self.num_kv_heads * head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        bias = config.attention_bias
        self.qkv = ColumnLinear(hidden, parts, bias=bias, dtype=dtype, device=device)
        self.output = RowLinear(q_size, {"o_proj": hidden}, bias=bias, dtype=dtype, device=device)
        self.norms = HeadNorms(
            self.num_heads, self.num_kv_heads, head_dim, config.rms_norm_eps, dtype=dtype, device=device
        )

    def project_heads(self, x: Tensor) -> Tensor:
        """`x` [..., H] -> heads of queries, keys and values as projected, [..., Hq + 2 * Hkv, D]."""
        return self.qkv(x).view(*x.shape[:-1], -1, self.head_dim)

    def turn(self, rope: RopeTables) -> HeadTurn:
        """What norms and turns them at the positions of `rope`."""
        return HeadTurn(self.norms.weight, self.norms.eps, rope.cos, rope.sin)

    def project(self, x: Tensor, rope: RopeTables) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [..., H] -> q [..., Hq, D], k and v [..., Hkv, D]; q and k normed and turned."""
        return qk_norm_rope(self.project_heads(x), *self.turn(rope), self.num_kv_heads)

    def linears(self) -> Iterator[Linear]:
        yield from (self.qkv, self.output)

    def parameters(self) -> NamedParameters:
        yield from self.qkv.parameters()
        yield from self.output.parameters()
        yield from self.norms.parameters()


class MLP:
    """`down(silu(gate x) * up x)`, gate and up in one product."""

    def __init__(self, hidden: int, ffn: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        parts = {"gate_proj": ffn, "up_proj": ffn}
        self.gate_up = ColumnLinear(hidden, parts, dtype=dtype, device=device)
        self.down = RowLinear(ffn, {"down_proj": hidden}, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))

    def add_to(self, stream: ResidualStream, x: Tensor) -> None:
        """Adds `self(x)` to the stream."""
        stream.add_product(self.down, silu_mul(self.gate_up(x)))

    def linears(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)

    def parameters(self) -> NamedParameters:
        yield from self.gate_up.parameters()
        yield from self.down.parameters()
