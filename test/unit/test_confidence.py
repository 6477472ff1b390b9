"""Confidence sources: what they learn, from whom, and what they must forget."""

import logging

import pytest
import torch

from flashspark.benchmark.sts_fit import expected_calibration_error
from flashspark.kernels.estimator import observed_mask
from flashspark.speculative.confidence import NUM_BINS, HeadConfidence, draft_sees
from flashspark.speculative.estimator import PRIOR_INTERCEPT, AcceptanceEstimator
from flashspark.speculative.sampling import RowSampling

CPU = torch.device("cpu")
GREEDY = RowSampling(seed=0, temperature=0.0)
SAMPLED = RowSampling(seed=0)
GAMMA = 5


class Stream:
    """Requests whose acceptance follows known coefficients."""

    def __init__(self, slope, intercepts, num_rows=32, seed=0, mean=1.0, deviation=2.0):
        self.slope, self.intercepts = slope, torch.tensor(intercepts)
        self.num_rows, self._mean, self._deviation = num_rows, mean, deviation
        self._generator = torch.Generator().manual_seed(seed)

    def blocks(self):
        """(features [R, g], drafts that would be accepted in a full block [R])."""
        shape = (self.num_rows, len(self.intercepts))
        feature = torch.randn(shape, generator=self._generator) * self._deviation + self._mean
        c = torch.sigmoid(self.slope * feature + self.intercepts)
        hits = torch.rand(shape, generator=self._generator) < c
        return feature, hits.long().cumprod(1).sum(1)


def trim(confidence, threshold):
    """Verify length: drafts while survival stays above the threshold, and the anchor."""
    return 1 + (confidence.cumprod(1) >= threshold).sum(1)


def play(estimator, stream, num_steps, threshold=0.0, params=SAMPLED):
    """Runs the stream through the estimator, which trims by its own predictions once it is ready."""
    row_list = list(range(stream.num_rows))
    rows = torch.tensor(row_list)
    for row in row_list:
        estimator.assign(row, params)
    num_observations = num_trimmed = 0
    for _ in range(num_steps):
        feature, accepted = stream.blocks()
        confidence = estimator.predict(rows, feature)
        lens = torch.full_like(rows, estimator.gamma + 1)
        if estimator.is_ready and threshold:
            lens = trim(confidence, threshold)
        accepted = torch.minimum(accepted, lens - 1)
        estimator.observe(rows, row_list, accepted, lens)
        num_observations += int(torch.minimum(accepted + 1, lens - 1).sum())
        num_trimmed += int((lens <= estimator.gamma).sum())
    estimator.settle()
    return num_observations, num_trimmed


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6])
def test_converges_to_the_truth_also_when_it_trims_by_its_own_predictions(threshold):
    truth = (0.6, [0.9, 0.4, 0.1, -0.2, -0.4])
    estimator = AcceptanceEstimator(32, GAMMA, CPU, per_class=False)
    estimates = []
    for seed in range(2):  # the prior is left during the first, the second is averaged: a window is noisy
        stream = Stream(*truth, seed=seed)
        before = torch.tensor(estimator.summary()["observations"])
        for _ in range(10):
            num_observations, num_trimmed = play(estimator, stream, 100, threshold)
            assert num_observations > 2000
            if seed:
                estimates.append(torch.cat((estimator.slope, estimator.intercepts[0])))
    assert bool(num_trimmed) == bool(threshold)
    # A position that is hardly ever verified learns slowly, and matters as little.
    known = (torch.tensor(estimator.summary()["observations"]) - before)[0] > 2000
    assert known.sum() >= 3
    error = torch.stack(estimates).mean(0) - torch.tensor([truth[0], *truth[1]])
    assert error[0].abs() < 0.05
    assert error[1:][known].abs().max() < 0.15
    summary = estimator.summary()
    assert summary["refits"] == 10 + 19  # ten in the first interval
    assert summary["expected_accepted"] == pytest.approx(summary["actual_accepted"], rel=0.03)


