"""Allocation: the worked example, and the properties that keep it exact and deterministic."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.kernels.allocate import allocate

CONFIDENCE = torch.tensor([[0.9, 0.8, 0.5], [0.6, 0.5, 0.9], [0.9, 0.5, 0.8]])
LENS = [
    [1, 1, 1],
    [2, 1, 1],
    [2, 1, 2],
    [3, 1, 2],
    [3, 2, 2],
    [3, 2, 3],
    [4, 2, 3],
    [4, 2, 4],
    [4, 3, 4],
    [4, 4, 4],
]
EPS = 1e-6


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def reference(confidence, budget, floors, caps, eps):
    """One pair after the other, in Python; float32 products like the kernel's."""
    num_reqs, gamma = confidence.shape
    pairs = []
    for r in range(num_reqs):
        survival = np.float32(1.0)
        for k in range(gamma):
            c = float(confidence[r, k])
            survival = survival * np.float32(0.0 if np.isnan(c) else min(max(c, 0.0), 1.0))
            if min(floors[r], caps[r]) - 1 <= k < caps[r] - 1 and survival >= eps:
                pairs.append((-survival, k, r))
    lens = [min(f, c) for f, c in zip(floors, caps, strict=True)]
    admitted = sorted(pairs)[:budget]
    for _, _, r in admitted:
        lens[r] += 1
    return lens, {(r, k) for _, k, r in admitted}, {(r, k): -s for s, k, r in pairs}


@st.composite
def cases(draw, odd=False):
    """Few distinct values, so that ties are everywhere."""
    n, gamma = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    values = [0.0, 0.25, 0.5, 0.5, 0.9, 1.0, 1e-4] + ([float("nan"), -1.0, 2.0, float("inf")] if odd else [])
    c = draw(
        st.lists(st.lists(st.sampled_from(values), min_size=gamma, max_size=gamma), min_size=n, max_size=n)
    )
    floors = draw(st.lists(st.integers(1, gamma + 1), min_size=n, max_size=n))
    caps = draw(st.lists(st.integers(1, gamma + 1), min_size=n, max_size=n))
    return torch.tensor(c, dtype=torch.float32), draw(st.integers(0, n * gamma + 2)), floors, caps


@pytest.mark.parametrize("budget", range(10))
def test_worked_example(budget):
    lens = allocate(CONFIDENCE, budget, ints(1, 1, 1), ints(4, 4, 4), EPS)
    assert lens.tolist() == LENS[budget] and lens.dtype == torch.int64


@settings(max_examples=200, deadline=None)
@given(case=cases(odd=True), eps=st.sampled_from([0.0, EPS, 0.3]))
def test_equals_the_reference_with_ties_zeros_and_nonsense(case, eps):
    confidence, budget, floors, caps = case
    lens, admitted, survival = reference(confidence, budget, floors, caps, eps)
    got = allocate(confidence, budget, ints(*floors), ints(*caps), eps)
    assert got.tolist() == lens
    assert allocate(confidence, torch.tensor(budget), ints(*floors), ints(*caps), eps).tolist() == lens
    # Prefix: what is admitted of a request is the run of drafts from its floor on.
    for r, (floor, cap) in enumerate(zip(floors, caps, strict=True)):
        first = min(floor, cap) - 1
        assert {k for row, k in admitted if row == r} == set(range(first, got[r].item() - 1))
    # Optimality.
    left = [s for pair, s in survival.items() if pair not in admitted]
    assert not left or not admitted or max(left) <= min(survival[pair] for pair in admitted)


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_bounds_nesting_and_what_is_spent(case):
    confidence, _, floors, caps = case
    lower, upper = torch.minimum(ints(*floors), ints(*caps)), ints(*caps)
    room = int((upper - lower).sum())
    before = lower
    for budget in range(confidence.numel() + 2):
        lens = allocate(confidence, budget, ints(*floors), ints(*caps), 0.0)
        assert (lens >= lower).all() and (lens <= upper).all()
        assert int((lens - lower).sum()) == min(budget, room)  # eps 0: every survival counts
        assert int((lens - before).sum()) == (0 < budget <= room) and (lens >= before).all()
        before = lens


@settings(max_examples=100, deadline=None)
@given(case=cases(), data=st.data())
def test_a_later_draft_never_decides_about_an_earlier_one(case, data):
    confidence, budget, floors, caps = case
    n, gamma = confidence.shape
    r, k = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, gamma - 1))
    changed = confidence.clone()
    changed[r, k] = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    one, other = (
        allocate(c, budget, ints(*floors), ints(*caps), EPS)[r].item() for c in (confidence, changed)
    )
    # Draft j is admitted iff the length exceeds j + 1; those before k are the same.
    assert min(one, k + 1) == min(other, k + 1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_permuting_requests_permutes_lengths(seed):
    g = torch.Generator().manual_seed(seed)
    confidence = torch.rand(7, 4, generator=g)  # no ties
    floors, caps = torch.randint(1, 3, (7,), generator=g), torch.randint(2, 6, (7,), generator=g)
    order = torch.randperm(7, generator=g)
    lens = allocate(confidence, 9, floors, caps, EPS)
    assert torch.equal(allocate(confidence[order], 9, floors[order], caps[order], EPS), lens[order])
    assert torch.equal(allocate(confidence.clone(), 9, floors.clone(), caps.clone(), EPS), lens)  # a replica


def test_ties_go_to_the_smaller_position_then_to_the_smaller_request():
    ones = torch.ones(3, 3)
    lens = [allocate(ones, b, ints(1, 1, 1), ints(4, 4, 4), EPS).tolist() for b in range(10)]
    assert lens[:5] == [[1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2], [3, 2, 2]]


def test_inputs_are_left_alone_and_empty_ones_allowed():
    confidence = torch.tensor([[float("nan"), 2.0]])
    floors, caps = ints(3), ints(2)
    assert allocate(confidence, 5, floors, caps, EPS).tolist() == [2]  # a floor above the cap is the cap
    assert floors.tolist() == [3] and torch.isnan(confidence[0, 0]) and confidence[0, 1] == 2.0
    assert allocate(torch.ones(2, 0), 5, ints(1, 1), ints(1, 1), EPS).tolist() == [1, 1]
    assert allocate(torch.ones(0, 3), 5, ints(), ints(), EPS).tolist() == []
