"""Which library multiplies is a matter of speed alone."""

import pytest
import torch

from flashspark.kernels import matmul as module
from flashspark.kernels.matmul import choose, chosen, matmul
from parity import DEVICE, assert_close, randn


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(module, "_chosen", {})


def test_a_cpu_and_float32_have_no_choice():
    choose([torch.zeros(4, 4, dtype=torch.bfloat16)], [1, 2])
    choose([randn(4, 4)], [1, 2])
    assert chosen() == {}


def test_the_quicker_library_is_chosen_if_it_is_worth_it(monkeypatch):
    times = {(rows, library): 1.0 for rows in (1, 2, 3) for library in module.LIBRARIES}
    times |= {(1, "cublaslt"): 0.9, (2, "cublaslt"): 0.995, (3, "cublas"): 0.8, (3, "cublaslt"): 0.9}
    monkeypatch.setattr(module, "_measure", lambda x, weights, library: times[x.shape[0], library])
    choose([torch.empty(6, 4, dtype=torch.bfloat16, device="meta")], [1, 2, 3])
    assert chosen() == {(1, 6, 4): "cublaslt", (2, 6, 4): "default", (3, 6, 4): "cublas"}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_both_libraries_multiply():
    weight = randn(512, 256, dtype=torch.bfloat16)
    choose([weight], [1, 7, 64])
    assert set(chosen()) == {(n, 512, 256) for n in (1, 7, 64)}
    for n in (1, 7, 64, 100):
        x = randn(n, 512, dtype=torch.bfloat16, seed=n)
        for library in module.LIBRARIES:
            module._chosen[n, 512, 256] = library
            assert_close(matmul(x, weight), x @ weight)
