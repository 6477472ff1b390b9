"""Triton kernels that work row by row: norms, gate, and the way from the projection to attention's inputs."""

import pytest
import torch

from flashspark.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_write
from flashspark.kernels.rms_norm import add_rms_norm, rms_norm
from flashspark.kernels.rope import rope_tables
from flashspark.kernels.silu_mul import silu_mul
from parity import DEVICE, DTYPES, NEEDS_TRITON, assert_close, integers, randn

pytestmark = NEEDS_TRITON


@DTYPES
@pytest.mark.parametrize(
    ("shape", "weight_shape"),
    [
        ((37, 48), (48,)),
        ((2, 3, 4096), (4096,)),
        ((5, 6, 16), (6, 16)),  # one weight per head
        ((4, 3, 2, 24), (3, 1, 24)),  # one per layer, shared by its heads
        ((0, 64), (64,)),
    ],
    ids=str,
)
def test_rms_norm(dtype, shape, weight_shape):
    x, weight = randn(*shape, dtype=dtype), 1 + 0.1 * randn(*weight_shape, dtype=dtype, seed=1)
    for scale in (1e-4, 300.0):
        expected = rms_norm(x * scale, weight, 1e-6, "torch")
        assert_close(rms_norm(x * scale, weight, 1e-6, "triton"), expected)


def test_rms_norm_of_rows_with_gaps_reads_nothing_between_them():
    x = torch.full((6, 100), float("nan"), device=DEVICE)
    x[:, :40] = randn(6, 40)
    weight = randn(40, seed=1)
    assert_close(rms_norm(x[:, :40], weight, 1e-6, "triton"), rms_norm(x[:, :40], weight, 1e-6, "torch"))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (9, 200), (2, 3, 5000)], ids=str)
def test_add_rms_norm(dtype, shape):
    x, residual = randn(*shape, dtype=dtype), 3 * randn(*shape, dtype=dtype, seed=1)
    weight = randn(shape[-1], dtype=dtype, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, "triton")
    assert_close(total, x + residual)
    assert_close(normed, rms_norm(x + residual, weight, 1e-5, "torch"))
    for a, b in zip(add_rms_norm(x, residual, weight, 1e-5, "torch"), (normed, total), strict=True):
        assert_close(a, b)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (7, 80), (2, 3, 3000), (0, 8)], ids=str)
def test_silu_mul(dtype, shape):
    gate_up = 5 * randn(*shape, dtype=dtype)
    assert_close(silu_mul(gate_up, "triton"), silu_mul(gate_up, "torch"))


def tables(num_rows, dim, dtype):
    inverse = 1e6 ** (-torch.arange(0, dim, 2) / dim)
    frequencies = torch.cat((-inverse, inverse)).to(DEVICE)
    return rope_tables(integers([[7 * i] for i in range(num_rows)]), frequencies, 1.0, dtype)


@DTYPES
@pytest.mark.parametrize(("num_rows", "dim"), [(1, 16), (9, 128), (20, 24), (0, 8)])
def test_rope_tables(dtype, num_rows, dim):
    inverse = 1e6 ** (-torch.arange(0, dim, 2) / dim)
    frequencies = torch.cat((-inverse, inverse)).to(DEVICE)
    positions = integers([[(7919 * i) % 40960] for i in range(num_rows)]).view(num_rows, 1)
    expected = rope_tables(positions, frequencies, 0.7, dtype, "torch")
    got = rope_tables(positions, frequencies, 0.7, dtype, "triton")
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_kv_heads", "dim"),
    [(1, 4, 2, 16), (5, 32, 8, 128), (3, 6, 2, 64), (4, 5, 1, 24), (3, 0, 2, 16)],
)
def test_qk_norm_rope(dtype, num_rows, num_heads, num_kv_heads, dim):
    num_all = num_heads + 2 * num_kv_heads
    wide = torch.full((num_rows, num_all * dim + 9), float("nan"), device=DEVICE, dtype=dtype)
    wide[:, : num_all * dim] = randn(num_rows, num_all * dim, dtype=dtype)
    qkv = wide[:, : num_all * dim].view(num_rows, num_all, dim)
    weight = 1 + 0.2 * randn(num_heads + num_kv_heads, dim, dtype=dtype, seed=1)
    args = (qkv, weight, 1e-6, *tables(num_rows, dim, dtype))
    expected = qk_norm_rope(*args, num_kv_heads, 1.5, "torch")
    for got, reference in zip(qk_norm_rope(*args, num_kv_heads, 1.5, "triton"), expected, strict=True):
        assert_close(got, reference)

    slots = integers([11, 2, 17, 5, 8][:num_rows])
    caches = [torch.full((20, num_kv_heads, dim), float("nan"), device=DEVICE, dtype=dtype) for _ in range(2)]
    assert_close(qk_norm_rope_write(*args, slots, *caches, 1.5, "triton"), expected[0])
    untouched = torch.ones(20, dtype=torch.bool, device=DEVICE).index_fill_(0, slots, False)
    for cache, reference in zip(caches, expected[1:], strict=True):
        assert_close(cache[slots], reference)
        assert cache[untouched].isnan().all()


def test_qk_norm_rope_is_its_formula():
    """Norm and turn of one query, one key and one value, written out in float64."""
    dim, position, eps = 8, 7, 1e-6
    qkv, weight = randn(2, 3, dim), randn(2, dim, seed=1)
    q, k, v = qk_norm_rope(qkv, weight, eps, *tables(2, dim, torch.float32), 1, 2.0, "torch")
    for head, got in ((0, q), (1, k)):
        x = qkv[1, head].double()
        x = x / torch.sqrt((x * x).mean() + eps) * weight[head].double()
        for j in range(dim // 2):
            angle = torch.tensor(position * 1e6 ** (-2 * j / dim), dtype=torch.float64)
            a, b = x[j], x[j + dim // 2]
            assert got[1, 0, j].item() == pytest.approx((a * angle.cos() - b * angle.sin()).item(), abs=1e-5)
            assert got[1, 0, j + dim // 2].item() == pytest.approx(
                (b * angle.cos() + a * angle.sin()).item(), abs=1e-5
            )
    assert torch.equal(v, 2 * qkv[:, 2:])