def test_follows_a_hard_turn_of_the_traffic_and_comes_back():
    """Saturated at nearly 1, then nothing is accepted, then nearly all again, trimming all the while."""
    estimator = AcceptanceEstimator(32, GAMMA, CPU, per_class=False)
    play(estimator, Stream(0.3, [8.0] * GAMMA), 1000, threshold=0.05)
    play(estimator, Stream(0.3, [-3.0] * GAMMA), 1000, threshold=0.05)
    assert estimator.intercepts[0, 0].item() == pytest.approx(-3.0, abs=0.5)
    play(estimator, Stream(0.3, [4.0] * GAMMA), 1500, threshold=0.0)
    assert estimator.intercepts[0, 0].item() == pytest.approx(4.0, abs=0.7)


def test_counts_what_the_censoring_table_says():
    estimator = AcceptanceEstimator(32, GAMMA, CPU, per_class=False, warmup_refits=1)
    num_observations, _ = play(estimator, Stream(0.5, [0.5] * GAMMA), 250, threshold=0.3)
    seen = torch.tensor(estimator.summary()["observations"])
    assert seen.sum() == num_observations
    assert (seen.diff() <= 0).all()


def test_two_replicas_agree_bit_for_bit():
    replicas = [AcceptanceEstimator(32, GAMMA, CPU) for _ in range(2)]
    for estimator in replicas:
        play(estimator, Stream(0.6, [0.5, 0.0, 0.0, -0.3, -0.3]), 430, threshold=0.3)
    one, other = (estimator.summary() for estimator in replicas)
    assert one == other
    assert torch.equal(replicas[0].intercepts, replicas[1].intercepts)
    replicas[1].intercepts[0, 3] += 1e-6
    assert replicas[0].checksum() != replicas[1].checksum()


def test_warm_up_verifies_full_blocks_and_says_when_it_ends(caplog):
    estimator = AcceptanceEstimator(4, GAMMA, CPU)
    stream = Stream(0.6, [0.5] * GAMMA, num_rows=4)
    with caplog.at_level(logging.INFO):
        play(estimator, stream, 199)
        assert not estimator.is_ready
        assert not caplog.records
        play(estimator, stream, 1)
    assert estimator.is_ready
    assert "may be trimmed" in caplog.text
    play(estimator, stream, 200)
    assert len(caplog.records) == 1


def test_prior_is_constant():
    estimator = AcceptanceEstimator(2, GAMMA, CPU)
    confidence = estimator.predict(torch.tensor([0, 1]), torch.randn(2, GAMMA) * 9)
    torch.testing.assert_close(confidence, torch.full((2, GAMMA), 0.817574))


