"""The estimator's arithmetic against float64, a dense Newton solve, and streams whose truth is known."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.kernels.estimator import (
    FEATURE_LIMIT,
    MAX_STEP,
    NUM_MOMENTS,
    RIDGE,
    logit_of_largest,
    observe,
    observed_mask,
    predict,
    refit,
)


def logit_in_float64(scores, temperature):
    """The definition, one row at a time: log of the largest probability over the others' sum."""
    flat = scores.double().flatten(0, -2)
    divisor = temperature.double().expand(scores.shape[:-1]).flatten()
    values = []
    for row, t in zip(flat, divisor, strict=True):
        z = row / t
        others = torch.cat((z[: z.argmax()], z[z.argmax() + 1 :]))
        value = z.max() - torch.logsumexp(others, 0) if len(others) else z.new_tensor(math.inf)
        values.append(value.clamp(-FEATURE_LIMIT, FEATURE_LIMIT))
    return torch.stack(values).view(scores.shape[:-1])


@pytest.mark.parametrize("k", [1, 2, 16, 300])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_feature_equals_float64(k, scale):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(6, 7, k, generator=generator) * scale
    temperature = torch.rand(6, 1, generator=generator) * 2 + 0.05
    expected = logit_in_float64(scores, temperature)
    got = logit_of_largest(scores.clone(), temperature)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-6)


def test_feature_example():
    scores = torch.tensor([[0.7, 0.2, 0.1]]).log()
    assert logit_of_largest(scores, torch.ones(1)).item() == pytest.approx(0.8473, abs=1e-4)


def test_feature_keeps_its_precision_where_the_maximum_is_nearly_certain():
    """float32 has no 1 - 1e-10, and `log q - log(1 - q)` would be infinite from a gap of 17 on."""
    for gap in (10.0, 17.0, 25.0, 39.5):
        assert logit_of_largest(torch.tensor([gap, 0.0]), torch.tensor(1.0)).item() == pytest.approx(gap)


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8),
    st.floats(-1000, 1000, width=32),
    st.sampled_from([1e-5, 0.3, 1.0, 2.0]),
)
def test_feature_is_clamped_and_ignores_a_shift(scores, shift, temperature):
    row, t = torch.tensor(scores, dtype=torch.float64), torch.tensor(temperature, dtype=torch.float64)
    feature = logit_of_largest(row.float(), t.float())
    assert -FEATURE_LIMIT <= feature <= FEATURE_LIMIT
    torch.testing.assert_close(logit_of_largest(row + shift, t), logit_of_largest(row, t), atol=1e-6, rtol=0)


def test_feature_is_monotone_in_q_max():
    others = torch.tensor([0.5, 0.3, 0.2]).log()
    q_max = torch.linspace(0.51, 0.999, 50)
    rows = torch.cat((q_max.log()[:, None], others + torch.log1p(-q_max)[:, None]), dim=1)
    feature = logit_of_largest(rows, torch.ones(50))
    assert (feature.diff() > 0).all()
    torch.testing.assert_close(feature, torch.logit(q_max), atol=1e-4, rtol=0)


def test_feature_of_ties():
    assert logit_of_largest(torch.zeros(4), torch.tensor(1.0)).item() == pytest.approx(-math.log(3))


def test_predict_picks_the_class():
    slope, intercepts = torch.tensor([0.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = predict(torch.tensor([[5.0, 6.0], [5.0, 6.0]]), torch.tensor([1, 0]), slope, intercepts)
    torch.testing.assert_close(got, torch.sigmoid(torch.tensor([[13.0, 16.0], [1.0, 2.0]])))
    alone = predict(torch.tensor([[5.0, 6.0]]), None, slope[1:], intercepts[1:])
    assert torch.equal(alone, got[:1])


def empty(num_classes, gamma):
    return torch.zeros(num_classes, NUM_MOMENTS, gamma, dtype=torch.float64)


def observe_one_class(moments, feature, prediction, num_accepted, verify_lens, eligible=None):
    num_reqs = len(feature)
    observe(
        moments,
        feature,
        prediction,
        torch.zeros(num_reqs, dtype=torch.int64),
        num_accepted,
        verify_lens,
        torch.ones(num_reqs, dtype=torch.bool) if eligible is None else eligible,
    )


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=20))
def test_observed_positions(gamma, outcomes):
    """Observed iff k <= a and k < v; altogether min(a + 1, v) of them."""
    lens = torch.tensor([min(length, gamma + 1) for _, length in outcomes], dtype=torch.int64)
    accepted = torch.minimum(torch.tensor([a for a, _ in outcomes], dtype=torch.int64), lens - 1)
    mask = observed_mask(accepted, lens, gamma)
    for r in range(len(outcomes)):
        a, v = int(accepted[r]), int(lens[r]) - 1
        assert mask[r].tolist() == [k <= a and k < v for k in range(gamma)]
    moments = empty(1, gamma)
    observe_one_class(
        moments, torch.ones(len(outcomes), gamma), torch.full((len(outcomes), gamma), 0.5), accepted, lens
    )
    assert moments[0, 5].sum() == torch.minimum(accepted + 1, lens - 1).sum()


