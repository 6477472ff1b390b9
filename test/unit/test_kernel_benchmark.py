"""The kernel benchmark's cases run, and their floors are what arithmetic on paper says."""

import sys
from pathlib import Path

import pytest

from parity import NEEDS_TRITON

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
pytestmark = NEEDS_TRITON


def cases_of(geometry, num_reqs):
    from kernel_cases import Cases

    return {case.name: case for case in Cases(geometry, "cpu").all(num_reqs)}


def test_every_case_with_a_reference_runs():
    from kernel_cases import SMOKE

    ran = 0
    for num_reqs in (1, 3):
        for case in cases_of(SMOKE, num_reqs).values():
            assert case.num_bytes > 0
            if case.has_torch:
                case.make(0)(implementation="torch")
                ran += 1
    assert ran == 2 * 21


def test_bytes_and_flops_of_attention():
    from kernel_cases import QWEN3_8B

    case = cases_of(QWEN3_8B, 32)["verify attention, full"]
    keys_and_values = 32 * 512 * 8 * 128 * 2 * 2
    assert case.num_bytes == keys_and_values + 256 * 32 * 128 * 2 * 2
    assert keys_and_values / 4.26e12 == pytest.approx(15.8e-6, rel=0.01)
    assert case.flops == 2 * 2 * 256 * 32 * 128 * 512


def test_a_steps_products_read_15_gigabytes():
    from kernel_cases import QWEN3_8B, floor_us, gemm_shapes

    shapes = gemm_shapes(QWEN3_8B, 36, True)
    assert len(shapes) == 4 * 36 + 1
    num_bytes = 2 * sum(inner * out for inner, out in shapes)
    assert num_bytes == 36 * 2 * 192_937_984 + 2 * 4096 * 151_936
    assert floor_us(num_bytes, 0) == pytest.approx(3550, rel=0.01)
    assert floor_us(num_bytes, num_bytes * 1024.0) == pytest.approx(19.2 * 1024, rel=0.01)
