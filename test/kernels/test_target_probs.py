"""The serving distribution against a float64 loop written from the definitions, one row at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.kernels.target_probs import adjust_logits, sample_categorical, target_probs

VOCAB = 11


def reference_probs(logits, temperature, top_k, top_p, min_p):
    scaled = [x / temperature for x in logits]
    peak = max(scaled)
    weights = [math.exp(x - peak) for x in scaled]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 1 <= top_k < len(logits):
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    if top_p < 1.0:
        kept, mass = [], 0.0
        for i in order:
            if kept and mass >= top_p:
                break
            kept.append(i)
            mass += weights[i] / total
        order = kept
    total = sum(weights[i] for i in order)
    order = [i for i in order if weights[i] / total >= min_p * weights[order[0]] / total]
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(logits))]


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 3, VOCAB, VOCAB + 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.517, 1e-6]),
    min_p=st.sampled_from([0.0, 0.083, 0.31]),
)
def test_matches_the_definitions(logits, temperature, top_k, top_p, min_p):
    got = target_probs(
        torch.tensor([logits]),
        torch.tensor([temperature]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )[0]
    wanted = reference_probs(logits, temperature, top_k, top_p, min_p)
    assert got.tolist() == [(w if w == 0 else pytest.approx(w, rel=2e-5)) for w in wanted]


def test_rows_keep_their_own_settings():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    temperature, top_k = torch.tensor([1.0, 0.5, 1.0, 2.0]), torch.tensor([-1, 2, 4, 1])
    top_p, min_p = torch.tensor([1.0, 1.0, 0.6, 1.0]), torch.tensor([0.0, 0.0, 0.2, 0.0])
    together = target_probs(logits, temperature, top_k, top_p, min_p)
    for i in range(4):
        row = slice(i, i + 1)
        alone = target_probs(logits[row], temperature[row], top_k[row], top_p[row], min_p[row])
        assert torch.equal(together[i], alone[0])
    assert (together > 0).sum(1).tolist()[1::2] == [2, 1]


def test_adjustments_follow_their_formulas():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, -1.0, 3.0]])
    counts = torch.tensor([[2, 1, 0, 0, 0, 0]])
    prompt = torch.tensor([[False, False, True, False, True, False]])
    bias = torch.tensor([[0.0, 0.0, 0.0, 5.0, 0.0, 0.0]])
    suppressed = torch.tensor([[False, False, False, False, False, True]])
    got = adjust_logits(
        logits,
        counts,
        prompt,
        torch.tensor([2.0]),
        torch.tensor([0.5]),
        torch.tensor([0.25]),
        bias,
        suppressed,
    )
    # repetition halves 2.0 and 1.0, doubles -2.0 and -1.0; frequency and presence see the output only
    wanted = [1.0 - 0.5 * 2 - 0.25, -4.0 - 0.5 - 0.25, 0.5, 5.5, -2.0, float("-inf")]
    assert got[0].tolist() == wanted


def test_neutral_adjustment_changes_nothing():
    logits = torch.randn(3, VOCAB)
    counts = torch.randint(0, 3, (3, VOCAB))
    off = torch.zeros(3, VOCAB, dtype=torch.bool)
    got = adjust_logits(
        logits, counts, ~off, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.zeros(3, VOCAB), off
    )
    assert torch.equal(got, logits)


def test_categorical_draws_by_inverse_cdf_and_never_weight_zero():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).expand(6, -1)
    edge = 2.0**-33
    uniforms = torch.tensor([edge, 0.2499, 0.2501, 0.7499, 0.7501, 1 - edge], dtype=torch.float64)
    assert sample_categorical(weights, uniforms).tolist() == [1, 1, 3, 3, 4, 4]
    # the total itself, reached by rounding, still gives the last token with weight
    assert sample_categorical(weights[:1] * 3, torch.ones(1, dtype=torch.float64)).tolist() == [4]
