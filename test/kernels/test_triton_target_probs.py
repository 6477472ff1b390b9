"""The serving distribution in Triton against the reference, cut and adjusted in every way at once."""

import pytest
import torch

from flashspark.kernels.target_probs import adjust_logits, target_probs
from parity import DEVICE, NEEDS_TRITON, assert_close, integers, rand, randn, reference

pytestmark = NEEDS_TRITON
NUM_ROWS, SIZE = 6, 43


@pytest.fixture(autouse=True)
def twin(monkeypatch):
    """With chunks of 32, so that a row has two, and six runs."""
    from flashspark.kernels.triton import target_probs as twin

    monkeypatch.setattr(twin, "CHUNK", 32)
    monkeypatch.setattr(twin, "RUN", 8)
    monkeypatch.setattr(twin, "CAPACITY", 16)
    return twin


@pytest.mark.parametrize("capacity", [64, 1])
def test_target_probs(capacity, twin, monkeypatch):
    """As many candidates as a row has tokens, and hardly any."""
    monkeypatch.setattr(twin, "CAPACITY", capacity)
    logits = 2 * randn(NUM_ROWS, SIZE)
    logits[3] = (logits[3] * 2).round() / 2  # ties at the thresholds
    logits[4, ::5] = float("-inf")
    settings = (
        0.3 + rand(NUM_ROWS, seed=1),
        integers([0, 1, 7, 9, 43, 100]),
        torch.tensor([0.9, 1.0, 0.6, 0.8, 0.0, 0.5], device=DEVICE),
        torch.tensor([0.0, 0.0, 0.3, 0.05, 0.0, 0.0], device=DEVICE),
    )
    expected = reference(target_probs, logits, *settings)
    got = target_probs(logits, *settings, "triton")
    assert torch.equal(got > 0, expected > 0)
    assert (expected > 0).sum(1).unique().numel() > 3
    assert_close(got, expected, 1e-6)


@pytest.mark.parametrize(("scale", "temperature"), [(0.1, 5.0), (2.0, 1.0), (2.0, 0.3), (30.0, 1.0)])
def test_what_is_left_out_first_is_never_kept(scale, temperature):
    """Top-k about the number of runs, of flat rows and of peaked ones, with ties, within a run and across; top-p from
    hardly any to nearly all."""
    top_k = integers([0, 0, 0, 0, 1, 5, 6, 7, 6, 42])
    top_p = torch.tensor([1e-6, 0.5, 0.999, 0.99999, 1.0, 1.0, 1.0, 1.0, 0.7, 0.95], device=DEVICE)
    n = len(top_k)
    logits = scale * randn(n, SIZE, seed=3)
    logits[:, 8:16] += 2 * scale  # the best are neighbours
    logits[::2] = (logits[::2] / scale).round() * scale
    logits[1, 3:] = float("-inf")
    settings = (torch.full((n,), temperature, device=DEVICE), top_k, top_p, torch.zeros(n, device=DEVICE))
    expected = reference(target_probs, logits, *settings)
    got = target_probs(logits, *settings, "triton")
    assert torch.equal(got > 0, expected > 0)
    assert_close(got, expected, 1e-6)


def test_neutral_settings_leave_the_softmax():
    logits = randn(2, SIZE)
    ones = torch.ones(2, device=DEVICE)
    got = target_probs(logits, ones, integers([-1, 0]), ones, 0 * ones, "triton")
    assert_close(got, torch.softmax(logits, -1), 1e-6)


def test_adjust_logits():
    args = (
        2 * randn(NUM_ROWS, SIZE),
        (3 * rand(NUM_ROWS, SIZE, seed=1) - 1).clamp_min(0).to(torch.int32),
        rand(NUM_ROWS, SIZE, seed=2) < 0.2,
        0.7 + rand(NUM_ROWS, seed=3),
        randn(NUM_ROWS, seed=4),
        randn(NUM_ROWS, seed=5),
        randn(NUM_ROWS, SIZE, seed=6),
        rand(NUM_ROWS, SIZE, seed=7) < 0.1,
    )
    assert_close(adjust_logits(*args, "triton"), reference(adjust_logits, *args), 1e-5)
