"""Where the keys and values of all committed tokens live."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Per layer one key and one value cache `[num_slots, num_kv_heads, head_dim]`; owns its memory, not the slots.

    Which slot belongs to whom is the scheduler's business. A cache starts as zeros: slots never written are read
    by nobody, yet a masked product with them must stay finite.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_slots, num_kv_heads, head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.num_slots = num_slots

    @staticmethod
    def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory of one token, keys and values of all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores `k`, `v` [M, num_kv_heads, head_dim] at `slots` [M] int64. Of equal slots one row wins, any."""
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)
