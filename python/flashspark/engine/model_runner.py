"""Runs the target and the draft over the running requests' KV pools. Owns the pools, decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashspark.attention.interface import AttentionBackend, BlockQueries, RaggedQueries
from flashspark.attention.kv_pool import KVPool
from flashspark.kernels.draft_inputs import draft_inputs
from flashspark.kernels.matmul_choice import Group, choose
from flashspark.models.dflash import DFlashDraft
from flashspark.models.qwen3 import Qwen3
from flashspark.upload import upload

from .request_rows import RequestRows


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive known tokens of one request, from position `start` on."""

    row: int
    start: int
    token_ids: Sequence[int]


class ModelRunner:
    """Target, optional draft, their KV pools (same slot ids) and the request rows."""

    def __init__(
        self,
        target: Qwen3,
        draft: DFlashDraft | None,
        request_rows: RequestRows,
        num_slots: int,
        backend: AttentionBackend,
        draft_backend: AttentionBackend,
        prefill_backend: AttentionBackend | None = None,
    ) -> None:
        """`backend` verifies, and without a `prefill_backend` runs prefill too."""
        self.target, self.draft, self.request_rows = target, draft, request_rows
        self._backend, self._draft_backend = backend, draft_backend
        self._prefill_backend = prefill_backend or backend
        self.device = request_rows.context_lens.device
        self.target_pool = target.make_kv_pool(num_slots)
        self.draft_pool: KVPool | None = draft.make_kv_pool(num_slots) if draft else None
        self._capture_layers = draft.config.target_layer_ids if draft else ()

    @property
    def verify_backend(self) -> AttentionBackend:
        """What the target's attention runs on in decode steps; start-up checks ask what it can do."""
        return self._backend

    @property
    def prefill_backend(self) -> AttentionBackend:
        """The same of prefill."""
        return self._prefill_backend

    @property
    def draft_backend(self) -> AttentionBackend:
        """The same of the draft's."""
        return self._draft_backend

    def choose_matmuls(self, row_counts: Sequence[int], logits: Tensor | None) -> int:
        """Measures how products of these numbers of rows are made (`kernels.matmul_choice`); how many under load.

        `logits`: float32 [rows, V], written over; None: the head is left as it is.
        """
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for model in (self.target, self.draft):
            for linear in () if model is None else model.linears():
                if linear.weight is not None and linear.bias is None:
                    by_shape.setdefault(tuple(linear.weight.shape), []).append(linear.weight)
        groups: list[Group] = [(weights, None) for weights in by_shape.values()]
        if logits is not None:
            groups.append(([self.target.tables.head_weight], logits))
        return choose(groups, row_counts)

    def prefill(self, chunks: Sequence[PrefillChunk], reads_hidden: bool = False) -> Tensor | None:
        """Writes target K/V and draft context K/V of the chunks; pages must have been set. Advances no length.

        Returns:
            Where `reads_hidden`, the target's final-normed hidden states [M, H], the chunks' tokens one after the
            other.
        """
        num_rows = [len(chunk.token_ids) for chunk in chunks]
        rows = upload([chunk.row for chunk in chunks], self.device)
        lens = upload(num_rows, self.device)
        starts = upload([chunk.start for chunk in chunks], self.device)
        num_tokens = sum(num_rows)
        qo_indptr = torch.zeros(len(chunks) + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(lens, 0, out=qo_indptr[1:])
        request = torch.repeat_interleave(lens, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=self.device) - qo_indptr[request] + starts[request]
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        queries = RaggedQueries(
            positions=positions,
            slots=self.request_rows.slots(rows[request], positions),
            qo_indptr=qo_indptr,
            kv_lens=starts + lens,
            page_table=self.request_rows.page_table[rows],
            page_size=self.request_rows.page_size,
            max_rows=max(num_rows),
            host_lens=(num_rows, [chunk.start + n for chunk, n in zip(chunks, num_rows, strict=True)]),
        )
        input_ids = upload(token_ids, self.device)
        if reads_hidden:
            return self._forward(input_ids, queries, self._prefill_backend)
        features = self.target.fill(
            input_ids, queries, self.target_pool, self._prefill_backend, self._capture_layers
        )
        self._inject(features, queries)
        return None

    def verify(self, input_ids: Tensor, queries: RaggedQueries, out: Tensor | None = None) -> Tensor:
        """Runs packed verify rows and injects all of them into the draft's context.

        Rows that end up rejected leave K/V beyond the committed length, where the next step writes again.

        Returns:
            Target logits float32 [M, V]; on a GPU in `out`, where it is given.
        """
        return self.target.logits(self._forward(input_ids, queries, self._backend), out)

    def draft_hidden(self, rows: Tensor, width: int) -> Tensor:
        """Final-normed draft hidden states [R, width, H] of the blocks (anchor, mask, mask, …) of `rows`."""
        assert self.draft is not None and self.draft_pool is not None
        state = self.request_rows
        inputs = draft_inputs(
            rows,
            state.anchors,
            state.context_lens,
            state.page_table,
            width,
            self.draft.config.mask_token_id,
        )
        queries = BlockQueries(inputs.context_lens, inputs.page_table, state.page_size, width)
        embedded = self.target.embed(inputs.block_ids)
        return self.draft.forward_block(embedded, queries, self.draft_pool, self._draft_backend)

    def _forward(self, input_ids: Tensor, queries: RaggedQueries, backend: AttentionBackend) -> Tensor:
        """The target over rows that somebody reads: final-normed hidden states [M, H]."""
        hidden = self.target.forward(input_ids, queries, self.target_pool, backend, self._capture_layers)
        self._inject(hidden.features, queries)
        return hidden.final

    def _inject(self, features: Tensor | None, queries: RaggedQueries) -> None:
        """Makes the rows part of the draft's context, where there is a draft."""
        if self.draft is not None:
            assert features is not None and self.draft_pool is not None
            self.draft.inject(features, queries.positions, queries.slots, self.draft_pool)
