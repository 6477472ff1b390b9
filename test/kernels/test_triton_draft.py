"""Triton kernels of the draft: convolution, the two walks, their uniforms, and the acceptance estimator."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flashspark.kernels import estimator
from flashspark.kernels.block_conv import dynamic_block_conv
from flashspark.kernels.markov_walk import MarkovWeights, markov_walk
from flashspark.kernels.philox import step_uniforms
from flashspark.kernels.selector import (
    selector_walk,
    selector_walk_with_confidence,
    selector_walk_with_feature,
)
from parity import DEVICE, DTYPES, NEEDS_TRITON, assert_close, integers, rand, randn

pytestmark = NEEDS_TRITON
NAN = float("nan")


@DTYPES
@pytest.mark.parametrize(
    ("shape", "taps", "groups"), [((2, 4, 48), 2, 6), ((1, 1, 16), 3, 1), ((1, 3, 600), 4, 75)]
)
def test_dynamic_block_conv(dtype, shape, taps, groups):
    y, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    base = randn(2, taps, shape[2], dtype=dtype, seed=2)
    delta = randn(*shape[:2], 2 * taps * groups, dtype=dtype, seed=3)
    for side in (0, 1):
        for add in (None, residual):
            exact = (y.float(), base.float(), delta.float(), side, None if add is None else add.float())
            expected = dynamic_block_conv(*exact, "torch")
            got = dynamic_block_conv(y, base, delta, side, add, "triton")
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), expected, atol=LIMITS[dtype], rtol=LIMITS[dtype])


# A coefficient rounded another way, times a value of 3 or 4, summed over the taps.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.15, torch.float16: 1.5e-2}


def walk_case(num_reqs, num_slots, k, rank, dtype):
    vocab_size = 60
    ids = rand(num_reqs, num_slots, vocab_size).argsort(-1)[..., :k].contiguous()
    codebooks = [randn(vocab_size, rank, dtype=dtype, seed=s) for s in (1, 2)]
    return (
        randn(num_reqs, num_slots, k, seed=3),
        ids,
        integers(list(range(num_reqs))),
        randn(num_reqs, num_slots, rank, dtype=dtype, seed=4),
        *codebooks,
        0.3 + rand(num_reqs, seed=5),
        (rand(num_reqs, seed=6) < 0.4).to(DEVICE),
        rand(num_reqs, num_slots, dtype=torch.float64, seed=7),
    )


@DTYPES
@pytest.mark.parametrize(
    ("num_reqs", "num_slots", "k", "rank"), [(3, 4, 5, 12), (1, 2, 16, 256), (1, 3, 1, 8)]
)
def test_selector_walk(dtype, num_reqs, num_slots, k, rank):
    """Against the reference in float32: the kernel does not round products to the codebooks' dtype."""
    case = walk_case(num_reqs, num_slots, k, rank, dtype)
    wide = [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in case]
    tokens, q, feature = selector_walk_with_feature(*wide, implementation="torch")
    got = selector_walk_with_feature(*case, implementation="triton")
    assert torch.equal(got[0], tokens)
    assert_close(got[1], q, 2e-5)
    assert_close(got[2], feature, 1e-4)
    got = selector_walk(*case, implementation="triton")
    assert torch.equal(got[0], tokens)
    assert_close(got[1], q, 2e-5)


def test_selector_walk_of_greedy_rows_reads_no_noise():
    *case, greedy, uniforms = walk_case(4, 5, 6, 12, torch.float32)
    greedy, noise = torch.ones_like(greedy), torch.full_like(uniforms, NAN)
    expected = selector_walk(*case, greedy, uniforms, False, implementation="torch")
    for any_sampled in (False, True):
        got = selector_walk(*case, greedy, noise, any_sampled, implementation="triton")
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_selector_walk_gives_ties_to_the_first_candidate():
    scores, ids, anchors, projected, a, b, temperature, greedy, uniforms = walk_case(
        2, 3, 5, 8, torch.float32
    )
    scores[:] = torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0])
    args = (scores, ids, anchors, projected * 0, a, b, temperature, greedy | True, uniforms)
    tokens, _ = selector_walk(*args, implementation="triton")
    assert torch.equal(tokens, ids[..., 1])


def row_estimator(num_classes, gamma, kinds):
    """An estimator whose tensors lie between NaN, and the tensor with room for a row before and after its values."""
    num_rows = len(kinds)
    values = torch.full((num_rows + 2, 2, gamma), NAN, device=DEVICE)
    slope, intercepts = (
        torch.full((shape + 2, *more), NAN, device=DEVICE)
        for shape, *more in ((num_classes,), (num_classes, gamma))
    )
    slope[1:-1], intercepts[1:-1] = rand(num_classes), randn(num_classes, gamma, seed=1)
    return estimator.RowEstimator(integers(kinds), slope[1:-1], intercepts[1:-1], values[1:-1]), values


