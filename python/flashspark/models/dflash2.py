"""DFlash2: DFlash with dynamic convolutions inside the block and a selector that walks the candidates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashspark.attention.interface import AttentionBackend, BlockQueries
from flashspark.attention.kv_pool import KVPool
from flashspark.kernels.block_conv import block_conv, conv_coefficients, dynamic_block_conv
from flashspark.kernels.dispatch import runs_triton
from flashspark.layers.linear import Linear
from flashspark.layers.parameters import NamedParameters, Parameter, prefixed
from flashspark.layers.residual import ResidualStream
from flashspark.layers.rotary import RopeTables
from flashspark.models.config import DraftConfig
from flashspark.models.dflash import DFlashDraft, DFlashLayer


class BlockConv:
    """The convolutions before and after one sublayer; their coefficients come from the sublayer's input."""

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        hidden, taps = config.hidden_size, config.conv_kernel_size
        self.base = torch.empty(2, taps, hidden, dtype=dtype, device=device)
        size = 2 * taps * (hidden // config.conv_group_size)
        self.projection = Linear(hidden, {"kernel_projection": size}, dtype=dtype, device=device)

    def before(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """`x` [R, B, H] after its norm -> what the sublayer gets, and the convolution of what it returns, which takes
        that and the residual stream and gives the new stream."""
        delta = self.projection(x)
        if runs_triton(x):
            inner = dynamic_block_conv(x, self.base, delta, 0)
            return inner, lambda y, residual: dynamic_block_conv(y, self.base, delta, 1, residual)
        before, after = conv_coefficients(self.base, delta)  # of both sides at once
        return block_conv(x, before), lambda y, residual: block_conv(y, after, residual)

    def parameters(self) -> NamedParameters:
        yield "base_kernel", Parameter(tuple(self.base.shape), (self.base,))
        yield from self.projection.parameters()


class DFlash2Layer(DFlashLayer):
    """A DFlash layer with a convolution around each sublayer."""

    def __init__(
        self, config: DraftConfig, index: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(config, index, dtype=dtype, device=device)
        self.attention_conv = BlockConv(config, dtype=dtype, device=device)
        self.mlp_conv = BlockConv(config, dtype=dtype, device=device)

    def __call__(
        self,
        stream: ResidualStream,
        rope: RopeTables,
        block: BlockQueries,
        pool: KVPool,
        backend: AttentionBackend,
    ) -> None:
        """As `DFlashLayer`; the convolution after a sublayer comes before its residual is added."""
        inner, after = self.attention_conv.before(stream.normed(self.input_norm))
        inner = self.attention.output(self.attend(inner, rope, block, pool, backend))
        stream.replace(after(inner, stream.value))
        inner, after = self.mlp_conv.before(stream.normed(self.post_attention_norm))
        stream.replace(after(self.mlp(inner), stream.value))

    def parameters(self) -> NamedParameters:
        yield from super().parameters()
        yield from prefixed("attention_conv", self.attention_conv.parameters())
        yield from prefixed("mlp_conv", self.mlp_conv.parameters())


class Selector:
    """Weights of the pair scores between neighbouring candidates; the walk is `kernels.selector`."""

    def __init__(
        self, config: DraftConfig, vocab_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        rank = config.selector_rank
        self.top_k = config.selector_top_k
        self.predecessor_codebook = torch.empty(vocab_size, rank, dtype=dtype, device=device)
        self.successor_codebook = torch.empty(vocab_size, rank, dtype=dtype, device=device)
        self.hidden_projection = Linear(
            config.hidden_size, {"hidden_projection": rank}, dtype=dtype, device=device
        )

    def project(self, z: Tensor) -> Tensor:
        """`z` [..., H] -> [..., r]."""
        return self.hidden_projection(z)

    def parameters(self) -> NamedParameters:
        for name, codebook in (
            ("predecessor_codebook", self.predecessor_codebook),
            ("successor_codebook", self.successor_codebook),
        ):
            yield name, Parameter(tuple(codebook.shape), (codebook,))
        yield from self.hidden_projection.parameters()


class DFlash2Draft(DFlashDraft):
    """DFlash with `selector` and convolving layers."""

    layer_class = DFlash2Layer

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, dtype=dtype, device=device)
        if config.vocab_size is None:
            raise ValueError("a DFlash2 draft is built for a vocabulary: set vocab_size (the target's)")
        self.selector = Selector(config, config.vocab_size, dtype=dtype, device=device)

    def parameters(self) -> NamedParameters:
        yield from super().parameters()
        yield from prefixed("candidate_selector", self.selector.parameters())
