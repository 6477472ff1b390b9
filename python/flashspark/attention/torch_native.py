"""The reference backend: one scaled-dot-product attention per request over its own slots, in plain torch.

It reads the index tensors on the host, so it is for the CPU (and for tests); nothing of it can be captured.
A request's slots are looked up once per step, and where its pages lie in one run, which they do until the pool
has been churned, its keys are a view of the cache instead of a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashspark.attention.interface import (
    AttentionBackend,
    AttentionCapabilities,
    BlockQueries,
    RaggedQueries,
)

MAX_ROWS_TO_FOLD = 32


@dataclass(frozen=True)
class _Span:
    """One request's part of a step: its query rows, and where its keys are."""

    first_row: int
    end_row: int
    num_keys: int
    first_slot: int  # of the run, when the pages lie in one
    slots: Tensor | None  # [num_keys], when they do not
    mask: (
        Tensor | None
    )  # additive [rows · group, num_keys (+ width)]; None: every key is visible, or `is_causal`
    group: int = 1  # query heads of one key head that are attended as its rows, row by row; 1: none
    is_causal: bool = False  # as many keys as rows, the usual triangle: no mask needed

    def rows(self, cache: Tensor) -> Tensor:
        """[num_keys, Hkv, D] of `cache`, in order of positions."""
        if self.slots is None:
            return cache[self.first_slot : self.first_slot + self.num_keys]
        return cache.index_select(0, self.slots)

    def keys(self, cache: Tensor) -> Tensor:
        """[1, Hkv, num_keys, D] of `cache` [num_slots, Hkv, D]."""
        if self.slots is not None:
            return _by_head(self.rows(cache))
        _, num_heads, head_dim = cache.shape
        row = num_heads * head_dim  # one call instead of three: the cache is contiguous
        return cache.as_strided(
            (1, num_heads, self.num_keys, head_dim), (0, head_dim, row, 1), self.first_slot * row
        )


class TorchNativeBackend(AttentionBackend):
    """`AttentionBackend` in torch; the numbers every other backend is held against."""

    name = "torch_native"
    capabilities = AttentionCapabilities(
        supports_ragged_verify=True, supports_ragged_verify_graph=False, supports_draft_block=True
    )

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Nothing to compile, and nothing refused."""

    def ragged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: RaggedQueries, scale: float
    ) -> Tensor:
        spans: list[_Span] | None = queries.plans.get("ragged")
        if spans is None:
            group = q.shape[1] // k_cache.shape[1]
            spans = queries.plans["ragged"] = _plan_ragged(queries, q.dtype, group)
        if len(spans) == 1 and spans[0].end_row == q.shape[0]:
            return _attend(q, spans[0].keys(k_cache), spans[0].keys(v_cache), spans[0], scale)
        outs = [
            _attend(q[span.first_row : span.end_row], span.keys(k_cache), span.keys(v_cache), span, scale)
            for span in spans
        ]
        num_rows = spans[-1].end_row if spans else 0
        if num_rows < q.shape[0]:
            outs.append(torch.zeros_like(q[num_rows:]))
        return torch.cat(outs)

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
        key = f"block {causal} {window}"
        spans: list[_Span] | None = queries.plans.get(key)
        if spans is None:
            group = q.shape[2] // k.shape[2]
            spans = queries.plans[key] = _plan_block(queries, q.dtype, causal, window, group)
        outs = []
        for r, span in enumerate(spans):
            keys = _by_head(torch.cat((span.rows(k_cache), k[r])))
            values = _by_head(torch.cat((span.rows(v_cache), v[r])))
            outs.append(_attend(q[r], keys, values, span, scale))
        outs += [torch.zeros_like(q[0])] * (len(q) - len(spans))
        return torch.stack(outs)


def _by_head(rows: Tensor) -> Tensor:
    """[n, Hkv, D] -> [1, Hkv, n, D]"""
    return rows.transpose(0, 1).unsqueeze(0)


def _attend(q: Tensor, keys: Tensor, values: Tensor, span: _Span, scale: float) -> Tensor:
    """`q` [rows, H, D] over `keys`, `values` [1, Hkv, n, D]: [rows, H, D].

    A short window's query heads of one key head become rows of that head: a call with 3 rows over 512 keys takes half
    the time of one in which torch repeats the keys.
    """
    if span.group > 1:
        num_rows, _, head_dim = q.shape
        num_kv_heads, num_folded = keys.shape[1], num_rows * span.group
        folded = q.view(num_rows, num_kv_heads, span.group, head_dim).transpose(0, 1)
        folded = folded.reshape(1, num_kv_heads, num_folded, head_dim)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=span.mask, scale=scale)
        return out.view(num_kv_heads, num_rows, span.group, head_dim).transpose(0, 1).flatten(1, 2)
    out = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=span.mask,
        is_causal=span.is_causal,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def _plan_ragged(queries: RaggedQueries, dtype: torch.dtype, group: int) -> list[_Span]:
    indptr = queries.qo_indptr.tolist()
    spans = []
    for r, num_keys in enumerate(_present(queries.kv_lens, queries.num_reqs)):
        num_rows = indptr[r + 1] - indptr[r]
        if num_rows == 0:
            continue
        mask = None
        is_causal = num_rows == num_keys > 1
        folded = 1 if is_causal or num_rows > MAX_ROWS_TO_FOLD else group
        if 1 < num_rows < num_keys:  # row i of n sees all keys but the last n - 1 - i
            visible = torch.ones(num_rows, num_keys, dtype=torch.bool).tril_(num_keys - num_rows)
            mask = _additive(visible, dtype, folded)
        spans.append(_span(queries, r, indptr[r], indptr[r + 1], num_keys, mask, folded, is_causal))
    return spans


def _plan_block(
    queries: BlockQueries, dtype: torch.dtype, causal: bool, window: int | None, group: int
) -> list[_Span]:
    width = queries.width
    folded = group if width <= MAX_ROWS_TO_FOLD else 1
    spans = []
    for r, num_keys in enumerate(_present(queries.context_lens, queries.num_reqs)):
        mask = None
        if causal or (window is not None and num_keys + width > window):
            distance = torch.arange(num_keys, num_keys + width).unsqueeze(1) - torch.arange(num_keys + width)
            visible = torch.ones_like(distance, dtype=torch.bool)
            if causal:
                visible &= distance >= 0
            if window is not None:
                visible &= distance < window
            mask = _additive(visible, dtype, folded)
        spans.append(_span(queries, r, r * width, (r + 1) * width, num_keys, mask, folded))
    return spans


def _present(lens: Tensor, num_reqs: Tensor | None) -> list[int]:
    return lens.tolist()[: len(lens) if num_reqs is None else int(num_reqs)]


def _additive(visible: Tensor, dtype: torch.dtype, group: int) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return mask if group == 1 else mask.repeat_interleave(group, dim=0)


def _span(
    queries: RaggedQueries | BlockQueries,
    r: int,
    first_row: int,
    end_row: int,
    num_keys: int,
    mask: Tensor | None,
    group: int,
    is_causal: bool = False,
) -> _Span:
    size = queries.page_size
    num_pages = -(-num_keys // size)
    pages: list[int] = queries.page_table[r, :num_pages].tolist()
    first_slot = pages[0] * size if pages else 0
    slots = None
    if any(page != pages[0] + i for i, page in enumerate(pages)):
        table = queries.page_table[r, :num_pages].unsqueeze(1) * size
        offsets = torch.arange(size)
        slots = (table + offsets).view(-1)[:num_keys]
    return _Span(first_row, end_row, num_keys, first_slot, slots, mask, group, is_causal)
