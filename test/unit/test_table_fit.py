"""Fitting cost tables: synthetic costs are recovered, noise cannot make a table fall, and edges are extended."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.speculative.table_fit import (
    StepSample,
    extended,
    fit_additive,
    fit_plain,
    fit_tables,
    nonnegative_least_squares,
    pool_adjacent,
    predict_additive,
    sparse_probes,
)

BATCHES, WIDTH = (1, 2, 4, 8, 16), 8


def cells(budgets=(0.0, 0.5, 1.0)) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(n, n + int(share * n * (WIDTH - 1))) for n in BATCHES for share in budgets]
    return tuple(np.array(column) for column in zip(*pairs, strict=True))


def true_seconds(num_reqs: np.ndarray, num_rows: np.ndarray) -> np.ndarray:
    """5 ms, 2 ms for each request and 0.5 ms for each row above 16, 0.1 below."""
    return 5e-3 + 2e-3 * num_reqs + 1e-4 * np.minimum(num_rows, 16) + 5e-4 * np.maximum(num_rows - 16, 0)


def test_additive_costs_are_recovered():
    """Exactly: the kink lies on a probe, and both terms are linear elsewhere."""
    num_reqs, num_rows = cells()
    seconds = true_seconds(num_reqs, num_rows)
    table = fit_additive(num_reqs, num_rows, seconds)
    assert 16 in table.m_probes
    assert table.bs_probes == BATCHES
    assert table.alpha_seconds[0] == table.theta_seconds[0] == 0.0
    assert predict_additive(table, num_reqs, num_rows) == pytest.approx(seconds, rel=1e-6)
    held_out = (np.array([3, 6, 12]), np.array([16, 36, 96]))
    assert predict_additive(table, *held_out) == pytest.approx(true_seconds(*held_out), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), noise=st.sampled_from([0.0, 0.1, 0.5]))
def test_a_fit_never_falls(seed, noise):
    rng = np.random.default_rng(seed)
    num_reqs, num_rows = cells((0.0, 0.25, 0.5, 1.0))
    seconds = true_seconds(num_reqs, num_rows) * np.exp(rng.normal(0, noise, len(num_reqs)))
    table = fit_additive(num_reqs, num_rows, seconds)
    assert table.bias_seconds > 0
    assert (np.diff(table.alpha_seconds) >= 0).all()
    assert (np.diff(table.theta_seconds) >= 0).all()
    if noise <= 0.1:  # one sample a cell: beyond that the truth is lost in the noise
        error = np.log(predict_additive(table, num_reqs, num_rows) / true_seconds(num_reqs, num_rows))
        assert np.abs(error).mean() <= max(0.03, 1.5 * noise)


def test_noise_is_smoothed_away_and_a_real_stair_is_not():
    """A staircase of 30 % at 16 rows: seen where times are exact. Where they are not, the fit that is told so is
    nearer to a straight truth than the one that believes every sample."""
    num_reqs, num_rows = cells((0.0, 0.25, 0.5, 0.75, 1.0))
    stairs = 5e-3 + 1e-3 * num_reqs + 5e-3 * (num_rows > 16)
    exact, nearly = (fit_additive(num_reqs, num_rows, stairs, noise) for noise in (0.0, 0.002))
    assert predict_additive(exact, num_reqs, num_rows).max() > 1.2 * (5e-3 + 1e-3 * 16)
    assert predict_additive(nearly, num_reqs, num_rows) == pytest.approx(
        predict_additive(exact, num_reqs, num_rows), rel=0.01
    )
    straight = 5e-3 + 1e-3 * num_reqs + 1e-4 * num_rows
    errors = {0.0: [], 0.15: []}
    for seed in range(20):
        seen = straight * np.exp(np.random.default_rng(seed).normal(0, 0.15, len(straight)))
        for noise, of_noise in errors.items():
            found = predict_additive(fit_additive(num_reqs, num_rows, seen, noise), num_reqs, num_rows)
            of_noise.append(np.abs(found / straight - 1).mean())
    assert np.mean(errors[0.15]) < 0.7 * np.mean(errors[0.0])


def test_pooled_neighbours_by_example():
    assert pool_adjacent([1, 3, 2, 2, 5, 4], [1] * 6) == pytest.approx([1, 7 / 3, 7 / 3, 7 / 3, 4.5, 4.5])
    assert pool_adjacent([3, 1], [1, 3]) == [1.5, 1.5]


@given(values=st.lists(st.floats(0.1, 10), min_size=1, max_size=12), seed=st.integers(0, 100))
def test_pooled_neighbours_rise_and_keep_their_mean(values, seed):
    weights = np.random.default_rng(seed).integers(1, 5, len(values)).astype(float)
    pooled = pool_adjacent(values, weights)
    assert (np.diff(pooled) >= 0).all()
    assert np.dot(pooled, weights) == pytest.approx(np.dot(values, weights))
    if (np.diff(values) >= 0).all():
        assert pooled == pytest.approx(values)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 12), unknowns=st.integers(1, 8))
def test_least_squares_equal_scipys(seed, rows, unknowns):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rows, unknowns)), rng.normal(size=rows)
    found, (_, residual) = nonnegative_least_squares(a, b), scipy.optimize.nnls(a, b)
    assert (found >= 0).all()
    assert np.linalg.norm(a @ found - b) == pytest.approx(residual, abs=1e-6)


def test_probes_are_the_ends_and_some_between():
    assert sparse_probes(np.array([1, 2, 3, 4, 5, 8, 9, 100, 101])) == [1, 2, 3, 5, 8, 101]
    assert sparse_probes(np.array([7, 7])) == [7]


def test_axes_are_extended_on_their_last_slope():
    assert extended((1, 4, 8), (0.0, 1.0, 3.0), 12) == ((1, 4, 8, 12), (0.0, 1.0, 3.0, 5.0))
    assert extended((1, 4), (0.0, 1.0), 4) == ((1, 4), (0.0, 1.0))
    assert extended((1,), (2.0,), 8) == ((1,), (2.0,))


def test_plain_steps_are_lower_quartiles_that_never_fall():
    samples = [
        StepSample(1, 1, False, (9.0, 2.0, 3.0)),
        StepSample(4, 4, False, (1.0,)),
        StepSample(8, 8, False, (9.0, 5.0, 8.0, 4.0, 7.0)),
    ]
    plain = fit_plain(samples, 16)
    assert plain.num_reqs_probes == (1, 4, 8, 16)
    assert plain.seconds == (1.5, 1.5, 5.0, 12.0)
    assert fit_plain([], 16) is None


def test_both_tables_reach_the_largest_step():
    num_reqs, num_rows = cells()
    samples = [
        StepSample(int(n), int(m), True, (float(s),))
        for n, m, s in zip(num_reqs, num_rows, true_seconds(num_reqs, num_rows), strict=True)
    ]
    fitted = fit_tables([*samples, StepSample(1, 1, False, (1e-3,))], 32, 256)
    assert (fitted.table.bs_probes[-1], fitted.table.m_probes[-1]) == (32, 256)
    assert fitted.table.step_seconds(32, np.array([256]))[0] == pytest.approx(
        float(true_seconds(np.array(32), np.array(256))), rel=1e-6
    )
    assert fitted.worst_error == pytest.approx(0, abs=1e-6)
    assert fitted.plain.step_seconds(32) == 1e-3
