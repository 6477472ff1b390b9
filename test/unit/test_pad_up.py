"""The replay of benchmark/pad_up.py, on the worked example: who picks what, is charged what, and by what ratio."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from flashspark.speculative.tiers import TierGrid, TierRule
from planning import CONFIDENCE, GRID, TABLE, plan_input

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("pad_up", ROOT / "benchmark" / "pad_up.py")
pad_up = importlib.util.module_from_spec(spec)
sys.modules["pad_up"] = pad_up
spec.loader.exec_module(pad_up)

CHARGED = {(3, 4): 0.011, (3, 8): 0.012, (3, 12): 0.020}  # not what the table says


def test_each_rule_is_charged_the_tier_that_runs():
    """Floor buys 8 drafts at the price of 8 rows and runs 12; pad-up buys the 5 that 8 rows hold."""
    outcomes = pad_up.replay([plan_input(CONFIDENCE)] * 2, TABLE, GRID, CHARGED)
    got = {name: (o.tokens[0], o.seconds[0], o.rows[0]) for name, o in outcomes.items()}
    assert got == {
        "pad-up": (pytest.approx(6.57), 0.012, 8),
        "floor": (pytest.approx(7.59), 0.020, 12),
        "floor, tiers filled": (pytest.approx(7.86), 0.020, 12),
        "full": (pytest.approx(7.86), 0.020, 12),
        "exact": (pytest.approx(6.57), 0.012, 8),
    }
    assert outcomes["floor"].rate == pytest.approx(7.59 / 0.020)
    assert pad_up.ratio_interval(outcomes["pad-up"], outcomes["floor"]) == pytest.approx(
        (547.5 / 379.5, 547.5 / 379.5)
    )


def test_requests_without_fresh_confidence_count_as_certain():
    step = plan_input(CONFIDENCE, stale=[1])
    assert pad_up.expected_tokens(step)[:6] == pytest.approx([3, 4, 5, 6, 6.9, 7.8])


def test_the_interval_resamples_runs_of_steps():
    """Half of the runs at twice the rate: the ratio lies between 1 and 2, and so does its interval."""
    seconds, rows = np.ones(64), np.zeros(64, dtype=np.int64)
    tokens = np.repeat([1.0, 2.0, 1.0, 2.0], 16)
    one, other = pad_up.Outcome(tokens, seconds, rows), pad_up.Outcome(seconds, seconds, rows)
    assert pad_up.ratio_interval(one, other) == (1.0, 2.0)


def test_times_never_fall_with_the_rows_of_a_batch():
    times = {(1, 1): 1.0, (1, 2): 3.0, (1, 3): 2.0, (2, 2): 0.5}
    assert pad_up.never_falling(times) == {(1, 1): 1.0, (1, 2): 2.5, (1, 3): 2.5, (2, 2): 0.5}


def test_a_sparse_table_and_its_tiers():
    grid = TierGrid(TierRule(width=4, max_num_reqs=4, finest_tokens=4))
    assert pad_up.tier_rows(grid, 3) == [4, 8, 12]
    table = pad_up.sparse_table({(1, 4): 0.5, (2, 8): 1.0}, [(1, 4), (2, 8)])
    assert (table.sample_batch_tokens, table.sample_steps_per_sec) == ((4, 8), (2.0, 1.0))