EXCLUDED = {
    "repetition": {"repetition_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.5},
    "presence": {"presence_penalty": -0.5},
    "bias": {"logit_bias": {3: 1.0}},
    "minimum": {"min_new_tokens": 5, "stop_ids": (2,)},
    "min_p": {"min_p": 0.1},
}


@pytest.mark.parametrize("name", [*EXCLUDED, "invisible"])
def test_requests_the_draft_cannot_see_teach_nothing(name):
    params = RowSampling(seed=0, **EXCLUDED.get(name, {}))
    rows, lens = torch.tensor([1, 0]), torch.full((2,), GAMMA + 1)

    def learned(second):
        estimator = AcceptanceEstimator(2, GAMMA, CPU)
        estimator.assign(0, SAMPLED)
        estimator.assign(1, second, is_visible=name != "invisible")
        generator = torch.Generator().manual_seed(0)
        for _ in range(150):
            estimator.predict(rows, torch.randn(2, GAMMA, generator=generator))
            estimator.observe(rows, [1, 0], torch.tensor([0, 3]), lens)
        return estimator

    mixed = learned(params)
    mixed.settle()
    alone = AcceptanceEstimator(2, GAMMA, CPU)
    alone.assign(0, SAMPLED)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        alone.predict(rows[1:], torch.randn(2, GAMMA, generator=generator)[1:])
        alone.observe(rows[1:], [0], torch.tensor([3]), lens[1:])
    alone.settle()
    assert mixed.num_refits == 10
    assert mixed.summary() == alone.summary()


def test_steps_without_anybody_to_learn_from_do_not_count():
    estimator = AcceptanceEstimator(1, GAMMA, CPU, per_class=False, refit_interval=2)
    estimator.assign(0, RowSampling(seed=0, repetition_penalty=1.1))
    row = torch.tensor([0])
    for _ in range(10):
        estimator.predict(row, torch.zeros(1, GAMMA))
        estimator.observe(row, [0], torch.tensor([1]), torch.tensor([GAMMA + 1]))
    summary = estimator.summary()
    assert summary["steps"] == summary["refits"] == summary["scored_blocks"] == 0
    assert summary["intercepts"] == [[PRIOR_INTERCEPT] * GAMMA]


def test_top_k_and_top_p_teach_and_greedy_ignores_min_p():
    assert draft_sees(RowSampling(seed=0, top_k=20, top_p=0.95))
    assert draft_sees(RowSampling(seed=0, temperature=0.0, min_p=0.1))
    assert not draft_sees(RowSampling(seed=0, temperature=0.0, repetition_penalty=1.2))


def test_outcomes_find_their_predictions_after_the_batch_was_reordered():
    feature = torch.randn(3, GAMMA)
    accepted, lens = torch.tensor([0, 2, 5]), torch.tensor([6, 6, 6])
    summaries = []
    for order in ([0, 1, 2], [2, 0, 1]):
        estimator = AcceptanceEstimator(9, GAMMA, CPU)
        row_list = [7, 2, 4]
        for row in row_list:
            estimator.assign(row, GREEDY)
        estimator.predict(torch.tensor(row_list), feature)
        later = [row_list[i] for i in order]
        estimator.observe(torch.tensor(later), later, accepted[order], lens[order])
        estimator.settle()
        summaries.append((estimator._moments, estimator.summary()["expected_accepted"]))
    torch.testing.assert_close(summaries[0], summaries[1])


def test_a_recycled_row_owes_nothing_for_its_last_owner():
    estimator = AcceptanceEstimator(2, GAMMA, CPU)
    row, accepted, lens = torch.tensor([1]), torch.tensor([2]), torch.tensor([6])
    estimator.assign(1, SAMPLED)
    estimator.predict(row, torch.ones(1, GAMMA))
    estimator.release(1)
    estimator.observe(row, [1], accepted, lens)  # aborted: its outcome arrives late
    estimator.assign(1, SAMPLED)
    estimator.observe(row, [1], accepted, lens)  # the new owner was not drafted yet
    estimator.settle()
    assert not estimator._moments.any()
    estimator.predict(row, torch.ones(1, GAMMA))
    estimator.observe(row, [1], accepted, lens)
    estimator.settle()
    once = estimator._moments.clone()
    assert once.any()
    estimator.observe(row, [1], accepted, lens)  # one prediction, one outcome
    estimator.settle()
    assert torch.equal(estimator._moments, once)


def test_a_recycled_row_takes_the_class_and_the_visibility_of_its_owner():
    estimator = AcceptanceEstimator(1, GAMMA, CPU)
    row = torch.tensor([0])
    for params, expected in (
        (GREEDY, [3, 0]),
        (SAMPLED, [3, 3]),
        (RowSampling(seed=0, logit_bias={1: 1.0}), [3, 3]),
        (GREEDY, [6, 3]),
    ):
        estimator.assign(0, params)
        estimator.predict(row, torch.ones(1, GAMMA))
        estimator.observe(row, [0], torch.tensor([2]), torch.tensor([6]))
        estimator.release(0)
        estimator.settle()
        assert [sum(c) for c in estimator.summary()["observations"]] == expected


def test_padding_touches_no_live_row():
    estimator = AcceptanceEstimator(2, GAMMA, CPU, per_class=False)
    for row in (0, 1):
        estimator.assign(row, SAMPLED)
    feature = torch.tensor([[1.0], [2.0], [50.0], [60.0]]).expand(-1, GAMMA)
    rows = torch.tensor([0, 1, -1, -1])
    estimator.predict(rows, feature)
    assert estimator._log.values[:2, 0, 0].tolist() == [1.0, 2.0]
    estimator.observe(rows, [0, 1], torch.tensor([1, 1, 5, 5]), torch.full((4,), 6))
    estimator.settle()
    assert estimator._moments[0, 5].sum() == 4
    assert estimator.summary()["scored_blocks"] == 2


def test_classes_have_coefficients_of_their_own():
    estimator = AcceptanceEstimator(64, GAMMA, CPU)
    easy, hard = Stream(0.6, [2.0] * GAMMA, seed=1), Stream(0.6, [-1.0] * GAMMA, seed=2)
    row_list = list(range(64))
    rows, lens = torch.tensor(row_list), torch.full((64,), GAMMA + 1)
    for row in row_list:
        estimator.assign(row, GREEDY if row < 32 else SAMPLED)
    for _ in range(800):
        parts = [stream.blocks() for stream in (easy, hard)]
        estimator.predict(rows, torch.cat([feature for feature, _ in parts]))
        estimator.observe(rows, row_list, torch.cat([accepted for _, accepted in parts]), lens)
    assert estimator.intercepts[0, 0].item() == pytest.approx(2.0, abs=0.4)
    assert estimator.intercepts[1, 0].item() == pytest.approx(-1.0, abs=0.4)


def test_a_class_that_comes_later_is_learned_as_fast_as_the_first():
    """Ten refits in its own first hundred steps, though the schedule of all steps has none but one there."""
    estimator = AcceptanceEstimator(32, GAMMA, CPU)
    play(estimator, Stream(0.6, [2.0] * GAMMA, seed=1), 300, params=GREEDY)
    known = estimator.slope[0].item(), estimator.intercepts[0].tolist()
    assert estimator.num_refits == 12 and estimator.intercepts[1].tolist() == [PRIOR_INTERCEPT] * GAMMA
    play(estimator, Stream(0.6, [-1.0] * GAMMA, seed=2), 60)
    assert estimator.slope[1].item() == pytest.approx(0.6, abs=0.2)
    assert estimator.intercepts[1, 0].item() == pytest.approx(-1.0, abs=0.3)
    assert (estimator.slope[0].item(), estimator.intercepts[0].tolist()) == known
    assert (estimator.num_steps, estimator.num_refits) == (360, 12)
    assert sum(estimator.summary()["observations"][1]) > 60 * 32


def test_catching_up_learns_what_waits_and_leaves_the_schedule_alone():
    estimator = AcceptanceEstimator(32, GAMMA, CPU)
    play(estimator, Stream(0.6, [2.0] * GAMMA, seed=1), 200)
    before = estimator.intercepts[1].clone()
    stream = Stream(0.6, [-2.0] * GAMMA, seed=2)
    for _ in range(10):  # as probes do, far apart
        play(estimator, stream, 2)
        estimator.catch_up()
    assert (estimator.num_steps, estimator.num_refits, estimator.is_ready) == (220, 11, True)
    assert before[0] > 1.5 and estimator.intercepts[1, 0].item() == pytest.approx(-2.0, abs=0.7)
    learned = estimator.intercepts.clone()
    estimator.catch_up()  # nothing waits
    assert torch.equal(estimator.intercepts, learned)


def test_confidence_does_not_depend_on_the_place_in_the_batch():
    estimator = AcceptanceEstimator(4, GAMMA, CPU)
    estimator.slope.fill_(0.7)
    feature = torch.randn(4, GAMMA)
    rows = torch.tensor([3, 0, 2, 1])
    there, back = estimator.predict(rows, feature), estimator.predict(rows.flip(0), feature.flip(0))
    # To the last bit or the one before: a tensor's tail does not fill a vector register and is rounded otherwise.
    torch.testing.assert_close(there.flip(0), back, rtol=5e-7, atol=0)


def test_head_calibrates_by_temperature_and_keeps_score():
    head = HeadConfidence(2, [1.0, 2.0, 4.0], CPU)
    assert head.is_ready
    head.assign(0, GREEDY)
    row = torch.tensor([0])
    confidence = head.predict(row, torch.full((1, 3), 2.0))
    torch.testing.assert_close(confidence, torch.sigmoid(torch.tensor([[2.0, 1.0, 0.5]])))
    head.observe(row, [0], torch.tensor([1]), torch.tensor([3]))
    head.settle()
    survival = confidence.cumprod(1)
    summary = head.summary()
    assert summary["expected_accepted"] == pytest.approx(survival[0, :2].sum().item())
    assert (summary["actual_accepted"], summary["scored_blocks"]) == (1.0, 1)


def test_calibration_counts_verified_drafts_by_position_and_survival():
    """Three blocks, one of which teaches nothing, against the definition spelled out draft by draft."""
    head = HeadConfidence(4, [1.0] * 3, CPU)
    for row, params in enumerate((GREEDY, SAMPLED, RowSampling(seed=0, min_p=0.1), GREEDY)):
        head.assign(row, params)
    rows, accepted, lens = torch.arange(4), torch.tensor([2, 0, 3, 0]), torch.tensor([4, 3, 4, 1])
    confidence = head.predict(rows, torch.tensor([[4.0, 0.5, 2.0], [-3.0, 0.0, 9.0], [1.0] * 3, [9.0] * 3]))
    head.observe(rows, rows.tolist(), accepted, lens)
    head.settle()
    counts, expected, happened = torch.zeros(3, 3, NUM_BINS, dtype=torch.float64)
    for r in (0, 1, 3):
        survival = confidence[r].double().cumprod(0)
        for k in range(int(lens[r]) - 1):
            at = min(int(survival[k] * NUM_BINS), NUM_BINS - 1)
            counts[k, at] += 1
            expected[k, at] += survival[k]
            happened[k, at] += accepted[r] > k
    assert counts.sum() == 3 + 2
    summary = head.summary()
    assert torch.equal(torch.tensor(summary["calibration_counts"], dtype=torch.float64), counts)
    assert torch.equal(torch.tensor(summary["calibration_accepted"], dtype=torch.float64), happened)
    torch.testing.assert_close(torch.tensor(summary["calibration_expected"], dtype=torch.float64), expected)
    errors = [
        expected_calibration_error(
            torch.tensor([confidence[r, : k + 1].double().prod() for r in verified], dtype=torch.float64),
            torch.tensor([bool(accepted[r] > k) for r in verified]),
        )
        for k, verified in enumerate(([0, 1], [0, 1], [0]))
    ]
    assert summary["calibration_errors"] == pytest.approx(errors)
    assert (summary["scored_blocks"], summary["actual_accepted"]) == (3, 2.0)
    assert summary["expected_accepted"] == pytest.approx(expected.sum().item())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_head_refuses_temperatures_that_calibrate_nothing(temperature):
    with pytest.raises(ValueError, match="positive"):
        HeadConfidence(2, [1.0, temperature], CPU)


def test_full_blocks_show_the_first_refusal_and_what_came_before():
    mask = observed_mask(torch.tensor([0, 3, 5]), torch.tensor([6, 6, 6]), GAMMA)
    assert mask.sum(1).tolist() == [1, 4, 5]


def test_reading_the_summary_changes_nothing():
    quiet, watched = (AcceptanceEstimator(4, GAMMA, CPU, refit_interval=30) for _ in range(2))
    rows, lens = torch.arange(4), torch.full((4,), GAMMA + 1)
    for estimator in (quiet, watched):
        stream = Stream(0.6, [0.5] * GAMMA, num_rows=4)
        for row in range(4):
            estimator.assign(row, SAMPLED)
        for _ in range(97):
            feature, accepted = stream.blocks()
            estimator.predict(rows, feature)
            estimator.observe(rows, [0, 1, 2, 3], accepted, lens)
            if estimator is watched:
                estimator.summary()
    assert torch.equal(quiet.intercepts, watched.intercepts)
    assert quiet.summary() == watched.summary()


def test_outcome_tensors_may_be_written_again_after_the_call():
    estimator = AcceptanceEstimator(1, GAMMA, CPU)
    estimator.assign(0, SAMPLED)
    row, accepted, lens = torch.tensor([0]), torch.tensor([2]), torch.tensor([6])
    estimator.predict(row, torch.ones(1, GAMMA))
    estimator.observe(row, [0], accepted, lens)
    accepted.fill_(5)
    row.fill_(-1)
    estimator.settle()
    assert estimator.summary()["actual_accepted"] == 2.0
