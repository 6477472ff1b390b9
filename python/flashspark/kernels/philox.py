"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

A draw is a function of who asks and why, never of what else is in the batch or of how many draws came before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Four 32-bit words per counter.

    Args:
        counter: int64 [..., 4], each below 2**32.
        key: int64 [..., 2], each below 2**32, broadcastable to the counter's leading shape.

    Returns:
        int64 [..., 4], each below 2**32.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for round_index in range(_ROUNDS):
        # The products wrap in int64, but their 64 bits are right: shift, then mask the sign extension away.
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        w0, w1 = (k0 + round_index * _WEYL_0) & _MASK, (k1 + round_index * _WEYL_1) & _MASK
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ w0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ w1,
            p0 & _MASK,
        )
    return torch.stack((c0, c1, c2, c3), dim=-1)


def step_uniforms(
    seeds: Tensor, choices: Tensor, steps: Tensor, num_rows: int, implementation: Implementation | None = None
) -> Tensor:
    """The uniforms of one verify step, for every block row and purpose.

    The key is the request's seed, the counter (verify-step index, row, choice index, 0); the purpose picks the
    word. A position that is drafted again in a later step thus gets fresh noise.

    Args:
        seeds, choices, steps: int64 [R].
        num_rows: rows of the block, W.

    Returns:
        float64 [R, num_rows, 4], strictly between 0 and 1.
    """
    if runs_triton(seeds, implementation):
        from .triton import philox as twin

        return twin.step_uniforms(seeds, choices, steps, num_rows, _ROUNDS)
    num_reqs = seeds.shape[0]
    rows = torch.arange(num_rows, device=seeds.device).expand(num_reqs, -1)
    counter = torch.stack(
        (
            (steps & _MASK)[:, None].expand_as(rows),
            rows,
            (choices & _MASK)[:, None].expand_as(rows),
            torch.zeros_like(rows),
        ),
        dim=-1,
    )
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK), dim=-1)[:, None]
    return (philox4x32(counter, key).to(torch.float64) + 0.5) * 2.0**-32
