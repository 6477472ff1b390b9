"""Cost tables: SGLang's bytes, every rule of validation, both lookups, pricing per tier, and the slow correction."""

import json
import logging
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.speculative.cost_table import (
    CostCorrection,
    LookupRule,
    PlainStepCosts,
    SpsAdditiveCostTable,
    SpsCostTable,
    load_cost_table,
    parse_cost_table,
    price_budgets,
)
from flashspark.speculative.tiers import TierGrid, TierRule

ONE_D = (
    '{"sample_batch_tokens":[1,4,8,12],"sample_steps_per_sec":[100.0,98.0,90.0,60.0],"max_batch_tokens":12}'
)
TWO_D = (
    '{"bias_seconds":0.005,"bs_probes":[1,4,8],"alpha_seconds":[0.0,0.0006,0.0014],'
    '"m_probes":[0,64,128],"theta_seconds":[0.0,0.002,0.005]}'
)
FLOOR, PAD_UP = LookupRule.FLOOR, LookupRule.PAD_UP


def rows(*values):
    return np.array(values, dtype=np.int64)


@st.composite
def sps_tables(draw):
    probes = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=8)))
    rates = draw(st.lists(st.floats(0.5, 500), min_size=len(probes), max_size=len(probes)))
    return SpsCostTable(tuple(probes), tuple(rates), probes[-1] + draw(st.integers(0, 5)))


@st.composite
def additive_tables(draw):
    def axis(least):
        probes = sorted(draw(st.sets(st.integers(least, 300), min_size=1, max_size=6)))
        return tuple(probes), tuple(
            draw(st.lists(st.floats(0, 0.01), min_size=len(probes), max_size=len(probes)))
        )

    return SpsAdditiveCostTable(draw(st.floats(1e-4, 0.1)), *axis(1), *axis(0))


@pytest.mark.parametrize("text", [ONE_D, TWO_D])
def test_bytes_survive_reading_and_pricing(text):
    table = parse_cost_table(text)
    table.step_seconds(3, rows(5))  # whatever a table caches is not written
    assert table.to_json() == text


@settings(max_examples=80, deadline=None)
@given(table=st.one_of(sps_tables(), additive_tables()))
def test_what_is_written_reads_as_the_same_table(table):
    assert parse_cost_table(table.to_json()) == table
    assert (
        json.loads(table.to_json()).keys()
        == json.loads(ONE_D if "sample" in table.to_json() else TWO_D).keys()
    )


def test_the_key_text_tells_the_formats_apart_and_unknown_keys_are_passed_over(tmp_path):
    assert isinstance(parse_cost_table(ONE_D), SpsCostTable)
    assert isinstance(parse_cost_table(TWO_D), SpsAdditiveCostTable)
    assert parse_cost_table(ONE_D[:-1] + ',"gpu":"x"}') == parse_cost_table(ONE_D)
    path = tmp_path / "table.json"
    path.write_text(TWO_D)
    assert load_cost_table(path).bs_probes == (1, 4, 8)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"table\.json: .*sample_batch_tokens"):
        load_cost_table(path)
    with pytest.raises(ValueError, match=r"gone\.json"):
        load_cost_table(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (ONE_D, "sample_batch_tokens", []),
        (ONE_D, "sample_batch_tokens", [1, 4, 4, 12]),
        (ONE_D, "sample_batch_tokens", [4, 1, 8, 12]),
        (ONE_D, "sample_batch_tokens", [0, 4, 8, 12]),
        (ONE_D, "sample_batch_tokens", [1, 4, 8.5, 12]),
        (ONE_D, "sample_batch_tokens", None),
        (ONE_D, "sample_steps_per_sec", [100.0, 98.0, 90.0]),
        (ONE_D, "sample_steps_per_sec", [100.0, 98.0, 90.0, 0.0]),
        (ONE_D, "sample_steps_per_sec", [100.0, 98.0, -1.0, 60.0]),
        (ONE_D, "sample_steps_per_sec", [100.0, 98.0, None, 60.0]),
        (ONE_D, "max_batch_tokens", 11),
        (ONE_D, "max_batch_tokens", "12"),
        (TWO_D, "bias_seconds", 0.0),
        (TWO_D, "bias_seconds", -0.1),
        (TWO_D, "bs_probes", []),
        (TWO_D, "bs_probes", [1, 8, 4]),
        (TWO_D, "bs_probes", [-1, 4, 8]),
        (TWO_D, "alpha_seconds", [0.0, 0.1]),
        (TWO_D, "alpha_seconds", [0.0, -0.006, 0.1]),
        (TWO_D, "m_probes", [0, 64, 64]),
        (TWO_D, "m_probes", None),
        (TWO_D, "theta_seconds", [0.0, 0.1]),
        (TWO_D, "theta_seconds", [0.0, 0.1, "x"]),
        (TWO_D, "theta_seconds", [-0.005, 0.1, 0.2]),
    ],
)
def test_each_rule_refuses_its_violation_and_names_the_key(text, key, value):
    fields = json.loads(text)
    fields[key] = value
    with pytest.raises(ValueError, match=key):
        parse_cost_table(json.dumps(fields))


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused(rate):
    with pytest.raises(ValueError, match="sample_steps_per_sec"):
        SpsCostTable((1, 2), (1.0, rate), 2)
    with pytest.raises(ValueError, match="bias_seconds"):
        SpsAdditiveCostTable(rate, (1,), (0.0,), (0,), (0.0,))


