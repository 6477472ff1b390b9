"""The drafts for training, blocks packed: one `Backbone`, and on it a convolution and a path selector (DFlash2), or a
Markov head and a confidence head (DSpark).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import AttentionWeights, Linear, Mlp, RmsNorm
from .settings import BackboneShape, DraftShape, DSparkShape
from .target_model import Embedding, Target


class BlockConvolution(nn.Module):
    """Dynamic depthwise convolution along the rows of a block; side 0 comes before the sublayer, side 1 after it."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        hidden = shape.target.hidden_size
        self.num_taps = shape.conv_kernel_size
        self.num_groups = hidden // shape.conv_group_size
        kernel = torch.zeros(2, self.num_taps, hidden)
        kernel[:, 0] = 1.0
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = Linear(hidden, 2 * self.num_taps * self.num_groups, 0.0)

    def offsets(self, x: Tensor) -> Tensor:
        """x [..., S, hidden] (the sublayer's normed input) -> [..., S, 2, taps, groups]."""
        return self.kernel_projection(x).unflatten(-1, (2, self.num_taps, self.num_groups))

    def forward(self, y: Tensor, offsets: Tensor, side: int) -> Tensor:
        """Convolve y [..., S, hidden] along S; a row's coefficients are its own, rows before the block are zero."""
        base = self.base_kernel[side].to(y.dtype).unflatten(-1, (self.num_groups, -1))
        out = torch.zeros_like(y)
        for tap in range(self.num_taps):
            shifted = F.pad(y, (0, 0, tap, 0))[..., : y.shape[-2], :]
            coefficients = (base[tap] + offsets[..., side, tap, :, None]).flatten(-2)
            out = out + coefficients * shifted
        return out