def with_confidence(case, any_sampled, rows, kinds, num_classes, implementation):
    """What the walk with confidence returns, and the values that it left by row, with one before and one after."""
    model, values = row_estimator(num_classes, case[1].shape[1], kinds)
    found = selector_walk_with_confidence(*case, any_sampled, rows, model, implementation)
    return *found, values


@DTYPES
@pytest.mark.parametrize("num_classes", [1, 2])
def test_selector_walk_with_confidence(dtype, num_classes):
    """Against the two references, one after the other, in float32."""
    case = walk_case(4, 5, 6, 12, dtype)
    wide = [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in case]
    where = integers([6, 0, -1, 3]), [1, 0, 2, 2, 0, 1, 3, 1, 3], num_classes
    tokens, *others = with_confidence(wide, True, *where, "torch")
    got = with_confidence(case, True, *where, "triton")
    assert torch.equal(got[0], tokens)
    for found, expected, tolerance in zip(got[1:], others, (2e-5, 1e-4, 1e-4, 1e-4), strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert not others[2].isnan().any()


@pytest.mark.parametrize(("num_slots", "k", "rank"), [(3, 6, 12), (1, 1, 8), (4, 16, 16)])
@settings(deadline=None, max_examples=8, phases=[Phase.generate])
@given(data=st.data())
def test_a_walk_that_predicts_gives_the_bits_of_a_prediction_after_it(num_slots, k, rank, data):
    """Any batch of distinct rows and absent slots, which all have the last row; rows of nobody are left alone."""
    present = data.draw(st.lists(st.integers(0, 6), unique=True, max_size=3))
    absent = data.draw(st.lists(st.sampled_from([-1, 7]), min_size=0 if present else 1, max_size=2))
    order = data.draw(st.permutations([*present, *absent]))
    kinds, num_classes = data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8)), len(absent) % 2 + 1
    any_sampled = data.draw(st.booleans())
    *case, greedy, uniforms = walk_case(len(order), num_slots, k, rank, torch.float32)
    greedy = greedy | (not any_sampled)
    uniforms[greedy] = NAN
    case, rows = (*case, greedy, uniforms), integers(order)

    *got, values = with_confidence(case, any_sampled, rows, kinds, num_classes, "triton")
    model, expected_values = row_estimator(num_classes, num_slots, kinds)
    walk = selector_walk_with_feature(*case, any_sampled, "triton")
    expected = *walk, estimator.predict_rows(walk[2], rows, *model, "triton")
    for found, wanted in zip(got, expected, strict=True):
        assert torch.equal(found, wanted)
    torch.testing.assert_close(values[1:8], expected_values[1:8], atol=0, rtol=0, equal_nan=True)
    assert values[[0, -1]].isnan().all()
    assert values[1:8].isnan().all(dim=(1, 2)).sum() == 7 - len(present)
    by_reference = estimator.predict_rows(walk[2], rows, *model, "torch")
    torch.testing.assert_close(got[3], by_reference, atol=1e-6, rtol=1e-6)
    last = torch.stack((got[2], got[3]), dim=1)[(rows == -1) | (rows == 7)]
    assert (last == values[8]).any(0).all() if absent else values[8].isnan().all()


@pytest.mark.parametrize(("kind", "chunk"), [("none", 4096), ("vanilla", 16), ("gated", 4096), ("rnn", 16)])
def test_markov_walk(kind, chunk, monkeypatch):
    from flashspark.kernels.triton import markov_walk as twin
    from flashspark.kernels.triton import sampling, top_tokens

    for module in (twin, sampling, top_tokens):
        monkeypatch.setattr(module, "CHUNK", chunk)
    num_reqs, num_slots, vocab_size, rank = 3, 3, 41, 6
    columns = {"none": 0, "vanilla": 0, "gated": rank, "rnn": 3 * rank}[kind]
    inner = randn(rank * (2 if kind == "rnn" else 1), columns, seed=3) if columns else None
    projected = randn(num_reqs, num_slots, columns, seed=4) if columns else None
    markov = MarkovWeights(kind, randn(vocab_size, rank, seed=1), randn(rank, vocab_size, seed=2), inner)
    uniforms = rand(num_reqs, num_slots, dtype=torch.float64, seed=6)
    greedy = torch.tensor([False, True, False], device=DEVICE)
    uniforms[1] = NAN
    logits = 2 * randn(num_reqs, num_slots, vocab_size)
    for noise in (uniforms, None):
        args = (
            integers([5, 9, 40]),
            None if kind == "none" else markov,
            projected,
            0.4 + rand(num_reqs, seed=5),
        )
        args += (greedy if noise is not None else greedy | True, noise, integers([7, 30]))
        expected = markov_walk(logits.clone(), *args, "torch")
        got = markov_walk(logits.clone(), *args, "triton")
        assert torch.equal(got.tokens, expected.tokens)
        assert_close(got.logits, expected.logits)
        assert (got.probs is None) == (noise is None)
        if noise is not None:
            assert_close(got.probs, expected.probs)
            assert got.probs[1].sum() == num_slots