def test_rates_that_rise_by_more_than_a_tenth_are_worth_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        SpsCostTable((1, 2, 3), (100.0, 109.9, 90.0), 3)
        SpsAdditiveCostTable(0.01, (1,), (0.0,), (0, 64), (0.001, 0.0005))
        assert not caplog.records
        SpsCostTable((1, 2, 3), (100.0, 110.1, 90.0), 3)
        SpsAdditiveCostTable(0.01, (1,), (0.0,), (0, 64), (0.002, 0.0))
    assert len(caplog.records) == 2
    assert "sample_steps_per_sec rises from 100 at 1 rows to 110.1 at 2" in caplog.messages[0]
    assert "theta_seconds" in caplog.messages[1]


def test_lookup_between_and_outside_the_probes():
    table = parse_cost_table(ONE_D)
    asked = rows(0, 1, 2, 4, 5, 8, 9, 12, 13, 99)
    assert table.steps_per_sec(asked, FLOOR).tolist() == [100, 100, 100, 98, 98, 90, 90, 60, 60, 60]
    assert table.steps_per_sec(asked, PAD_UP).tolist() == [100, 100, 98, 98, 90, 90, 60, 60, 60, 60]
    assert table.step_seconds(7, rows(12), FLOOR).tolist() == [1 / 60]


@settings(max_examples=80, deadline=None)
@given(table=sps_tables(), asked=st.integers(0, 400))
def test_lookup_takes_the_neighbouring_probe(table, asked):
    probes, rates = table.sample_batch_tokens, table.sample_steps_per_sec
    below = [rate for probe, rate in zip(probes, rates, strict=True) if probe <= asked] or rates[:1]
    above = [rate for probe, rate in zip(probes, rates, strict=True) if probe >= asked] or rates[-1:]
    assert table.steps_per_sec(rows(asked), FLOOR)[0] == below[-1]
    assert table.steps_per_sec(rows(asked), PAD_UP)[0] == above[0]


def test_additive_examples():
    table = parse_cost_table(TWO_D)
    assert table.step_seconds(6, rows(48))[0] == pytest.approx(0.0075, abs=1e-12)  # n = 6, B = 42
    assert table.step_seconds(12, rows(500))[0] == pytest.approx(0.0114, abs=1e-12)  # n = 12, B = 488
    constant = SpsAdditiveCostTable(0.005, (4,), (0.001,), (64,), (0.002,))
    assert constant.step_seconds(99, rows(0, 64, 999)).tolist() == pytest.approx([0.008] * 3)