class CandidateSelector(nn.Module):
    """Scores of (predecessor, candidate) pairs, modulated by the row's hidden state."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        vocab, rank, hidden = shape.target.vocab_size, shape.selector_rank, shape.target.hidden_size
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.2)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = Linear(hidden, rank, hidden**-0.5)

    def forward(self, hidden: Tensor, predecessor: Tensor, candidates: Tensor) -> Tensor:
        """hidden [..., H], predecessor [...], candidates [..., K] -> scores [..., K] in float32."""
        key = F.embedding(predecessor, self.predecessor_codebook).to(hidden.dtype) * self.hidden_projection(
            hidden
        )
        rows = F.embedding(candidates, self.successor_codebook).to(hidden.dtype)
        return (rows @ key.unsqueeze(-1)).squeeze(-1).float()


class DraftLayer(nn.Module):
    """One draft layer over N blocks of S rows per sequence, each block reading its own prefix of the context."""

    def __init__(self, shape: BackboneShape, convolution: bool) -> None:
        super().__init__()
        target = shape.target
        self.input_layernorm = RmsNorm(target.hidden_size, target.rms_norm_eps)
        self.self_attn = AttentionWeights(target)
        self.post_attention_layernorm = RmsNorm(target.hidden_size, target.rms_norm_eps)
        self.mlp = Mlp(target.hidden_size, shape.intermediate_size)
        self.attention_conv = self.mlp_conv = None
        if convolution:
            assert isinstance(shape, DraftShape)
            self.attention_conv, self.mlp_conv = BlockConvolution(shape), BlockConvolution(shape)

    def forward(self, h: Tensor, context: Tensor, anchors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """h [B, N, S, H], context [B, L, H], anchors [B, N] (positions of the blocks' first rows)."""
        x = self.input_layernorm(h)
        if self.attention_conv is not None:
            offsets = self.attention_conv.offsets(x)
            x = self.attention_conv(x, offsets, 0)
        out = self._attend(x, context, anchors, cos, sin)
        if self.attention_conv is not None:
            out = self.attention_conv(out, offsets, 1)
        h = h + out
        x = self.post_attention_layernorm(h)
        if self.mlp_conv is None:
            return h + self.mlp(x)
        offsets = self.mlp_conv.offsets(x)
        return h + self.mlp_conv(self.mlp(self.mlp_conv(x, offsets, 0)), offsets, 1)

    def _attend(self, x: Tensor, context: Tensor, anchors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Softmax over the context before the anchor and the block's own rows, without a dense packed mask."""
        attention = self.self_attn
        batch, blocks, rows, _ = x.shape
        length, head_dim, groups = context.shape[1], attention.head_dim, attention.num_kv_heads
        shared = attention.num_heads // groups
        positions = anchors[..., None] + torch.arange(rows, device=x.device)
        q = attention.queries(x, cos[positions], sin[positions]) * head_dim**-0.5
        own_k, own_v = attention.keys_values(x, cos[positions], sin[positions])
        ctx_k, ctx_v = attention.keys_values(context, cos[:length], sin[:length])
        q = q.unflatten(3, (groups, shared)).permute(0, 3, 1, 4, 2, 5)  # [B, G, N, R, S, D]
        ctx = (
            (q.flatten(2, 4) @ ctx_k.permute(0, 2, 3, 1))
            .float()
            .view(batch, groups, blocks, shared * rows, length)
        )
        hidden = torch.arange(length, device=x.device) >= anchors[:, None, :, None, None]
        ctx = ctx.masked_fill(hidden, float("-inf"))
        own = (q.flatten(3, 4) @ own_k.permute(0, 3, 1, 4, 2)).float()  # [B, G, N, R * S, S]
        peak = torch.maximum(ctx.amax(-1, keepdim=True), own.amax(-1, keepdim=True)).detach()
        ctx, own = torch.exp(ctx - peak), torch.exp(own - peak)
        total = ctx.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
        from_ctx = (ctx / total).to(x.dtype).flatten(2, 3) @ ctx_v.transpose(1, 2)
        from_own = (own / total).to(x.dtype) @ own_v.permute(0, 3, 1, 2, 4)
        out = from_ctx.view(batch, groups, blocks, shared * rows, head_dim) + from_own
        out = out.unflatten(3, (shared, rows)).permute(0, 2, 4, 1, 3, 5)
        return attention.o_proj(out.reshape(batch, blocks, rows, -1))


class Backbone(nn.Module):
    """Fusion of the target's features, draft layers and final norm."""

    def __init__(self, shape: BackboneShape, convolution: bool) -> None:
        super().__init__()
        hidden, num_features = shape.target.hidden_size, len(shape.target_layer_ids)
        self.shape = shape
        self.fc = Linear(num_features * hidden, hidden, (num_features * hidden) ** -0.5)
        self.hidden_norm = RmsNorm(hidden, shape.target.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape, convolution) for _ in range(shape.num_hidden_layers))
        self.norm = RmsNorm(hidden, shape.target.rms_norm_eps)

    def block_hidden(self, target: Target, features: Tensor, anchor_ids: Tensor, anchors: Tensor) -> Tensor:
        """Final-normed hidden states [B, N, S, H] of the blocks that start at `anchors` [B, N].

        features [B, L, m * H]; those at an anchor's own position and behind it are never read by its block.
        """
        context = self.hidden_norm(self.fc(features))
        ids = anchor_ids.new_full((*anchor_ids.shape, self.shape.block_size), self.shape.mask_token_id)
        ids[..., 0] = anchor_ids
        h = target.embed(ids)
        for layer in self.layers:
            h = layer(h, context, anchors, target.cos, target.sin)
        return self.norm(h)


class DFlash2(Backbone):
    """Backbone with convolution and path selector."""

    shape: DraftShape

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape, convolution=True)
        self.candidate_selector = CandidateSelector(shape)


class MarkovHead(nn.Module):
    """Corrects a row's logits by what its predecessor is: a table of vectors and a map back to the vocabulary."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = Embedding(vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.2)
        self.markov_w2 = Linear(rank, vocab_size, 0.0)

    def embed(self, predecessor: Tensor, dtype: torch.dtype) -> Tensor:
        """[...] -> [..., r]."""
        return F.embedding(predecessor, self.markov_w1.weight).to(dtype)


class ConfidenceHead(nn.Module):
    """One float32 logit per row, from its hidden state and its predecessor's Markov vector."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """hidden [..., H], markov [..., r] -> [...]."""
        return self.proj(torch.cat((hidden, markov), dim=-1).float()).squeeze(-1)


class DSpark(Backbone):
    """Backbone with Markov head (vanilla) and confidence head."""

    shape: DSparkShape

    def __init__(self, shape: DSparkShape) -> None:
        super().__init__(shape, convolution=False)
        self.markov_head = MarkovHead(shape.target.vocab_size, shape.markov_rank)
        self.confidence_head = ConfidenceHead(shape.target.hidden_size, shape.markov_rank)

    def heads(self, hidden: Tensor, predecessor: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [..., H], predecessor [...], head [V, H] -> float32 logits [..., V] and confidence logits [...]."""
        markov = self.markov_head.embed(predecessor, hidden.dtype)
        logits = F.linear(hidden, head.to(hidden.dtype)) + self.markov_head.markov_w2(markov)
        return logits.float(), self.confidence_head(hidden, markov)