def test_step_uniforms():
    seeds = integers([0, -1, 2**62 + 12345, 77, 2**40])
    choices, steps = integers([0, 3, 1, 2**31, 5]), integers([0, 10, 2**33 + 1, 4, 999])
    for num_rows in (1, 8, 40):
        got = step_uniforms(seeds, choices, steps, num_rows, "triton")
        assert torch.equal(got, step_uniforms(seeds, choices, steps, num_rows, "torch"))


def estimator_case(num_reqs, gamma, num_classes):
    feature, prediction = 4 * randn(num_reqs, gamma), rand(num_reqs, gamma, seed=1)
    feature[0, 0], prediction[1 % num_reqs, -1] = float("inf"), NAN
    index = torch.arange(num_reqs)
    return (
        feature,
        prediction,
        (index % num_classes).to(DEVICE),
        integers(index * 3 % (gamma + 1)),
        integers(1 + index * 5 % (gamma + 1)),
        (index % 4 != 3).to(DEVICE),
    )


@pytest.mark.parametrize(
    ("num_reqs", "gamma", "num_classes"), [(1, 1, 1), (7, 5, 2), (300, 7, 2), (130, 15, 1)]
)
def test_estimator(num_reqs, gamma, num_classes):
    """Two intervals of observations and the refits after them; equal bits when it is done again."""
    coefficients = []
    for implementation in ("torch", "triton", "triton"):
        slope = torch.full((num_classes,), 0.1, device=DEVICE)
        intercepts = torch.full((num_classes, gamma), 1.5, device=DEVICE)
        moments = torch.zeros(num_classes, estimator.NUM_MOMENTS, gamma, dtype=torch.float64, device=DEVICE)
        case = estimator_case(num_reqs, gamma, num_classes)
        for _ in range(2):
            estimator.observe(moments, *case, implementation)
            sums = moments.clone()
            estimator.refit(slope, intercepts, moments, implementation=implementation)
            assert not moments.any()
        for classes in (None, case[2]) if num_classes == 1 else (case[2],):
            predicted = estimator.predict(case[0], classes, slope, intercepts, implementation)
        coefficients.append((sums, slope, intercepts, predicted))
    for got, expected in zip(coefficients[1], coefficients[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    for again, got in zip(coefficients[2], coefficients[1], strict=True):
        assert torch.equal(again, got)


@pytest.mark.parametrize("num_classes", [1, 2])
def test_predictions_are_left_by_row(num_classes):
    """Batch order in, request rows out: -1 is the last row, and rows of nobody keep what they have."""
    feature, rows = randn(4, 5), integers([6, 0, -1, 3])
    kinds = integers([1, 0, 2, 2, 0, 1, 3, 1, 3])
    slope, intercepts = rand(num_classes), randn(num_classes, 5, seed=1)
    found = []
    for implementation in ("torch", "triton"):
        values = torch.full((9, 2, 5), -1.0, device=DEVICE)
        got = estimator.predict_rows(feature, rows, kinds, slope, intercepts, values, implementation)
        assert torch.equal(values[rows, 0], feature)
        assert torch.equal(values[rows, 1], got)
        assert (values[[1, 2, 4, 5, 7]] == -1).all()
        found.append(got)
    classes = integers([1, 1, 1, 0]) if num_classes > 1 else None
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-6)
    assert torch.equal(found[0], estimator.predict(feature, classes, slope, intercepts, "torch"))


def test_a_refit_step_that_is_no_number_is_not_taken():
    slope, intercepts = torch.tensor([0.2, 0.3], device=DEVICE), torch.ones(2, 3, device=DEVICE)
    moments = torch.zeros(2, estimator.NUM_MOMENTS, 3, dtype=torch.float64, device=DEVICE)
    moments[0], moments[1, -1] = NAN, 5.0
    moments[1, 4] = -1e9  # the shift is bounded
    estimator.refit(slope, intercepts, moments, implementation="triton")
    assert slope.tolist() == pytest.approx([0.2, 0.3])
    assert intercepts[0].tolist() == [1.0] * 3
    assert intercepts[1].tolist() == [1.0 - estimator.MAX_STEP] * 3