@settings(max_examples=60, deadline=None)
@given(
    table=additive_tables(), num_reqs=st.integers(1, 400), free=st.integers(1, 400), most=st.integers(0, 60)
)
def test_all_budgets_at_once_cost_what_each_costs_alone(table, num_reqs, free, most):
    def line(x, xs, ys):
        if x <= xs[0] or x >= xs[-1]:
            return ys[0] if x <= xs[0] else ys[-1]
        i = max(j for j in range(len(xs)) if xs[j] <= x)
        return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])

    seconds = price_budgets(table, num_reqs, free, most).seconds
    assert len(seconds) == most + 1
    for budget in range(most + 1):
        alone = line(num_reqs, table.bs_probes, table.alpha_seconds) + table.bias_seconds
        alone += line(free + budget, table.m_probes, table.theta_seconds)
        assert seconds[budget] == pytest.approx(alone, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(table=st.one_of(sps_tables(), additive_tables()), num_reqs=st.integers(1, 12), data=st.data())
def test_the_tier_that_runs_is_what_is_priced(table, num_reqs, data):
    grid = TierGrid(TierRule(width=4, max_num_reqs=12, finest_reqs=4, finest_tokens=5))
    tiers = grid.tiers(num_reqs)
    free = data.draw(st.integers(num_reqs, num_reqs * 4))
    most = num_reqs * 4 - free
    seconds = price_budgets(table, num_reqs, free, most, tiers).seconds
    for budget in range(most + 1):
        ran = grid.key(num_reqs, free + budget).num_tokens
        assert seconds[budget] == table.step_seconds(num_reqs, rows(ran))[0]


def test_uninitialised_is_any_table_of_one_probe():
    assert SpsCostTable.uninitialized(256) == SpsCostTable((1,), (1.0,), 256)
    assert SpsCostTable((8,), (50.0,), 8).is_uninitialized
    assert not parse_cost_table(ONE_D).is_uninitialized
    assert not SpsAdditiveCostTable(0.1, (1,), (0.0,), (0,), (0.0,)).is_uninitialized


def test_scaling_multiplies_seconds():
    for text in (ONE_D, TWO_D):
        table = parse_cost_table(text)
        assert table.scaled(4.0).step_seconds(5, rows(1, 9, 70)) == pytest.approx(
            4 * table.step_seconds(5, rows(1, 9, 70))
        )


def test_plain_step_costs():
    costs = PlainStepCosts((1, 5), (0.01, 0.02))
    assert [costs.step_seconds(n) for n in (1, 3, 5, 9)] == pytest.approx([0.01, 0.015, 0.02, 0.02])
    with pytest.raises(ValueError, match="seconds"):
        PlainStepCosts((1, 5), (0.01, 0.0))


# Correction


CELLS = rows(8, 16, 32)


def test_correction_follows_a_slow_machine_slowly_and_everywhere():
    correction = CostCorrection(CELLS, rate=0.02)
    correction.observe(16, 0.01, 0.015)
    assert 1.0 < correction.factors(rows(16))[0] < 1.03
    for _ in range(500):
        correction.observe(16, 0.01, 0.015)
    assert correction.factors(rows(9, 16)) == pytest.approx([1.5, 1.5], rel=1e-3)
    # A shape never visited takes the shared level, so it does not look cheap for not having been tried.
    assert correction.factors(rows(32))[0] == pytest.approx(1.5 ** (2 / 3), rel=1e-3)


def test_correction_mends_a_table_that_is_wrong_about_one_shape():
    correction = CostCorrection(CELLS)
    for _ in range(1000):
        correction.observe(8, 0.01, 0.01)
        correction.observe(32, 0.01, 0.016)
    assert correction.factors(rows(8, 32)) == pytest.approx([1.0, 1.6], rel=2e-2)


def test_correction_is_bounded():
    correction = CostCorrection(CELLS, rate=0.02, max_deviation=2.0)
    correction.observe(8, 0.01, 1e9)  # one step that hung
    assert correction.factors(rows(8))[0] == pytest.approx(2 ** (3 * 0.02))
    for _ in range(5000):
        correction.observe(8, 0.01, 1e9)
        correction.observe(32, 0.01, 1e-9)
    factors = correction.factors(rows(8, 16, 32))
    assert factors[0] / factors[1] <= 2.0 + 1e-9 and factors[2] / factors[1] >= 0.5 - 1e-9
    assert 1 / 16 - 1e-9 <= factors[1] <= 16 + 1e-9


def test_a_single_time_moves_nothing_where_the_median_counts():
    correction = CostCorrection(CELLS, rate=0.125, median_of=3)
    correction.observe(8, 0.01, 10.0)
    assert correction.factors(rows(8, 16)).tolist() == [1.0, 1.0]
    for _ in range(3):
        correction.observe(8, 0.01, 0.01)
    assert correction.factors(rows(8, 16)).tolist() == [1.0, 1.0]
    correction.observe(16, 0.01, 0.02)
    assert correction.factors(rows(8, 16)).tolist() == [1.0, 1.0]
    correction.observe(16, 0.01, 0.02)  # again: believed
    assert correction.factors(rows(8, 16)) == pytest.approx([2**0.25, 2**0.375])


def test_correction_switched_off_or_fed_nonsense_changes_nothing():
    off = CostCorrection(CELLS, enabled=False)
    off.observe(8, 0.01, 0.05)
    on = CostCorrection(CELLS)
    for measured in (0.0, -1.0, math.nan, math.inf):
        on.observe(8, 0.01, measured)
    for correction in (off, on):
        assert correction.num_observations == 0
        assert correction.factors(rows(1, 8, 99)).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="rate"):
        CostCorrection(CELLS, rate=0.5)


def test_correction_depends_on_nothing_but_its_observations():
    rng = np.random.default_rng(1)
    seen = [
        (int(t), 0.01, float(s))
        for t, s in zip(rng.integers(1, 40, 300), rng.uniform(0.005, 0.03, 300), strict=True)
    ]
    replicas = [CostCorrection(CELLS) for _ in range(2)]
    for replica in replicas:
        for step in seen:
            replica.observe(*step)
    assert replicas[0].factors(rows(8, 16, 32)).tobytes() == replicas[1].factors(rows(8, 16, 32)).tobytes()


def test_prices_keep_the_table_beside_the_correction():
    table, correction = parse_cost_table(TWO_D), CostCorrection(CELLS)
    for _ in range(800):
        correction.observe(8, 0.01, 0.015)
    prices = price_budgets(table, 4, 4, 28, correction=correction)
    assert prices.table_seconds.tolist() == table.step_seconds(4, np.arange(4, 33)).tolist()
    assert prices.seconds[:5] / prices.table_seconds[:5] == pytest.approx([1.5] * 5, rel=1e-3)
