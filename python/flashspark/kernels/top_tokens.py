"""The largest logit of each row."""

from __future__ import annotations

from torch import Tensor

from .dispatch import Implementation, runs_triton


def best_tokens(logits: Tensor, implementation: Implementation | None = None) -> tuple[Tensor, Tensor]:
    """`(ids int64 [M], logits float32 [M])` of the largest entry of each row of `logits` [M, V], any float dtype.

    Of equal ones the lowest id. A row with a NaN gives NaN, and the id of its first.
    """
    if runs_triton(logits, implementation):
        from .triton import top_tokens as twin

        ids, values = twin.top_tokens(logits, 1, None)
        return ids[:, 0], values[:, 0]
    values, ids = logits.max(-1)
    return ids, values.float()
