"""Triton kernels over the vocabulary: largest logits, accept, draws. Equal to their references token for token."""

import pytest
import torch

from flashspark.kernels.accept import accept_greedy, accept_sampled
from flashspark.kernels.selector import top_candidates
from flashspark.kernels.target_probs import sample_categorical
from flashspark.kernels.top_tokens import best_tokens
from parity import DEVICE, DTYPES, NEEDS_TRITON, integers, rand, randn, reference

pytestmark = NEEDS_TRITON


@pytest.fixture(autouse=True)
def chunks_of_16(monkeypatch):
    """So that small vocabularies have several."""
    from flashspark.kernels.triton import sampling, top_tokens

    monkeypatch.setattr(top_tokens, "CHUNK", 16)
    monkeypatch.setattr(sampling, "CHUNK", 16)


def by_sorting(logits, k):
    """Largest first, of equal ones the lowest id."""
    order = logits.float().cpu().sort(dim=-1, descending=True, stable=True)
    return order.indices[:, :k], order.values[:, :k]


@DTYPES
@pytest.mark.parametrize(("num_rows", "size", "k"), [(1, 16, 16), (4, 77, 5), (2, 50, 1)])
def test_top_candidates(dtype, num_rows, size, k):
    logits = randn(num_rows, size, dtype=dtype)
    logits[0, 3] = logits[0, 9]  # bfloat16 has ties of its own
    wide = torch.full((num_rows, size + 7), float("nan"), dtype=dtype, device=DEVICE)
    wide[:, :size] = logits
    ids, scores = top_candidates(wide[:, :size], k, (), "triton")
    expected_ids, expected_scores = by_sorting(logits, k)
    assert torch.equal(ids.cpu(), expected_ids)
    assert torch.equal(scores.cpu(), expected_scores)


def test_forbidden_ids_are_never_candidates():
    logits = randn(3, 40)
    logits[:, [7, 20]] = 100.0
    for forbidden in ([20, 7], integers([20, 7])):
        got = top_candidates(logits.clone(), 6, forbidden, "triton")
        for a, b in zip(got, reference(top_candidates, logits.clone(), 6, forbidden), strict=True):
            assert torch.equal(a, b)


