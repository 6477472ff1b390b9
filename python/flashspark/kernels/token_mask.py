"""Which tokens a row may emit, as bits: what a grammar allows."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_masks(logits: Tensor, places: Tensor, masks: Tensor) -> Tensor:
    """Sets the logits of refused tokens to -inf, in place.

    Args:
        logits: float32 [N, V].
        places: int64 [K], distinct rows of `logits`; the others stay as they are.
        masks: int32 [K, ceil(V / 32)]; bit v % 32 of word v // 32 is set where token v is allowed.

    Returns:
        `logits`.
    """
    if not len(places):
        return logits
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    refused = (masks[..., None] >> shifts) & 1 == 0
    refused = refused.flatten(1)[:, : logits.shape[1]]
    logits[places] = logits[places].masked_fill_(refused, float("-inf"))
    return logits
