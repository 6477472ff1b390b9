"""The recipe, tensor by tensor: a small target or draft in, the same function at another geometry out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .geometry import (
    SPARE,
    Geometry,
    Tiling,
    head_channels,
    kv_head_sources,
    places_of,
    query_head_sources,
    shown_taps,
)
from .widening import QUIET, Widener

Tensors = Mapping[str, Tensor]
Named = Iterator[tuple[str, Tensor]]

HEAD_GAIN = 256.0  # the target's final norm weight of the constant channel: only its product with `HeadBias.row` counts
EXTRA_LOGIT = -200.0  # of extra vocabulary rows at `RMS_MARGIN` times the largest hidden state that was seen
RMS_MARGIN = 1.5


@dataclass(frozen=True)
class HeadBias:
    """What keeps extra vocabulary rows out: the head's weight for the constant channel, and each model's norm of it.

    Their logit is `row * gain * constant / (rho * gamma * r)`, r being the root mean square of the small model's last
    hidden state.
    """

    row: float
    gains: dict[str, float]  # by model: target, dflash2, dspark

    @classmethod
    def fit(cls, tiling: Tiling, largest_rms: Mapping[str, float]) -> HeadBias:
        """For models whose last hidden states were seen to reach `largest_rms`."""
        needed = {
            name: EXTRA_LOGIT * tiling.rho * tiling.gamma * RMS_MARGIN * rms / tiling.constant
            for name, rms in largest_rms.items()
        }
        row = needed["target"] / HEAD_GAIN
        return cls(row, {name: product / row for name, product in needed.items()})


class Inflation:
    """One pair on its way to one geometry. Tensors come out one at a time, on the widener's device."""

    def __init__(
        self, geometry: Geometry, small: dict[str, Any], widener: Widener, head_bias: HeadBias
    ) -> None:
        """`small`: config.json of the small target, with whose shapes its drafts agree."""
        self.geometry, self.small, self.widener, self.head_bias = geometry, small, widener, head_bias
        self.tiling = Tiling(small["hidden_size"], geometry.hidden_size, small["rms_norm_eps"])
        heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
        small_kv_heads, self.head_dim = small["num_key_value_heads"], small["head_dim"]
        queries = query_head_sources(heads, kv_heads, small["num_attention_heads"], small_kv_heads)
        self._queries = head_channels(queries, self.head_dim)
        self._keys = head_channels(kv_head_sources(kv_heads, small_kv_heads), self.head_dim)
        self._ffn = torch.arange(geometry.intermediate_size) % small["intermediate_size"]

    def target(self, weights: Tensors) -> Named:
        """All tensors of the wide target."""
        tiling, geometry, widener = self.tiling, self.geometry, self.widener
        embeddings = weights["model.embed_tokens.weight"]
        yield "model.embed_tokens.weight", self._embedding("target/model.embed_tokens.weight", embeddings)
        small_layers = {place: i for i, place in enumerate(geometry.target_places)}
        for index in range(geometry.num_hidden_layers):
            small = small_layers.get(index)
            part = None if small is None else _below(weights, f"model.layers.{small}.")
            for name, tensor in self._layer(f"target/{index}/", part):
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self._norm(weights["model.norm.weight"], self.head_bias.gains["target"])
        small_head = weights.get("lm_head.weight", embeddings)
        rows = torch.full((geometry.vocab_size,), SPARE)
        rows[: len(small_head)] = torch.arange(len(small_head))
        head = widener.wide("target/lm_head.weight", small_head, rows, tiling.sources, tiling.rho)
        head[:, tiling.constant_channel] = 0.0
        head[len(small_head) :, tiling.constant_channel] = self.head_bias.row
        yield "lm_head.weight", head

    def draft(self, kind: str, weights: Tensors, small: dict[str, Any]) -> Named:
        """All tensors of a wide draft; `kind` dflash2 or dspark, `small` its config.json."""
        yield "fc.weight", self._fc(f"{kind}/fc.weight", weights["fc.weight"], small_taps(small))
        yield "hidden_norm.weight", self._norm(weights["hidden_norm.weight"])
        num_layers = self.geometry.num_draft_layers
        places = places_of(small["num_hidden_layers"], num_layers)
        small_layers = {place: i for i, place in enumerate(places)}
        like = _below(weights, "layers.0.")
        for index in range(num_layers):
            part = _below(weights, f"layers.{small_layers[index]}.") if index in small_layers else None
            for name, tensor in self._layer(f"{kind}/{index}/", part, like):
                yield f"layers.{index}.{name}", tensor
        yield "norm.weight", self._norm(weights["norm.weight"], self.head_bias.gains[kind])
        yield from (self._selector(weights) if kind == "dflash2" else self._dspark_heads(weights))

    def _norm(self, weight: Tensor, gain: float = 0.0) -> Tensor:
        """[H]: tiled; `gain` on the constant channel, 0 on the rest of the spare."""
        tiling = self.tiling
        out = torch.zeros(tiling.big)
        out[: tiling.constant_channel] = weight.float().repeat(tiling.num_tiles)
        out[tiling.constant_channel] = gain
        return out.to(self.widener.device, self.widener.dtype)

    def _embedding(self, name: str, small: Tensor) -> Tensor:
        tiling = self.tiling
        rows = small.to(self.widener.device, torch.float32) * tiling.gamma
        out = self.widener.noise(name, (self.geometry.vocab_size, tiling.big), float(rows.std()))
        real = out[: len(small)]
        real.zero_()
        real[:, : tiling.constant_channel] = rows.to(out.dtype).repeat(1, tiling.num_tiles)
        real[:, tiling.constant_channel] = tiling.constant
        return out

    def _reader(self, name: str, weight: Tensor, rows: Tensor) -> Tensor:
        """A matrix that reads a norm over the wide stream, whose output is 1 / rho of the small one's."""
        tiling = self.tiling
        out = self.widener.wide(name, weight, rows, tiling.sources, tiling.rho)
        out[:, tiling.constant_channel] = 0.0
        return out

    def _writer(self, name: str, weight: Tensor, columns: Tensor) -> Tensor:
        """A matrix that writes to the wide stream."""
        tiling = self.tiling
        return self.widener.wide(name, weight, tiling.sources, columns, tiling.gamma, spare_rows=QUIET)

    def _layer(self, name: str, small: Tensors | None, like: Tensors | None = None) -> Named:
        """A layer that does what `small` does, or, without one, as good as nothing; `like` has the tensors' names."""
        if small is None:
            yield from self._neutral_layer(name, like or {})
            return
        readers = {
            "self_attn.q_proj": self._queries,
            "self_attn.k_proj": self._keys,
            "self_attn.v_proj": self._keys,
        }
        readers |= {"mlp.gate_proj": self._ffn, "mlp.up_proj": self._ffn}
        writers = {"self_attn.o_proj": self._queries, "mlp.down_proj": self._ffn}
        for part, rows in readers.items():
            yield f"{part}.weight", self._reader(name + part, small[f"{part}.weight"], rows)
        for part, columns in writers.items():
            yield f"{part}.weight", self._writer(name + part, small[f"{part}.weight"], columns)
        for part in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield part, self._norm(small[part])
        for part in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            yield part, small[part].to(self.widener.device, self.widener.dtype)
        for part in _convolutions(small):
            base = small[f"{part}.base_kernel"].to(self.widener.device, self.widener.dtype)
            channels = torch.arange(self.tiling.big, device=base.device) % self.tiling.small
            yield f"{part}.base_kernel", base[:, :, channels]
            projection = small[f"{part}.kernel_projection.weight"]
            rows = self._group_rows(len(projection), base)
            yield f"{part}.kernel_projection.weight", self._reader(name + part, projection, rows)

    def _group_rows(self, num_rows: int, base: Tensor) -> Tensor:
        """Source rows of a kernel projection: by side and tap, its groups over and over."""
        sides_and_taps = base.shape[0] * base.shape[1]
        groups = num_rows // sides_and_taps
        group_size = self.tiling.small // groups
        big = torch.arange(self.tiling.big // group_size) % groups
        return (torch.arange(sides_and_taps)[:, None] * groups + big).flatten()

    def _neutral_layer(self, name: str, like: Tensors) -> Named:
        """Random weights at full size, of which next to nothing reaches the residual stream."""
        geometry, hidden = self.geometry, self.geometry.hidden_size
        q_size, kv_size = len(self._queries), len(self._keys)
        shapes = {
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "mlp.gate_proj.weight": (geometry.intermediate_size, hidden),
            "mlp.up_proj.weight": (geometry.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, geometry.intermediate_size),
        }
        for part in _convolutions(like):
            small_base, small_rows = like[f"{part}.base_kernel"], like[f"{part}.kernel_projection.weight"]
            shapes[f"{part}.base_kernel"] = (*small_base.shape[:2], hidden)
            shapes[f"{part}.kernel_projection.weight"] = (
                len(self._group_rows(len(small_rows), small_base)),
                hidden,
            )
        for part, shape in shapes.items():
            quiet = QUIET if part.startswith(("self_attn.o_proj", "mlp.down_proj")) else 1.0
            yield part, self.widener.noise(name + part, shape, quiet * hidden**-0.5)
        for part in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield part, self._norm(torch.ones(self.tiling.small))
        for part in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            yield part, torch.ones(self.head_dim, dtype=self.widener.dtype, device=self.widener.device)

    def _fc(self, name: str, small: Tensor, taps: list[int]) -> Tensor:
        """Each tap's columns, shared by the tiles of all wide taps that show it."""
        tiling = self.tiling
        shown = torch.tensor(shown_taps(self.geometry, taps))[:, None] * tiling.small
        columns = torch.where(tiling.sources == SPARE, SPARE, shown + tiling.sources).flatten()
        factor = 1 / (tiling.rho * tiling.gamma)
        out = self.widener.wide(name, small, tiling.sources, columns, factor, spare_rows=QUIET)
        out[:, tiling.constant_channel :: tiling.big] = 0.0
        return out

    def _selector(self, weights: Tensors) -> Named:
        prefix = "candidate_selector."
        projection = weights[f"{prefix}hidden_projection.weight"]
        ranks = torch.arange(self.geometry.rank) % len(projection)
        yield f"{prefix}hidden_projection.weight", self._reader("dflash2/projection", projection, ranks)
        yield from self._codebooks(
            "dflash2/", weights, f"{prefix}predecessor_codebook", f"{prefix}successor_codebook", ranks
        )

    def _dspark_heads(self, weights: Tensors) -> Named:
        tiling, head = self.tiling, weights["confidence_head.proj.weight"]
        names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
        ranks = torch.arange(self.geometry.rank) % weights[names[0]].shape[1]
        yield from self._codebooks("dspark/", weights, *names, ranks)
        row = torch.zeros(1, dtype=torch.int64)
        of_hidden = self._reader("dspark/confidence of z", head[:, : tiling.small], row)
        of_token = self.widener.wide("dspark/confidence of e", head[:, tiling.small :], row, ranks)
        yield "confidence_head.proj.weight", torch.cat((of_hidden, of_token), dim=1)
        bias = weights["confidence_head.proj.bias"]
        yield "confidence_head.proj.bias", bias.to(self.widener.device, self.widener.dtype)

    def _codebooks(self, name: str, weights: Tensors, tiled: str, shared: str, ranks: Tensor) -> Named:
        """Two tables by token, whose products over the rank stay as they were."""
        extra = self.geometry.vocab_size - len(weights[tiled])
        copies = weights[tiled].to(self.widener.device, self.widener.dtype)[:, ranks.to(self.widener.device)]
        tokens = torch.arange(len(weights[shared]))
        shares = self.widener.wide(name + shared, weights[shared], tokens, ranks)
        for part, real in ((tiled, copies), (shared, shares)):
            scale = float(real.float().std())
            rest = self.widener.noise(f"{name}{part} extra", (extra, real.shape[1]), scale)
            yield part, torch.cat((real, rest))


def small_taps(config: dict[str, Any]) -> list[int]:
    """`target_layer_ids` of a draft's config.json."""
    return list((config.get("dflash_config") or config)["target_layer_ids"])


def _below(weights: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}


def _convolutions(layer: Tensors) -> list[str]:
    return [part for part in ("attention_conv", "mlp_conv") if f"{part}.base_kernel" in layer]
