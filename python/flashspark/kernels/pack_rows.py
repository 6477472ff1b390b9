"""Packs each request's verify rows, anchor first, one request after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton


@dataclass(frozen=True)
class RowPlaces:
    """Whose every packed row is, and which row of its block. Follows from the verify lengths alone."""

    qo_indptr: Tensor  # int64 [R + 1]
    request: Tensor  # int64 [M], batch index; of padding, the last request
    block_row: Tensor  # int64 [M], 0 … gamma
    is_padding: Tensor | None  # bool [M]; None: there is none
    block_rows: Tensor  # int64 [R, W], see `PackedStep`


class PackedStep(NamedTuple):
    """The rows of a step, int64. Padding rows are id 0 at position 0 in slot 0, and name the last request."""

    qo_indptr: Tensor  # [R + 1]
    kv_lens: Tensor  # [R]
    requests: Tensor  # [M], batch index
    input_ids: Tensor  # [M]
    positions: Tensor  # [M]
    slots: Tensor  # [M]
    block_rows: Tensor  # [R, W], the packed row of each block row; past the verify length, the last one's
    page_table: Tensor  # [R, max_pages], of the requests
    cutoff: Tensor  # [R], rows that may be accepted, 1 at least


def within_limits(lens: Tensor, max_lens: Tensor, context_lens: Tensor) -> Tensor:
    """`lens` [R] cut to what requests of `context_lens` [R] tokens may still emit, and 1 at least."""
    return torch.minimum(lens, max_lens - 1 - context_lens).clamp_(min=1)


def row_places(verify_lens: Tensor, width: int, num_tokens: int, padded: bool) -> RowPlaces:
    """Where the rows of `verify_lens` [R] are; the other arguments as of `pack_rows`."""
    num_reqs, device = verify_lens.shape[0], verify_lens.device
    qo_indptr = torch.zeros(num_reqs + 1, dtype=torch.int64, device=device)
    torch.cumsum(verify_lens, 0, out=qo_indptr[1:])
    lane = torch.arange(num_tokens, device=device)
    request, is_padding = torch.searchsorted(qo_indptr[1:], lane, right=True), None
    if padded:
        is_padding = request == num_reqs
        request = request.clamp_(max=num_reqs - 1)
    block_row = lane - qo_indptr[request]
    if padded:
        block_row = block_row.clamp_(max=width - 1)
    last = verify_lens[:, None] - 1
    block_rows = qo_indptr[:-1, None] + torch.minimum(torch.arange(width, device=device), last)
    return RowPlaces(qo_indptr, request, block_row, is_padding, block_rows)


def pack_rows(
    rows: Tensor,
    anchors: Tensor,
    context_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    drafts: Tensor,
    verify_lens: Tensor,
    num_tokens: int,
    padded: bool = True,
    places: RowPlaces | None = None,
    least_run: Tensor | None = None,
    max_lens: Tensor | None = None,
    implementation: Implementation | None = None,
) -> PackedStep:
    """Lays out `verify_lens[r]` rows of each request at positions n … n + verify_lens[r] - 1.

    Args:
        rows: int64 [R], request rows: where in the next three, int64 too, a request's entries are.
        anchors, context_lens: [rows]; context_lens is n.
        page_table: [rows, max_pages].
        drafts: int64 [R, gamma] (gamma may be 0).
        verify_lens: int64 [R], 1 … gamma + 1.
        num_tokens: M, rows in all; at least `verify_lens.sum()`, and exactly that unless `padded`.
        padded: whether rows past the requests' own may be left, which then belong to nobody.
        places: `row_places` of these lengths, where the caller has them.
        least_run: int64 [R], rows to lay out if the verify length is less; they may not be accepted.
        max_lens: int64 [rows], tokens that a request may become, which cut what may be accepted; None: nothing does.
    """
    if runs_triton(rows, implementation):
        from .triton import pack_rows as twin

        return twin.pack_rows(
            rows,
            anchors,
            context_lens,
            page_table,
            page_size,
            drafts,
            verify_lens,
            num_tokens,
            least_run,
            max_lens,
        )
    lens = context_lens[rows]
    cutoff = verify_lens if max_lens is None else within_limits(verify_lens, max_lens[rows], lens)
    if least_run is not None:
        verify_lens = torch.maximum(verify_lens, least_run)
    if places is None:
        places = row_places(verify_lens, drafts.shape[1] + 1, num_tokens, padded)
    positions = lens[places.request] + places.block_row
    blocks = torch.cat((anchors[rows, None], drafts), dim=1)
    input_ids = blocks[places.request, places.block_row]
    if places.is_padding is not None:
        positions = positions.masked_fill_(places.is_padding, 0)
        input_ids = input_ids.masked_fill_(places.is_padding, 0)
    page = page_table[rows[places.request], positions // page_size]
    slots = page * page_size + positions % page_size
    if places.is_padding is not None:
        slots = slots.masked_fill_(places.is_padding, 0)
    return PackedStep(
        places.qo_indptr,
        lens + verify_lens,
        places.request,
        input_ids,
        positions,
        slots,
        places.block_rows,
        page_table[rows],
        cutoff,
    )
