"""DFlash2's dynamic depthwise convolution inside one draft block."""

from __future__ import annotations

from torch import Tensor


def conv_coefficients(base: Tensor, delta: Tensor) -> Tensor:
    """Coefficients of both sides of a convolution: `base[s, tap, c] + delta[..., s, tap, c // group]`.

    `base` [2, taps, H], `delta` [R, B, 2 * taps * G] (row-major side, tap, group) -> [R, B, 2, taps, H].
    Side 0 is applied before the sublayer, side 1 after it.
    """
    sides, taps, hidden = base.shape
    num_reqs, width, size = delta.shape
    num_groups = size // (sides * taps)
    delta = delta.view(num_reqs, width, sides, taps, num_groups, 1)
    coefficients = base.view(sides, taps, num_groups, hidden // num_groups) + delta
    return coefficients.view(num_reqs, width, sides, taps, hidden)


def block_conv(y: Tensor, coefficients: Tensor) -> Tensor:
    """`out[r, t, c] = sum over taps of coefficients[r, t, tap, c] * y[r, t - tap, c]`, rows before the block zero.

    `y` [R, B, H], `coefficients` [R, B, taps, H] (indexed by the destination row) -> [R, B, H]. A block is one
    request's draft rows, so nothing crosses from one request or step to another.
    """
    width = y.shape[1]
    current, *before = coefficients.unbind(2)
    out = y * current
    for tap, coefficient in enumerate(before[: width - 1], start=1):
        rows = width - tap
        out.narrow(1, tap, rows).addcmul_(y.narrow(1, 0, rows), coefficient.narrow(1, tap, rows))
    return out
