"""Products with weights held in half precision, against float64."""

import pytest
import torch

from flashspark.kernels.half_linear import half_linear, is_available, pack_half

pytestmark = pytest.mark.skipif(not is_available(), reason="this build of torch has no such kernels")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request):
    """One thread and more take different kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33])
@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-6])
def test_weights_of_half_precision_files_lose_nothing_that_matters(dtype, rows, scale):
    weight = (torch.randn(300, 400) * scale).to(dtype).float()
    x = torch.randn(rows, 400)
    expected = x.double() @ weight.double().T
    got = half_linear(x, pack_half(weight))
    assert got.dtype == torch.float32
    # Sums of 400 products in float32, and 2^-25 per weight below 2^-14.
    torch.testing.assert_close(got.double(), expected, atol=1e-4 * scale + 400**0.5 * 2**-25 * 5, rtol=1e-5)


def test_rows_may_have_any_shape_and_a_bias(threads):
    weight, bias = torch.randn(256, 512).bfloat16().float(), torch.randn(256)
    wide = torch.randn(2, 4, 512)
    for x in (wide, wide[:, 1:]):  # and need not be contiguous
        half = pack_half(weight, bias)
        assert half.single_thread == (threads == 1)
        torch.testing.assert_close(half_linear(x, half), x @ weight.T + bias, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(half_linear(x, pack_half(weight)), x @ weight.T, atol=1e-3, rtol=1e-4)


def test_deprecation_is_not_shown_to_users(recwarn):
    half_linear(torch.randn(1, 512), pack_half(torch.randn(256, 512)))
    assert not recwarn.list


def test_what_is_not_packed():
    assert pack_half(torch.randn(10, 10)) is None  # too small to gain
    huge = torch.randn(400, 400)
    huge[0, 0] = 1e6  # bfloat16 has it, float16 does not
    assert pack_half(huge) is None
    huge[0, 0] = float("nan")
    assert pack_half(huge) is None
