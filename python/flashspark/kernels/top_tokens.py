"""The largest logit of each row."""

from __future__ import annotations

from torch import Tensor

from .dispatch import Implementation, runs_triton


def best_tokens(logits: Tensor, implementation: Implementation | None = None) -> tuple[Tensor, Tensor]:
    """`(ids int64 [...], logits float32 [...])` of the largest entry of each row of `logits` [..., V], any float dtype.

    Of equal ones the lowest id. A row with a NaN gives NaN, and the id of its first.
    """
    if runs_triton(logits, implementation):
        from .triton import top_tokens as twin

        ids, values = twin.top_tokens(logits.flatten(0, -2), 1, None)
        return ids.view(logits.shape[:-1]), values.view(logits.shape[:-1])
    values, ids = logits.max(-1)
    return ids, values.float()