def test_best_tokens_of_ties_infinities_and_nan():
    nan, inf = float("nan"), float("inf")
    rows = torch.full((6, 40), -1.0)
    rows[0, [30, 4, 35]] = 2.0
    rows[1, 33], rows[1, 5] = inf, 3.0
    rows[2, 38], rows[2, 36] = -nan, nan
    rows[3] = -inf
    rows[4] = torch.tensor([-0.0, 0.0] * 20)
    rows[5, :] = torch.arange(40.0)
    ids, values = best_tokens(rows.to(DEVICE), "triton")
    expected_ids, expected = best_tokens(rows, "torch")
    assert ids.tolist() == [4, 33, 36, 0, 0, 39] == expected_ids.tolist()
    torch.testing.assert_close(values.cpu(), expected, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("gamma", [0, 1, 7])
def test_accept_greedy(gamma):
    num_reqs = 70
    generator = torch.Generator().manual_seed(gamma)
    target = torch.randint(3, (num_reqs, gamma + 1), generator=generator)
    drafts = torch.randint(3, (num_reqs, gamma), generator=generator)
    lens = torch.randint(1, gamma + 2, (num_reqs,), generator=generator)
    past = torch.arange(gamma + 1) >= lens[:, None]
    target[past], drafts[past[:, 1:]] = -7, -8
    args = [x.to(DEVICE) for x in (target, drafts, lens)]
    for a, b in zip(accept_greedy(*args, "triton"), reference(accept_greedy, *args), strict=True):
        assert torch.equal(a, b)


def sampled_case(num_reqs, gamma, vocab_size, k, dense, seed=0):
    """Packed rows with NaN between them; q and drafts past the cutoff are poison."""
    lens = integers([1 + (3 * r) % (gamma + 1) for r in range(num_reqs)])
    starts = torch.cat((integers([0]), lens.cumsum(0)))[:-1] + 2
    block_rows = starts[:, None] + torch.minimum(torch.arange(gamma + 1, device=DEVICE), lens[:, None] - 1)
    probs = torch.full((int(lens.sum()) + 4, vocab_size), float("nan"), device=DEVICE)
    probs[2:-2] = torch.softmax(2 * randn(len(probs) - 4, vocab_size, seed=seed), -1)
    ids = rand(num_reqs, gamma, vocab_size, seed=seed + 1).argsort(-1)[..., :k]
    q = torch.softmax(randn(num_reqs, gamma, k, seed=seed + 2), -1)
    drafts = ids[..., 0].contiguous()
    past = (torch.arange(gamma + 1, device=DEVICE) >= lens[:, None])[:, 1:]
    if dense:
        q = torch.zeros(num_reqs, gamma, vocab_size, device=DEVICE).scatter_(2, ids, q)
    q[past], drafts[past] = float("nan"), 0
    uniforms = rand(num_reqs, gamma + 1, 2, dtype=torch.float64, seed=seed + 3)
    uniforms[..., 0] *= 0.02  # or hardly anything would be accepted
    uniforms[::3, :, 0] = 0.0
    return probs, block_rows, drafts, None if dense else ids, q, lens, uniforms[:, :-1, 0], uniforms[..., 1]


@pytest.mark.parametrize("dense", [False, True], ids=["sparse q", "dense q"])
@pytest.mark.parametrize(("gamma", "k"), [(3, 2), (7, 5), (1, 1)])
def test_accept_sampled(dense, gamma, k):
    case = sampled_case(9, gamma, 53, k, dense)
    got, expected = accept_sampled(*case, "triton"), reference(accept_sampled, *case)
    assert expected[0].unique().numel() > 1
    for a, b in zip(got[:2], expected[:2], strict=True):
        assert torch.equal(a, b)
    lens = case[5]
    full = lens == gamma + 1
    assert torch.equal(got[2][full], expected[2][full])
    assert torch.equal(torch.minimum(got[2], lens - 1), got[0])


def test_accept_sampled_without_drafts():
    probs, uniforms = torch.softmax(randn(6, 30), -1), rand(6, 1, dtype=torch.float64)
    rows = integers([[5], [0], [3]])
    empty, lens = integers(torch.zeros(3, 0)), integers([1, 1, 1])
    args = (probs, rows, empty, empty[..., None], torch.zeros(3, 0, 1, device=DEVICE), lens)
    args += (uniforms[:3, :0], uniforms[3:])
    for a, b in zip(accept_sampled(*args, "triton"), reference(accept_sampled, *args), strict=True):
        assert torch.equal(a, b)


def test_no_residual_falls_back_to_p():
    """p = q, and yet a refusal: as rounding can make it."""
    probs = torch.zeros(1, 40, device=DEVICE)
    probs[0, [3, 20]] = 0.5
    q = torch.tensor([[[0.5, 0.5 + 1e-3]]], device=DEVICE)
    for uniform, token in ((0.3, 3), (0.8, 20)):
        args = (probs, integers([[0, 0]]), integers([[20]]), integers([[[3, 20]]]), q, integers([2]))
        args += (
            rand(1, 1, dtype=torch.float64) * 0 + 0.9999,
            torch.full((1, 2), uniform, dtype=torch.float64),
        )
        count, following, _ = accept_sampled(*[x.to(DEVICE) for x in args], "triton")
        assert (count.item(), following.item()) == (0, token)


def test_sample_categorical():
    weights = 3 * rand(6, 45)
    weights[:, ::3] = 0.0
    weights[1, 20:] = 0.0
    for seed in range(3):
        uniforms = rand(6, dtype=torch.float64, seed=seed)
        uniforms[:2] = 1.0 - 2.0**-53  # the end of the mass
        got = sample_categorical(weights, uniforms, "triton")
        assert torch.equal(got, reference(sample_categorical, weights, uniforms))
        assert (weights.gather(1, got[:, None]) > 0).all()
    broken = torch.full((2, 45), float("nan"), device=DEVICE)
    assert (sample_categorical(broken, uniforms[:2], "triton") < 45).all()
