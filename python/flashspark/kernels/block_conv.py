"""DFlash2's dynamic depthwise convolution inside one draft block."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Implementation, runs_triton


def conv_coefficients(base: Tensor, delta: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Coefficients of both sides of a convolution: `base[side, tap, c] + delta[..., side, tap, c // group]`.

    `base` [2, taps, H], `delta` [R, B, 2 * taps * G] (row-major side, tap, group). Returns one [R, B, H] per tap for
    side 0, which is applied before the sublayer, and for side 1, after it.
    """
    sides, taps, hidden = base.shape
    num_reqs, width, size = delta.shape
    num_groups = size // (sides * taps)
    delta = delta.view(num_reqs, width, sides * taps, num_groups, 1)
    both = base.view(sides * taps, num_groups, hidden // num_groups) + delta
    flat = both.view(num_reqs, width, sides * taps, hidden).unbind(2)
    return list(flat[:taps]), list(flat[taps:])


def block_conv(y: Tensor, coefficients: list[Tensor], residual: Tensor | None = None) -> Tensor:
    """`out[r, t, c] = sum over taps of coefficients[tap][r, t, c] * y[r, t - tap, c]`, rows before the block zero.

    `y` [R, B, H], coefficients [R, B, H] per tap, indexed by the destination row -> [R, B, H], plus `residual` where
    there is one. A block is one request's draft rows, so nothing crosses from one request or step to another.
    """
    width = y.shape[1]
    out = y * coefficients[0] if residual is None else torch.addcmul(residual, y, coefficients[0])
    for tap, coefficient in enumerate(coefficients[1:width], start=1):
        rows = width - tap
        out.narrow(1, tap, rows).addcmul_(y.narrow(1, 0, rows), coefficient.narrow(1, tap, rows))
    return out


def dynamic_block_conv(
    y: Tensor,
    base: Tensor,
    delta: Tensor,
    side: int,
    residual: Tensor | None = None,
    implementation: Implementation | None = None,
) -> Tensor:
    """`block_conv` of `y` with the coefficients of one side, in one go; arguments as of the two functions above."""
    if runs_triton(y, implementation):
        from .triton import block_conv as twin

        return twin.dynamic_block_conv(y, base, delta, side, residual)
    return block_conv(y, conv_coefficients(base, delta)[side], residual)
