"""Which shapes the pair is widened to, and which small channel, head or layer each big one is a copy of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

SPARE = -1  # in an index of sources: a copy of nothing


@dataclass(frozen=True)
class Geometry:
    """The shape of a widened target, and of what its drafts have beyond it. Head dimension is the small pair's."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    target_places: tuple[int, ...]  # where the small target's layers stand; the others are neutral
    target_layer_ids: tuple[int, ...]  # the layers whose hidden states the drafts get
    num_draft_layers: int = 5
    rank: int = 256  # of the selector and of the Markov head


# Shapes as in the config.json of Qwen3-4B, -8B and -14B; tapped layers as in published drafts of 5 layers, from layer 1
# to the third last at equal distances. Each real layer of the target stands right before the first tap that shows it.
_PLACES_OF_36, _TAPS_OF_36 = (0, 1, 5, 9, 21, 25, 35), (1, 9, 17, 25, 33)
GEOMETRIES = {
    "qwen3-4b": Geometry(2560, 32, 8, 9728, 36, 151_936, _PLACES_OF_36, _TAPS_OF_36),
    "qwen3-8b": Geometry(4096, 32, 8, 12288, 36, 151_936, _PLACES_OF_36, _TAPS_OF_36),
    "qwen3-14b": Geometry(5120, 40, 8, 17408, 40, 151_936, (0, 1, 5, 10, 24, 28, 39), (1, 10, 19, 28, 37)),
    # For a CPU: 3 tiles and 16 spare channels, groups of 5 over 2, uneven copies of the MLP's channels.
    "tiny": Geometry(784, 10, 2, 2000, 10, 6000, (0, 1, 2, 4, 6, 7, 9), (1, 4, 5, 7, 8)),
}


def places_of(num_small: int, num_big: int) -> tuple[int, ...]:
    """Where `num_small` layers stand among `num_big`, evenly: 2 of 5 at 1 and 3."""
    return tuple((2 * i + 1) * num_big // (2 * num_small) for i in range(num_small))


@dataclass(frozen=True)
class Tiling:
    """The wide residual stream of `big` channels: gamma times the small one, `num_tiles` times over, then one constant
    channel and zeros.

    A norm over it gives the small norm's output divided by `rho`, exactly: the constant makes up for the larger energy
    that its epsilon is compared with.
    """

    small: int
    big: int
    eps: float
    gamma: float = 2.0  # a power of two: bfloat16 embeddings stay exact

    @property
    def num_tiles(self) -> int:
        return (self.big - 1) // self.small

    @property
    def constant_channel(self) -> int:
        return self.num_tiles * self.small

    @property
    def rho(self) -> float:
        return math.sqrt(self.constant_channel / self.big)

    @property
    def constant(self) -> float:
        return math.sqrt(self.big * self.eps * ((self.gamma * self.rho) ** 2 - 1))

    @cached_property
    def sources(self) -> Tensor:
        """int64 [big]: the small channel of each, `SPARE` behind the tiles."""
        channels = torch.arange(self.big)
        return torch.where(channels < self.constant_channel, channels % self.small, SPARE)


def head_channels(heads: Sequence[int], head_dim: int) -> Tensor:
    """int64 [len(heads) * head_dim]: the channels of these heads, one after the other."""
    return (torch.tensor(heads)[:, None] * head_dim + torch.arange(head_dim)).flatten()


def kv_head_sources(num_kv_heads: int, small_kv_heads: int) -> list[int]:
    """The small key-value head of each big one."""
    return [j % small_kv_heads for j in range(num_kv_heads)]


def query_head_sources(num_heads: int, num_kv_heads: int, small_heads: int, small_kv_heads: int) -> list[int]:
    """The small query head of each big one: of the small group that its key-value head is a copy of."""
    group, small_group = num_heads // num_kv_heads, small_heads // small_kv_heads
    return [(p // group) % small_kv_heads * small_group + p % small_group for p in range(num_heads)]


def shown_taps(geometry: Geometry, small_taps: Sequence[int]) -> list[int]:
    """For each tap of the wide target, which of `small_taps` (by place in the list) it shows."""
    shown = []
    for tap in geometry.target_layer_ids:
        layer = sum(place <= tap for place in geometry.target_places) - 1
        if layer not in small_taps:
            raise ValueError(
                f"layer {tap} shows layer {layer} of the small target, which its drafts never saw"
            )
        shown.append(list(small_taps).index(layer))
    if set(shown) != set(range(len(small_taps))):
        raise ValueError(
            f"target_layer_ids {geometry.target_layer_ids} do not show all of {list(small_taps)}"
        )
    return shown


def check_geometry(geometry: Geometry, small: dict[str, Any], conv_group_size: int) -> None:
    """ValueError where the small target (its config.json) cannot be widened to `geometry`."""
    hidden, heads, kv_heads = (
        small[f"{n}"] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    big_heads, big_kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
    places = geometry.target_places
    problems = {
        f"hidden_size {geometry.hidden_size} must be above {2 * hidden}": geometry.hidden_size <= 2 * hidden,
        f"hidden_size must be a multiple of the convolution's groups of {conv_group_size}": bool(
            geometry.hidden_size % conv_group_size
        ),
        "num_key_value_heads must divide num_attention_heads": bool(big_heads % big_kv_heads),
        f"num_key_value_heads must be at least {kv_heads}": big_kv_heads < kv_heads,
        "query heads per key-value head must not be fewer": big_heads // big_kv_heads < heads // kv_heads,
        "intermediate_size must not be smaller": geometry.intermediate_size < small["intermediate_size"],
        "vocab_size must be larger": geometry.vocab_size <= small["vocab_size"],
        f"target_places must be {small['num_hidden_layers']} ascending layers from 0 on": (
            list(places) != sorted(set(places))
            or len(places) != small["num_hidden_layers"]
            or places[0] != 0
            or places[-1] >= geometry.num_hidden_layers
        ),
    }
    wrong = [message for message, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise ValueError(f"the pair cannot be widened so: {'; '.join(wrong)}")
