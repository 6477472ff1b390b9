"""The token table and the output head, tied or not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from flashspark.kernels.half_linear import HalfWeight, half_linear, pack_half
from flashspark.kernels.matmul import matmul
from flashspark.layers.parameters import NamedParameters, Parameter

# A tied table below this is kept a second time, transposed, for the head: 3 times faster with one row on a CPU.
TRANSPOSED_COPY_BYTES = 64 << 20


class TokenTables:
    """`embed` looks rows up in `[V, H]`; `logits` multiplies with the head, the same table where they are tied."""

    def __init__(
        self, vocab_size: int, hidden: int, tied: bool, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.tied = tied
        self.table = torch.empty(vocab_size, hidden, dtype=dtype, device=device)
        self.head: Tensor | None = None  # [H, V]
        if self.table.device.type != "cpu":  # as in the file
            self.head = None if tied else torch.empty(vocab_size, hidden, dtype=dtype, device=device).t()
        elif not tied or self.table.nbytes <= TRANSPOSED_COPY_BYTES:
            self.head = torch.empty(hidden, vocab_size, dtype=dtype, device=device)
        self._half_head: HalfWeight | None = None

    def hold_half(self) -> None:
        """Holds the loaded head in half precision where `kernels.half_linear` can."""
        self._half_head = pack_half(self.table if self.tied or self.head is None else self.head.t())
        if self._half_head is not None:
            self.head = None

    def embed(self, ids: Tensor) -> Tensor:
        """`ids` int64 of any shape S -> S + [H]."""
        return embedding(ids, self.table)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`hidden` [..., H] -> [..., V] float32; on a GPU into `out` [rows, V], where it is given."""
        if hidden.device.type != "cpu":
            return self._gpu_logits(hidden, out)
        if self._half_head is not None:
            return half_linear(hidden, self._half_head)
        if self.head is None:
            return linear(hidden, self.table).float()
        return torch.matmul(hidden, self.head).float()

    @property
    def head_weight(self) -> Tensor:
        """[H, V], of a device that holds it."""
        return self.table.t() if self.head is None else self.head

    def _gpu_logits(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        """Float32 straight from the product: rounded to half precision, neighbouring logits would tie."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if out is None:
            out = rows.new_empty(rows.shape[0], self.table.shape[0], dtype=torch.float32)
        return matmul(rows, self.head_weight, out).view(*hidden.shape[:-1], -1)

    def parameters(self, embed_name: str, head_name: str) -> NamedParameters:
        shape = tuple(self.table.shape)
        views = (self.table,) if self.head is None or not self.tied else (self.table, self.head.t())
        yield embed_name, Parameter(shape, views)
        if not self.tied and self.head is not None:
            yield head_name, Parameter(shape, (self.head.t(),))
