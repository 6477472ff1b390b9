"""The dynamic convolution against a loop over its definition, in float64."""

import pytest
import torch

from flashspark.kernels.block_conv import block_conv, conv_coefficients


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def loop(y, base, delta, side):
    """`base` [2, taps, H], `delta` [R, B, 2, taps, G]."""
    num_reqs, width, hidden = y.shape
    taps, num_groups = base.shape[1], delta.shape[-1]
    out = torch.zeros(y.shape, dtype=torch.float64)
    for r in range(num_reqs):
        for t in range(width):
            for c in range(hidden):
                for tap in range(taps):
                    if t - tap >= 0:
                        group = c // (hidden // num_groups)
                        coefficient = base[side, tap, c].double() + delta[r, t, side, tap, group].double()
                        out[r, t, c] += coefficient * y[r, t - tap, c].double()
    return out


@pytest.mark.parametrize(("taps", "width"), [(2, 8), (2, 5), (2, 1), (3, 6), (4, 3), (1, 4)])
def test_equals_the_definition(taps, width):
    hidden, num_groups = 12, 3
    y, base = torch.randn(3, width, hidden), torch.randn(2, taps, hidden)
    delta = torch.randn(3, width, 2, taps, num_groups)
    coefficients = conv_coefficients(base, delta.flatten(2))
    residual = torch.randn_like(y)
    for side in (0, 1):
        assert [c.shape for c in coefficients[side]] == [(3, width, hidden)] * taps
        expected = loop(y, base, delta, side)
        torch.testing.assert_close(block_conv(y, coefficients[side]).double(), expected, atol=1e-5, rtol=1e-5)
        got = block_conv(y, coefficients[side], residual).double()
        torch.testing.assert_close(got, residual + expected, atol=1e-5, rtol=1e-5)


def test_identity_kernel_changes_nothing():
    base = torch.zeros(2, 2, 8)
    base[:, 0] = 1
    y = torch.randn(2, 5, 8)
    before, after = conv_coefficients(base, torch.zeros(2, 5, 2 * 2 * 4))
    assert torch.equal(block_conv(y, before), y)
    assert torch.equal(block_conv(y, after), y)


def test_nothing_crosses_between_requests():
    y, coefficients = torch.randn(2, 4, 6), list(torch.randn(2, 2, 4, 6))
    before = block_conv(y, coefficients)
    y[0, -1] += 1
    after = block_conv(y, coefficients)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0, :-1], after[0, :-1])
    assert not torch.equal(before[0, -1], after[0, -1])