def test_check_values():
    """Observations (k, f, y) = (0, 2, 1) (1, .5, 0) (0, -1, 0) (0, 3, 1) from the prior w = 0, b = 1.5."""
    feature = torch.tensor([[2.0, 0.5], [-1.0, 9.0], [3.0, 9.0]])
    slope, intercepts = torch.zeros(1), torch.full((1, 2), 1.5)
    prediction = predict(feature, torch.zeros(3, dtype=torch.int64), slope, intercepts)
    moments = empty(1, 2)
    observe_one_class(
        moments, feature, prediction, torch.tensor([1, 0, 1]), torch.tensor([3, 3, 2])
    )  # the third request verified one draft
    assert moments[0, 5].tolist() == [3, 1]
    assert moments[0, 0].sum().item() + RIDGE == pytest.approx(2.12634, abs=1e-5)
    assert moments[0, 1].sum().item() == pytest.approx(1.32091, abs=1e-5)
    undamped = torch.zeros(1, dtype=torch.float64)
    refit(undamped, intercepts.double(), moments.clone(), damping=0.0)
    assert undamped.item() == pytest.approx(1.79779, abs=1e-5)
    refit(slope, intercepts, moments)
    assert slope.item() == pytest.approx(0.133170, abs=1e-6)
    assert intercepts[0].tolist() == pytest.approx([1.432827, 1.391935], abs=1e-6)
    assert not moments.any()


def random_window(num_reqs, gamma, seed, slope=0.3, intercept=0.5):
    g = torch.Generator().manual_seed(seed)
    feature = torch.randn(num_reqs, gamma, generator=g) * 2
    prediction = predict(
        feature,
        torch.zeros(num_reqs, dtype=torch.int64),
        torch.tensor([slope]),
        torch.full((1, gamma), intercept),
    )
    lens = torch.randint(1, gamma + 2, (num_reqs,), generator=g)
    accepted = (torch.rand(num_reqs, generator=g) * lens).long().clamp(max=gamma)
    return feature, prediction, torch.minimum(accepted, lens - 1), lens


