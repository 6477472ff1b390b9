"""Norm, rotary embedding and gate against float64 formulas written out, and against transformers."""

import math

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from flashspark.kernels.rms_norm import rms_norm
from flashspark.kernels.rope import rope, rope_tables
from flashspark.kernels.silu_mul import silu_mul


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_rms_norm_is_its_formula(scale):
    x, weight = scale * torch.randn(3, 5, 24), torch.rand(24)
    wide = x.double()
    expected = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), expected, atol=1e-5, rtol=1e-5)


def test_rms_norm_takes_one_weight_per_head_and_strided_rows():
    x, weight = torch.randn(4, 7, 16)[:, :5], torch.rand(5, 16)
    for head in range(5):
        expected = rms_norm(x[:, head].contiguous(), weight[head], 1e-5)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5)[:, head], expected)


def test_rms_norm_in_bfloat16_rounds_as_transformers():
    theirs = Qwen3RMSNorm(32, eps=1e-6).to(torch.bfloat16)
    theirs.weight.data.uniform_()
    x = torch.randn(50, 32, dtype=torch.bfloat16)
    ours = rms_norm(x, theirs.weight.data, 1e-6)
    assert ours.dtype == torch.bfloat16
    # A statistic in the last bit of float32 may fall to the other side of a rounding; more would be another order.
    assert (ours != theirs(x)).float().mean() < 0.02


@pytest.mark.parametrize("position", [0, 1, 5, 5000])
def test_rope_turns_feature_j_with_feature_j_plus_half(position):
    theta, head_dim = 10000.0, 8
    inverse = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    tables = rope_tables(torch.tensor([position]), torch.cat((-inverse, inverse)), 1.0, torch.float32)
    x = torch.randn(1, head_dim)
    got = rope(x, *tables)
    for j in range(4):
        angle = position * theta ** (-2 * j / head_dim)
        a, b = x[0, j].item(), x[0, j + 4].item()
        # float32 angles of 5000 are good to 2.5e-4
        assert got[0, j].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-3)
        assert got[0, j + 4].item() == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_equals_transformers(dtype):
    config = Qwen3Config(head_dim=16, hidden_size=64, num_attention_heads=4, rope_theta=1e6)
    x, positions = torch.randn(1, 3, 9, 16, dtype=dtype), torch.arange(100, 109)
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    inverse = 1.0 / 1e6 ** (torch.arange(0, 16, 2).float() / 16)
    tables = rope_tables(positions.unsqueeze(-1), torch.cat((-inverse, inverse)), 1.0, dtype)
    got = rope(x[0].transpose(0, 1), *tables).transpose(0, 1)
    torch.testing.assert_close(got, expected[0], atol=1e-6 if dtype == torch.float32 else 0.02, rtol=0)


def test_rope_keeps_products_of_equal_distances():
    """What rope is for: q at m and k at n only depend on m - n; and `scale` enters squared."""
    inverse = torch.tensor([1.0, 0.3, 0.01])
    q, k = torch.randn(6), torch.randn(6)

    def product(m, n, scale=1.0):
        frequencies = torch.cat((-inverse, inverse))
        tables = [rope_tables(torch.tensor(p), frequencies, scale, torch.float32) for p in (m, n)]
        return rope(q, *tables[0]) @ rope(k, *tables[1])

    torch.testing.assert_close(product(7, 3), product(104, 100), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(product(7, 3, 2.0), 4 * product(7, 3))


def test_silu_mul_takes_the_gate_first():
    gate_up = torch.randn(2, 3, 10) * 5
    got = silu_mul(gate_up)
    for i in range(5):
        gate, up = gate_up[..., i].double(), gate_up[..., i + 5].double()
        torch.testing.assert_close(
            got[..., i].double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-5, rtol=1e-5
        )
