"""Accept against a loop over the published rule, and its distribution against the exact one."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from flashspark.kernels.accept import accept_greedy, accept_sampled
from flashspark.kernels.philox import step_uniforms
from flashspark.kernels.target_probs import sample_categorical

VOCAB, GAMMA, K = 6, 3, 2


def reference_accept(probs, drafts, ids, q, verify_len, accept_u, final_u):
    """Float64, one request at a time, dense q."""
    count = 0
    for i in range(verify_len - 1):
        dense = np.zeros(probs.shape[1])
        for token, value in zip(ids[i], q[i], strict=True):
            dense[token] = value
        if accept_u[i] * dense[drafts[i]] < probs[i, drafts[i]]:
            count += 1
            continue
        residual = np.maximum(probs[i] - dense, 0.0)
        weights = residual if residual.sum() > 0 else probs[i]
        break
    else:
        weights = probs[count]
    cdf = weights.cumsum()
    return count, int(np.searchsorted(cdf, final_u[count] * cdf[-1], side="right"))


def accept_aligned(probs, *rest):
    """`accept_sampled` of p [R, W, V], every block row at its own place."""
    return accept_sampled(
        probs.flatten(0, 1), torch.arange(probs[..., 0].numel()).view(probs.shape[:2]), *rest
    )


def random_case(seed, num_reqs):
    g = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(num_reqs, GAMMA + 1, VOCAB, generator=g) * 1.5, -1)
    ids = torch.rand(num_reqs, GAMMA, VOCAB, generator=g).argsort(-1)[..., :K]
    q = torch.softmax(torch.randn(num_reqs, GAMMA, K, generator=g), -1)
    point = torch.rand(num_reqs, 1, 1, generator=g) < 0.3  # some requests draft greedily
    q = torch.where(point, torch.nn.functional.one_hot(q.argmax(-1), K).float(), q)
    pick = (torch.rand(num_reqs, GAMMA, 1, generator=g) > q.cumsum(-1)[..., :1]).long()
    drafts = ids.gather(2, pick).squeeze(2)
    verify_lens = torch.randint(1, GAMMA + 2, (num_reqs,), generator=g)
    uniforms = torch.rand(num_reqs, GAMMA + 1, 2, generator=g, dtype=torch.float64)
    return probs, drafts, ids, q, verify_lens, uniforms[:, :-1, 0], uniforms[..., 1]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_sampled_equals_the_loop(seed):
    case = random_case(seed, 16)
    count, token, matched = accept_aligned(*case)
    arrays = [x.double().numpy() if x.is_floating_point() else x.numpy() for x in case]
    for r in range(16):
        of_r = [a[r] for a in arrays]
        assert (count[r].item(), token[r].item()) == reference_accept(*of_r)
        of_r[4] = GAMMA + 1  # no cutoff
        assert matched[r].item() == reference_accept(*of_r)[0]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_dense_q_equals_the_sparse_one(seed):
    probs, drafts, ids, q, *rest = random_case(seed, 16)
    dense = torch.zeros(*drafts.shape, VOCAB).scatter_(2, ids, q)
    expected = accept_aligned(probs, drafts, ids, q, *rest)
    for a, b in zip(accept_aligned(probs, drafts, None, dense, *rest), expected, strict=True):
        assert torch.equal(a, b)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), dense=st.booleans())
def test_what_lies_past_the_cutoff_does_not_matter(seed, dense):
    """NaN rows and q, and other drafts: the answer is the same."""
    probs, drafts, ids, q, verify_lens, *uniforms = random_case(seed, 32)
    candidates = None if dense else ids
    if dense:
        q = torch.zeros(*drafts.shape, VOCAB).scatter_(2, ids, q)
    before = accept_aligned(probs, drafts, candidates, q, verify_lens, *uniforms)
    position = torch.arange(GAMMA + 1)
    past = position >= verify_lens[:, None]
    probs[past] = float("nan")
    q[past[:, 1:]] = float("nan")
    drafts[past[:, 1:]] = 0
    after = accept_aligned(probs, drafts, candidates, q, verify_lens, *uniforms)
    assert all(torch.equal(x, y) for x, y in zip(before[:2], after[:2], strict=True))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_greedy_cuts_the_longest_match_and_reads_the_row_after_it(seed):
    g = torch.Generator().manual_seed(seed)
    target, drafts = (
        torch.randint(3, (16, GAMMA + 1), generator=g),
        torch.randint(3, (16, GAMMA), generator=g),
    )
    verify_lens = torch.randint(1, GAMMA + 2, (16,), generator=g)
    count, token, matched = accept_greedy(target, drafts, verify_lens)
    whole, _, _ = accept_greedy(target, drafts, torch.full((16,), GAMMA + 1))
    for r, length in enumerate(verify_lens.tolist()):
        raw = next((k for k in range(GAMMA) if target[r, k] != drafts[r, k]), GAMMA)
        assert whole[r] == matched[r] == raw
        assert count[r] == min(raw, length - 1)
        assert token[r] == target[r, count[r]]
    past = torch.arange(GAMMA + 1) >= verify_lens[:, None]
    target[past], drafts[past[:, 1:]] = -7, -7  # they even match
    again = accept_greedy(target, drafts, verify_lens)
    assert torch.equal(again[0], count)
    assert torch.equal(again[1], token)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_packed_rows_are_enough(seed):
    """Only verified rows exist, packed, with other people's rows around them; past the cutoff anything is named."""
    probs, drafts, ids, q, verify_lens, *uniforms = random_case(seed, 16)
    position = torch.arange(GAMMA + 1)
    verified = position < verify_lens[:, None]
    packed = torch.cat((torch.full((3, VOCAB), float("nan")), probs[verified], torch.full((5, VOCAB), 9.0)))
    block_rows = 3 + (verified.flatten().cumsum(0) - 1).view(verified.shape)
    expected = accept_aligned(probs, drafts, ids, q, verify_lens, *uniforms)
    found = accept_sampled(packed, block_rows, drafts, ids, q, verify_lens, *uniforms)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_greedy_by_hand():
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [1, 0, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    count, token, matched = accept_greedy(target, drafts, torch.tensor([4, 4, 2, 4, 1]))
    assert count.tolist() == [3, 1, 1, 0, 0]
    assert token.tolist() == [4, 2, 2, 9, 1]
    assert matched.tolist() == [3, 1, 3, 0, 3]


def draw_first_two(num, q, lie=False):
    """Two-token outputs of many one-step requests; every target row depends on the token before it."""
    p_first = torch.tensor([0.35, 0.05, 0.2, 0.25, 0.1, 0.05])
    p_second = torch.stack([p_first.roll(s) for s in range(VOCAB)])
    ids = torch.tensor([3, 0])
    u = step_uniforms(torch.arange(num), torch.zeros(num).long(), torch.zeros(num).long(), 2)
    drawn = torch.zeros(num).long() if lie else sample_categorical(q.expand(num, -1), u[:, 0, 0])
    drafts = ids[drawn][:, None]
    probs = torch.stack([p_first.expand(num, -1), p_second[drafts[:, 0]]], 1)
    candidates, q = ids.expand(num, 1, -1), q.expand(num, 1, -1)
    count, token, _ = accept_aligned(
        probs, drafts, candidates, q, torch.full((num,), 2), u[:, :1, 1], u[:, :, 2]
    )
    first = torch.where(count > 0, drafts[:, 0], token)
    second = token[count > 0]
    return first, (first[count > 0], second), p_first, p_second


def test_emitted_tokens_follow_the_target():
    num = 60_000
    first, (given_first, second), p_first, p_second = draw_first_two(num, torch.tensor([0.7, 0.3]))
    counts = torch.bincount(first, minlength=VOCAB).numpy()
    assert chisquare(counts, p_first.numpy() / p_first.sum().item() * num).pvalue > 1e-3
    for token in (0, 3):
        counts = torch.bincount(second[given_first == token], minlength=VOCAB).numpy()
        assert chisquare(counts, p_second[token].numpy() * counts.sum()).pvalue > 1e-3


def test_a_wrong_q_is_noticed():
    """The negative control: argmax drafts verified as if they had been drawn bias the output."""
    num = 60_000
    first, _, p_first, _ = draw_first_two(num, torch.tensor([0.7, 0.3]), lie=True)
    counts = torch.bincount(first, minlength=VOCAB).numpy()
    assert chisquare(counts, p_first.numpy() / p_first.sum().item() * num).pvalue < 1e-6
