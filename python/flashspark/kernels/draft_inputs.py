"""What a draft reads of the request rows, in batch order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton


class DraftInputs(NamedTuple):
    """Of R requests, int64."""

    block_ids: Tensor  # [R, width]: anchor, mask, mask, …
    context_lens: Tensor  # [R]
    page_table: Tensor  # [R, max_pages]


def draft_inputs(
    rows: Tensor,
    anchors: Tensor,
    context_lens: Tensor,
    page_table: Tensor,
    width: int,
    mask_id: int,
    implementation: Implementation | None = None,
) -> DraftInputs:
    """Gathers the state of the requests in `rows` int64 [R].

    `anchors`, `context_lens` [rows] and `page_table` [rows, max_pages], int64, are by request row; `mask_id` is the
    token of the `width` - 1 rows after the anchor.
    """
    if runs_triton(rows, implementation):
        from .triton import draft_inputs as twin

        return twin.draft_inputs(rows, anchors, context_lens, page_table, width, mask_id)
    block_ids = torch.full((rows.shape[0], width), mask_id, device=rows.device)
    block_ids[:, 0] = anchors[rows]
    return DraftInputs(block_ids, context_lens[rows], page_table[rows])
