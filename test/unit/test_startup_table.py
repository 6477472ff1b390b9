"""The table measured at start-up: which shapes, how long, and that nothing remembers it afterwards."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from flashspark.speculative.drafter import make_scratch_source
from flashspark.speculative.startup_table import (
    CONTEXT_TOKENS,
    CORNER_TIME,
    NUM_WARM_UP_SHAPES,
    Shape,
    StepTimer,
    corners_of,
    measure_steps,
    shapes_to_measure,
)
from flashspark.speculative.table_fit import fit_tables
from flashspark.speculative.tiers import TierGrid, TierRule
from harness import Harness, Job
from tiny_models import write_dflash2, write_dspark, write_target

MAX_REQS, GAMMA = 6, 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = write_target(root / "target", eos_token_id=None)
    block = {"dflash_config": {"block_size": GAMMA + 1}}
    return {
        "target": target,
        "dflash2": write_dflash2(root / "dflash2", target, **block),
        "dspark": write_dspark(root / "dspark", target),
    }


def harness_of(folders, draft="dflash2", **args) -> Harness:
    args = {"max_running_requests": MAX_REQS, "max_total_tokens": 4096} | args
    return Harness(folders["target"], folders[draft], **args)


def timer_of(harness: Harness, finest_tokens=1, context_length=512) -> StepTimer:
    worker = harness._worker
    grid = TierGrid(TierRule(GAMMA + 1, MAX_REQS, finest_tokens=finest_tokens))
    source = make_scratch_source(worker.runner, MAX_REQS)
    return StepTimer(worker.runner, worker.drafter, source, grid, MAX_REQS, context_length)


def test_shapes_reach_from_one_plain_row_to_a_full_batch():
    shapes = shapes_to_measure(48, 7)
    assert {shape.num_reqs for shape in shapes} == {1, 2, 3, 4, 6, 8, 12, 16, 32, 48}
    assert shapes[0] == Shape(1, None)
    assert shapes[-1] == Shape(48, 336)
    assert [shape.budget for shape in shapes if shape.num_reqs == 8] == [None, 0, 14, 28, 56]
    assert [shape.budget for shape in shapes if shape.num_reqs == 48] == [None, 0, 168, 336]
    assert [shape.budget for shape in shapes if shape.num_reqs == 6] == [None, 0, 21, 42]
    assert len(set(shapes)) == len(shapes) == 44
    corners = corners_of(shapes)
    assert corners[:3] == [Shape(1, None), Shape(1, 0), Shape(1, 7)]
    assert corners[-3:] == [Shape(48, None), Shape(48, 0), Shape(48, 336)]
    assert len(corners) == 9
    assert corners_of(shapes_to_measure(1, 1)) == shapes_to_measure(1, 1)


class FakeMachine:
    """A clock that only steps move: 1 ms and as much again for each row, times `slowness`."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.now, self.slowness = 0.0, slowness
        self.runs: list[Shape] = []

    def run(self, shape: Shape) -> tuple[int, float]:
        self.runs.append(shape)
        seconds = 1e-3 * (1 + shape.num_rows) * self.slowness
        self.now += seconds
        return shape.num_rows, seconds

    def measure(self, shapes, budget_seconds):
        return measure_steps(self.run, shapes, budget_seconds, clock=lambda: self.now)


def test_rounds_fill_the_budget():
    machine, shapes = FakeMachine(), shapes_to_measure(8, 7)
    a_round = sum(1e-3 * (1 + shape.num_rows) for shape in shapes)
    measured = machine.measure(shapes, 4.5 * a_round)
    assert (measured.num_rounds, measured.num_left_out) == (4, 0)
    assert 4 * a_round < machine.now <= 4.5 * a_round
    assert len(machine.runs) == NUM_WARM_UP_SHAPES + sum(len(sample.seconds) for sample in measured.samples)
    assert {len(sample.seconds) for sample in measured.samples} == {4, 5}
    for sample in measured.samples:
        assert set(sample.seconds) == {1e-3 * (1 + sample.num_rows)}
    assert machine.measure(shapes, 1e6).num_rounds == 15


