"""How products are made is a matter of speed alone, and chosen by a tournament."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashspark.kernels import cublaslt, matmul_choice
from flashspark.kernels import matmul as module
from flashspark.kernels.matmul import LIBRARIES, chosen, matmul
from flashspark.kernels.matmul_choice import choose, tournament
from flashspark.kernels.matmul_seeds import configurations
from parity import DEVICE, assert_close, randn

GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(module, "_chosen", {})


def test_a_cpu_and_float32_have_no_choice():
    choose([[torch.zeros(4, 4, dtype=torch.bfloat16)], [randn(4, 4)]], [1, 2])
    assert chosen() == {}
    assert not cublaslt.is_available() or DEVICE != "cpu"


def test_the_structures_are_as_large_as_the_librarys():
    assert ctypes.sizeof(cublaslt._AlgorithmData) == 64
    assert ctypes.sizeof(cublaslt._Heuristic) == 96


def algorithm(number: int) -> cublaslt.Algorithm:
    return cublaslt.Algorithm((66, number), cublaslt._AlgorithmData())


def test_an_algorithm_is_its_configuration():
    assert algorithm(1) == algorithm(1)
    assert len({algorithm(1), algorithm(1), algorithm(2)}) == 2
    for to_float32 in (False, True):
        found = configurations(to_float32)
        assert len(set(found)) == len(found) > 10
        assert {len(configuration) for configuration in found} == {9}


@given(st.lists(st.floats(0.5, 1.5) | st.just(float("inf")), max_size=20), st.floats(0.5, 1.5))
def test_the_quickest_wins_if_it_is_clearly_better_than_the_usual(times, usual):
    found = dict(zip(map(algorithm, range(len(times))), times, strict=True)) | {"default": usual}
    way = tournament(8, list(found), lambda rows, ways, rounds: [found[way] for way in ways])
    best = min(found.values())
    assert found[way] == (best if best < 0.99 * usual else usual)


def test_the_final_decides():
    """What was quick once, by chance, does not win."""

    def measure(rows, ways, rounds):
        return [{"default": 1.0, "cublas": 0.5 if rounds == 1 else 1.1}.get(way, 0.9) for way in ways]

    assert tournament(8, ["default", "cublas", algorithm(3)], measure) == algorithm(3)


def test_a_weight_with_gaps_is_multiplied_by_pytorch():
    """Though an algorithm was chosen for its shape."""
    x, wide = randn(2, 4), randn(4, 6)
    module.remember((2, 4, 3, torch.float32), algorithm(1))
    assert cublaslt.is_dense(wide) and cublaslt.is_dense(wide.t()) and not cublaslt.is_dense(wide[:, :3])
    assert torch.equal(matmul(x, wide[:, :3]), x @ wide[:, :3])


def test_what_multiplies_wrongly_is_not_remembered(monkeypatch, caplog):
    real = module.multiply
    monkeypatch.setattr(
        matmul_choice,
        "multiply",
        lambda x, weight, out, way: real(x, weight, out, "default") * (way != "bad"),
    )
    bench = matmul_choice.Bench([randn(4, 3)], None)
    bench.remember(2, "bad")
    bench.remember(3, "cublas")
    assert chosen() == {(2, 4, 3, torch.float32): "default", (3, 4, 3, torch.float32): "cublas"}
    assert "comes out wrong" in caplog.text


@GPU
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_every_way_multiplies(out_dtype):
    weight = randn(512, 256, dtype=torch.bfloat16)
    for held in (weight, weight.t().contiguous().t()):
        for n in (1, 7, 64):
            x = randn(n, 512, dtype=torch.bfloat16, seed=n)
            expected = (x.double() @ held.double()).to(out_dtype)
            out = torch.empty(n, 256, dtype=out_dtype, device=DEVICE)
            with cublaslt.Product(x, held, out) as product:
                listed = product.algorithms()
            assert listed
            for way in [*LIBRARIES, *listed]:
                module.remember((n, 512, 256, out_dtype), way)
                out.fill_(float("nan"))
                assert_close(matmul(x, held, out), expected, 1e-3 if out_dtype == torch.float32 else None)


@GPU
def test_choosing_covers_every_row_count_and_keeps_the_product():
    weights = [randn(512, 256, dtype=torch.bfloat16, seed=i) for i in range(3)]
    scratch = torch.empty(200, 256, device=DEVICE)
    choose([weights], [1, 7, 64, 200])
    choose([weights], [1, 200], scratch)
    expected = {(n, 512, 256, torch.bfloat16) for n in (1, 7, 64, 200)}
    assert set(chosen()) == expected | {(n, 512, 256, torch.float32) for n in (1, 200)}
    for n in (1, 7, 64, 100, 200):
        x = randn(n, 512, dtype=torch.bfloat16, seed=n)
        assert_close(matmul(x, weights[0]), x @ weights[0])
        wanted = x.float() @ weights[0].float()
        assert_close(matmul(x, weights[0], scratch[:n]), wanted, 1e-3)


@GPU
def test_algorithms_are_made_from_their_configuration():
    x, weight = randn(64, 512, dtype=torch.bfloat16), randn(512, 256, dtype=torch.bfloat16)
    out = torch.empty(64, 256, dtype=torch.bfloat16, device=DEVICE)
    with cublaslt.Product(x, weight, out) as product:
        for listed in product.algorithms():
            made = cublaslt.Algorithm.configured(listed.configuration, x.dtype, out.dtype)
            assert made == listed
            assert_close(product.multiply(made), product.multiply(listed).clone())
