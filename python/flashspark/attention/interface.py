"""What an attention backend is given, what it gives back, and what it declares it can do.

KV caches are `[num_slots, num_kv_heads, head_dim]`; slot = page id * page_size + offset. Page 0 is scratch:
padding rows write there and nobody reads it. A call has at least one request. All index tensors are int64 on
the model's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flashspark.kernels.qk_norm_rope import HeadTurn, qk_norm_rope_write


@dataclass(frozen=True)
class RaggedQueries:
    """Packed query rows of R requests: a prefill chunk or a verify window each, causal, bottom-right aligned.

    Row i of request r sits at `positions`, its own K/V is already written at `slots` when attention runs, and
    the request's last row sees `kv_lens[r]` keys. Rows past the last request's are padding: attention leaves their
    output undefined but finite. Absent slots, from `num_reqs` on, may hold anything.
    """

    positions: Tensor  # [M]
    slots: Tensor  # [M]
    qo_indptr: Tensor  # [R + 1]
    kv_lens: Tensor  # [R]
    page_table: Tensor  # [R, max_pages]
    page_size: int
    max_rows: int | None = None  # no request has more rows, if the caller knows a bound below M
    num_reqs: Tensor | None = None  # how many of the R slots are there, one integer on the device; None: all
    # Rows and keys of each request where the host knows them, as it does of prefill: a backend that plans on the host
    # then waits for nothing. Not with `num_reqs`.
    host_lens: tuple[Sequence[int], Sequence[int]] | None = None
    # What a backend works out from the index tensors once per step and shares over the layers, by its own keys.
    plans: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class BlockQueries:
    """One draft block of `width` rows for each of R requests over their committed context.

    Row j of request r sits at position `context_lens[r] + j`. The block's own K/V are handed over beside the
    cache and never enter it; context keys are the slots of positions `0 … context_lens[r] - 1`.
    """

    context_lens: Tensor  # [R]
    page_table: Tensor  # [R, max_pages]
    page_size: int
    width: int
    num_reqs: Tensor | None = None  # as in `RaggedQueries`; absent blocks come out undefined but finite
    plans: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # as in `RaggedQueries`


@dataclass(frozen=True)
class AttentionCapabilities:
    """What start-up checks ask before a mode is accepted."""

    supports_ragged_verify: bool  # windows whose lengths are decided on the device
    supports_ragged_verify_graph: bool  # captured, and replayed over other lengths
    supports_draft_block: bool


class AttentionBackend(Protocol):
    """One implementation of both attentions. Between calls it keeps scratch memory, and the `plans` of the queries."""

    name: str
    capabilities: AttentionCapabilities

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """At start-up, before any call for such heads: compiles what a first call should not wait for.

        Raises:
            ValueError: heads or a type that it cannot run, or what it is missing here; with the remedy.
        """
        ...

    def ragged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: RaggedQueries, scale: float
    ) -> Tensor:
        """`q` [M, num_heads, head_dim] -> output of the same shape; grouped-query when heads differ."""
        ...

    def ragged_projected(
        self,
        heads: Tensor,
        turn: HeadTurn,
        k_cache: Tensor,
        v_cache: Tensor,
        queries: RaggedQueries,
        scale: float,
    ) -> Tensor:
        """As `ragged`, of `heads` [M, num_heads + 2 * num_kv_heads, head_dim] as they come out of the projection.

        What `kernels.qk_norm_rope.qk_norm_rope_write` does is done first: keys and values need not be at
        `queries.slots` before, and are after. Rows of padding may be written there or not. Here it is a launch
        of its own, for backends that have nothing better.
        """
        q = qk_norm_rope_write(heads, *turn, queries.slots, k_cache, v_cache)
        return self.ragged(q, k_cache, v_cache, queries, scale)

    def block(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        queries: BlockQueries,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        """`q` [R, width, num_heads, head_dim], `k`/`v` [R, width, num_kv_heads, head_dim] -> shape of `q`.

        A key is visible iff it is context or, when `causal`, not later in the block than the query; with a
        `window`, additionally iff query position - key position < window.
        """
        ...
