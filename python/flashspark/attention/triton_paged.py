"""The Triton backend: one launch for the whole batch, whatever its windows, and nothing read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspark.attention.interface import (
    AttentionBackend,
    AttentionCapabilities,
    BlockQueries,
    RaggedQueries,
)
from flashspark.kernels.qk_norm_rope import HeadTurn
from flashspark.kernels.triton.launch import is_interpreted
from flashspark.kernels.triton.paged_attention import block_attention, fits_a_tile, ragged_attention

# Programs that turn their own heads, at most. In steps of an H200 a layer of 36 takes 1.3 µs less so with one request,
# 1.1 with 32 of 8 rows, and a gap between launches less; with 128 it takes 7 more: four programs share a
# multiprocessor there, and what each does alone before its keys is not hidden.
MAX_TURNING_PROGRAMS = 384


class TritonBackend(AttentionBackend):
    """`AttentionBackend` over `kernels.triton.paged_attention`."""

    name = "triton"
    capabilities = AttentionCapabilities(
        supports_ragged_verify=True, supports_ragged_verify_graph=True, supports_draft_block=True
    )

    def __init__(self, device_type: str) -> None:
        """ValueError where the kernels cannot run; its message goes on behind the backend's name."""
        if device_type == "cpu" and not is_interpreted():
            raise ValueError(
                " needs a GPU: use torch_native on a CPU (or, to try the kernels out, run "
                "them under Triton's interpreter with TRITON_INTERPRET=1 in the environment)"
            )

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Nothing: kernels are compiled as they are captured, or called first."""

    def ragged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: RaggedQueries, scale: float
    ) -> Tensor:
        """See `AttentionBackend`."""
        return _ragged(q, None, k_cache, v_cache, queries, scale)

    def ragged_projected(
        self,
        heads: Tensor,
        turn: HeadTurn,
        k_cache: Tensor,
        v_cache: Tensor,
        queries: RaggedQueries,
        scale: float,
    ) -> Tensor:
        """See `AttentionBackend`. One launch for verify windows of few requests, two for many, and for prompts."""
        num_kv_heads = k_cache.shape[1]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        is_few = queries.host_lens is None and len(queries.page_table) * num_kv_heads <= MAX_TURNING_PROGRAMS
        if is_few and fits_a_tile(queries.max_rows or heads.shape[0], num_heads, num_kv_heads):
            return _ragged(heads, turn, k_cache, v_cache, queries, scale)
        return super().ragged_projected(heads, turn, k_cache, v_cache, queries, scale)

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
        """See `AttentionBackend`."""
        return block_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            queries.context_lens,
            queries.num_reqs,
            queries.page_table,
            queries.page_size,
            scale,
            causal,
            window,
        )


def _ragged(
    q: Tensor, turn: HeadTurn | None, k_cache: Tensor, v_cache: Tensor, queries: RaggedQueries, scale: float
) -> Tensor:
    return ragged_attention(
        q,
        k_cache,
        v_cache,
        queries.qo_indptr,
        queries.kv_lens,
        queries.num_reqs,
        queries.page_table,
        queries.page_size,
        scale,
        queries.max_rows or q.shape[0],
        is_prefill=queries.host_lens is not None,
        turn=turn,
    )