@pytest.mark.parametrize("slowness", [20, 30, 3000])
def test_a_slow_machine_measures_the_corners(slowness):
    machine, shapes = FakeMachine(slowness), shapes_to_measure(48, 7)
    measured = machine.measure(shapes, 6.0)
    assert measured.num_rounds == 1
    assert measured.num_left_out > 0
    assert measured.num_left_out + len(measured.samples) == len(shapes)
    if slowness < 1000:
        assert {(s.num_reqs, s.num_rows) for s in measured.samples} >= {(1, 1), (1, 8), (48, 48), (48, 384)}
    warm_up_and_smallest_batch = ((2 + 2 + 3 + 3) + (2 + 2 + 9)) * 1e-3 * slowness
    assert machine.now <= max(6.0 * CORNER_TIME * 1.05, warm_up_and_smallest_batch)
    fitted = fit_tables(measured.samples, 48, 384)
    error = fitted.table.step_seconds(48, np.array([384]))[0] / (0.385 * slowness) - 1
    assert abs(error) <= 1e-3


@pytest.mark.parametrize("draft", ["dflash2", "dspark"])
@pytest.mark.parametrize("small_pool", [False, True])
def test_nothing_is_left_of_the_measurement(folders, draft, small_pool, caplog):
    """Rows, pages and K/V are bit for bit as before, and so is what a server then says."""
    caplog.set_level(logging.INFO)
    args = {"max_total_tokens": 96} if small_pool else {}
    harness, untouched = (harness_of(folders, draft, **args) for _ in range(2))
    runner = harness._worker.runner
    caches = [*runner.target_pool.k, *runner.target_pool.v, *runner.draft_pool.k, *runner.draft_pool.v]
    rows = runner.request_rows
    tensors = [rows.context_lens, rows.anchors, rows.page_table, *caches]
    rows.page_table[2, :3] = torch.tensor([5, 4, 3])  # what an earlier owner left
    rows.context_lens[2], rows.anchors[2] = 7, 9
    before = [tensor.clone() for tensor in tensors]
    with timer_of(harness) as timer:  # on any machine every shape, twice
        measured = measure_steps(timer.run, shapes_to_measure(MAX_REQS, GAMMA), 120.0, max_rounds=2)
    fitted = fit_tables(measured.samples, MAX_REQS, MAX_REQS * (GAMMA + 1))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert harness._worker.adaptive is None
    harness.assert_everything_is_free()
    assert "Acceptance estimator: warm" not in caplog.text
    assert fitted.table.m_probes[-1] == MAX_REQS * (GAMMA + 1)
    assert fitted.table.bs_probes == (1, 2, 3, 4, 6)
    assert fitted.plain is not None and min(fitted.plain.seconds) > 0
    assert {s.num_reqs for s in measured.samples if not s.has_draft} == {1, 2, 3, 4, 6}
    jobs = [Job([5 + i] * 9, 12, sampling={"temperature": 0.8}) for i in range(8)]
    assert [r.tokens for r in harness.run(jobs)] == [r.tokens for r in untouched.run(jobs)]


def test_a_failed_step_leaves_nothing_either(folders):
    harness = harness_of(folders)
    rows = harness._worker.runner.request_rows
    before = rows.page_table.clone()
    timer = timer_of(harness)
    with timer:
        timer.run(Shape(2, 3))
        assert not torch.equal(rows.page_table, before)
    assert torch.equal(rows.page_table, before)
    harness._worker.runner.verify = None  # every step fails
    with pytest.raises(TypeError), timer:
        timer.run(Shape(2, 3))
    assert torch.equal(rows.page_table, before)
    harness.assert_everything_is_free()


def test_steps_run_the_shape_that_was_asked_for(folders):
    harness = harness_of(folders)
    with timer_of(harness, finest_tokens=4) as timer:
        assert [
            timer.run(shape)[0] for shape in (Shape(3, None), Shape(3, 0), Shape(3, 4), Shape(3, 15))
        ] == [
            3,
            4,
            8,
            18,
        ]
        rows, seconds = timer.run(Shape(6, 30))
        assert (rows, seconds > 0) == (36, True)
        assert int(harness._worker.runner.request_rows.context_lens[0]) > CONTEXT_TOKENS


def test_a_context_without_room_for_a_block_is_refused(folders):
    with pytest.raises(ValueError, match=r"a context of 6 tokens has no room for a block of 6"):
        timer_of(harness_of(folders), context_length=GAMMA + 1)


def test_progress_is_logged(caplog):
    caplog.set_level(logging.INFO)
    FakeMachine(20).measure(shapes_to_measure(8, 7), 6.0)
    lines = [record.message for record in caplog.records]
    assert 2 <= len(lines) <= 4
    assert all(line.startswith("measuring step costs: round ") for line in lines)