@pytest.mark.parametrize("gamma", [1, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_refit_equals_the_dense_newton_solve(gamma, seed):
    """(1 + gamma) parameters, Hessian and gradient summed one observation at a time, one ridge solve."""
    feature, prediction, accepted, lens = random_window(60, gamma, seed)
    hessian = torch.eye(gamma + 1, dtype=torch.float64) * RIDGE
    gradient = torch.zeros(gamma + 1, dtype=torch.float64)
    for r in range(len(feature)):
        for k in range(gamma):
            if k <= accepted[r] and k < lens[r] - 1:
                x = torch.zeros(gamma + 1, dtype=torch.float64)
                x[0], x[1 + k] = feature[r, k], 1.0
                p = prediction[r, k].double()
                hessian += p * (1 - p) * torch.outer(x, x)
                gradient += (float(k < accepted[r]) - p) * x
    expected = torch.linalg.solve(hessian, gradient)
    assert expected[0] > -10.0  # a slope may not fall below zero: start high enough
    slope, intercepts = torch.full((1,), 10.0).double(), torch.full((1, gamma), 0.5).double()
    moments = empty(1, gamma)
    observe_one_class(moments, feature, prediction, accepted, lens)
    refit(slope, intercepts, moments, damping=0.0, max_step=math.inf)
    torch.testing.assert_close(slope - 10.0, expected[:1], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(intercepts[0] - 0.5, expected[1:], atol=1e-9, rtol=1e-9)


def test_intercepts_follow_the_damped_slope_step():
    feature, prediction, accepted, lens = random_window(30, 3, 0)
    moments = empty(1, 3)
    observe_one_class(moments, feature, prediction, accepted, lens)
    _, _, mixed, weight, error, count = moments[0].clone()
    slope, intercepts = torch.full((1,), 5.0).double(), torch.zeros(1, 3).double()
    refit(slope, intercepts, moments, damping=20.0)
    step = slope.item() - 5.0
    expected = (error - mixed * step) / (weight + RIDGE) * count / (count + 20.0)
    torch.testing.assert_close(intercepts[0], expected)


def test_a_position_without_observations_keeps_its_intercept():
    feature, prediction, _, _ = random_window(30, 3, 0)
    for damping in (0.0, 50.0):
        moments = empty(1, 3)
        lens = torch.full((30,), 3)
        observe_one_class(moments, feature, prediction, torch.full((30,), 2), lens)
        slope, intercepts = torch.ones(1), torch.tensor([[0.1, 0.2, 0.3]])
        refit(slope, intercepts, moments, damping=damping)
        assert intercepts[0, 2] == torch.tensor(0.3)
        assert intercepts[0, 0] != torch.tensor(0.1)


def test_an_empty_window_changes_nothing():
    slope, intercepts = torch.ones(2), torch.rand(2, 3)
    before = intercepts.clone()
    refit(slope, intercepts, empty(2, 3))
    refit(slope, intercepts, empty(2, 3), damping=0.0)
    assert torch.equal(slope, torch.ones(2))
    assert torch.equal(intercepts, before)


def test_a_negative_slope_is_not_taken():
    """Acceptance that falls with the feature: the slope stays, the intercepts still learn."""
    feature = torch.tensor([[3.0], [-3.0]]).repeat(50, 1)
    slope, intercepts, moments = torch.tensor([0.1]), torch.zeros(1, 1), empty(1, 1)
    prediction = torch.full((100, 1), 0.7)
    observe_one_class(moments, feature, prediction, torch.tensor([0, 1] * 50), torch.full((100,), 2))
    refit(slope, intercepts, moments)
    assert slope == torch.tensor([0.1])
    assert intercepts[0, 0] < 0


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 1e-3, 1.0, 40.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_refit_stays_finite_and_its_slope_positive(seed, scale, certainty):
    g = torch.Generator().manual_seed(seed)
    feature = (torch.randn(20, 3, generator=g) * scale).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)
    prediction = torch.rand(20, 3, generator=g) if certainty == 0.5 else torch.full((20, 3), certainty)
    lens = torch.randint(1, 5, (20,), generator=g)
    accepted = torch.minimum((torch.rand(20, generator=g) * 4).long(), lens - 1)
    slope, intercepts, moments = torch.rand(1, generator=g), torch.randn(1, 3, generator=g), empty(1, 3)
    start, first = slope.clone(), intercepts.clone()
    observe_one_class(moments, feature, prediction, accepted, lens)
    refit(slope, intercepts, moments)
    assert slope.isfinite().all()
    assert intercepts.isfinite().all()
    assert slope >= 0
    assert (slope - start).abs() <= MAX_STEP + 1e-5
    assert ((intercepts - first).abs() <= MAX_STEP + 1e-5).all()


def test_excluded_rows_and_broken_values_leave_no_trace():
    feature, prediction, accepted, lens = random_window(12, 4, 1)
    clean, dirty = empty(1, 4), empty(1, 4)
    observe_one_class(clean, feature[:6], prediction[:6], accepted[:6], lens[:6])
    feature[6:] = float("nan")
    observe_one_class(dirty, feature, prediction, accepted, lens, torch.arange(12) < 6)
    assert torch.equal(clean, dirty)
    lens[6:], accepted[6:] = 5, 4
    observe_one_class(dirty, feature[6:], prediction[6:], accepted[6:], lens[6:])
    assert torch.equal(clean, dirty)


def test_classes_do_not_mix():
    feature, prediction, accepted, lens = random_window(40, 4, 2)
    classes, everyone = torch.arange(40) % 2, torch.ones(40, dtype=torch.bool)
    both = empty(2, 4)
    observe(both, feature, prediction, classes, accepted, lens, everyone)
    for c in range(2):
        alone = empty(1, 4)
        chosen = classes == c
        observe_one_class(alone, feature[chosen], prediction[chosen], accepted[chosen], lens[chosen])
        torch.testing.assert_close(both[c : c + 1], alone)
    slope, intercepts = torch.zeros(2), torch.zeros(2, 4)
    both[1] = 0
    refit(slope, intercepts, both)
    assert intercepts[0].any()
    assert not intercepts[1].any()


def test_coefficients_and_sums_are_updated_where_they_lie():
    feature, prediction, accepted, lens = random_window(40, 4, 3)
    slope, intercepts, moments = torch.zeros(1), torch.zeros(1, 4), empty(1, 4)
    places = [t.data_ptr() for t in (slope, intercepts, moments)]
    observe_one_class(moments, feature, prediction, accepted, lens)
    assert moments.any()
    refit(slope, intercepts, moments)
    assert intercepts.any()
    assert [t.data_ptr() for t in (slope, intercepts, moments)] == places
