"""The tier grid: what the one rule makes, that nothing outside it can be asked for, and that padding stays small."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.speculative.tiers import TierGrid, TierKey, TierRule, capture_lens, filled_budget, spaced

RULES = st.builds(
    TierRule,
    width=st.integers(1, 9),
    max_num_reqs=st.integers(1, 40),
    finest_reqs=st.integers(1, 8),
    finest_tokens=st.integers(1, 16),
    relative=st.integers(1, 16),
    every_full_block_up_to=st.integers(0, 40),
)


def test_spacing_by_example():
    assert spaced(1, 20, 1, 4) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert spaced(3, 30, 8, 16) == [3, 8, 16, 24, 30]
    assert spaced(5, 5, 8, 16) == [5]


def test_the_grid_by_example():
    grid = TierGrid(
        TierRule(width=4, max_num_reqs=6, finest_reqs=2, finest_tokens=4, every_full_block_up_to=6)
    )
    assert grid.buckets == [1, 2, 4, 6]
    assert grid.tiers(3).num_tokens.tolist() == [4, 8, 12, 16]
    assert grid.tiers(5).num_tokens.tolist() == [8, 12, 16, 20, 24]
    assert grid.tiers(1).num_tokens.tolist() == [4]  # too fine to tell apart: the full block is the only tier
    assert grid.plain_key(5) == TierKey(6, 6) and grid.plain_key(7) is None
    assert grid.key(3, 3) == TierKey(4, 4)  # never fewer rows than slots
    assert grid.key(3, 12) == TierKey(4, 12)  # the full block of 3 is a tier though 3 is no bucket
    assert grid.key(3, 13) == TierKey(4, 16)
    assert grid.key(7, 7) is None and grid.tiers(0) is None  # past the grid: run it eagerly
    with pytest.raises(ValueError, match="17 tokens do not fit 4 slots"):
        grid.tiers(4).round_up(17)


@settings(max_examples=60, deadline=None)
@given(rule=RULES)
def test_every_step_has_a_key_and_the_keys_to_capture_are_those(rule):
    grid = TierGrid(rule)
    asked = set()
    for n in range(1, rule.max_num_reqs + 1):
        for tokens in range(n, n * rule.width + 1):
            key = grid.key(n, tokens)
            assert key.num_slots >= n and key.num_slots <= key.num_tokens <= key.num_slots * rule.width
            assert key.num_tokens >= tokens
            tiers = grid.tiers(n).num_tokens.tolist()
            assert key.num_tokens == min(t for t in tiers if t >= tokens)
            asked.add(key)
    reachable = grid.reachable_keys()
    assert grid.row_counts().tolist() == sorted({key.num_tokens for key in reachable})
    assert len(reachable) == len(set(reachable)) and set(reachable) == asked


@settings(max_examples=60, deadline=None)
@given(rule=RULES)
def test_full_blocks_are_tiers_and_plain_steps_have_keys(rule):
    grid = TierGrid(rule)
    for n in range(1, rule.max_num_reqs + 1):
        bucket = grid.tiers(n).num_slots
        if (n <= rule.every_full_block_up_to and n * rule.width >= bucket) or n in grid.buckets:
            assert grid.full_block_is_a_tier(n)
        assert grid.plain_key(n) == TierKey(bucket, bucket)
    assert grid.plain_keys() == sorted(
        {grid.plain_key(n) for n in range(1, rule.max_num_reqs + 1)}, key=lambda key: key.num_slots
    )


@settings(max_examples=60, deadline=None)
@given(rule=RULES)
def test_padding_is_bounded(rule):
    grid = TierGrid(rule)
    for bucket in grid.buckets:
        for tokens in range(bucket, bucket * rule.width + 1):
            padding = grid.tiers(bucket).round_up(tokens) - tokens
            assert padding <= max(rule.finest_tokens - 1, tokens / rule.relative)


@settings(max_examples=60, deadline=None)
@given(rule=RULES)
def test_capture_lengths(rule):
    for key in TierGrid(rule).reachable_keys():
        lens = capture_lens(key, rule.width)
        assert len(lens) == key.num_slots and sum(lens) == key.num_tokens
        assert min(lens) >= 1 and max(lens) <= rule.width and max(lens) - min(lens) <= 1
        assert lens == sorted(lens, reverse=True)


def test_shapes_that_cannot_be_captured_are_refused():
    for key in (TierKey(4, 3), TierKey(4, 17)):
        with pytest.raises(ValueError, match="no tier of width 4"):
            capture_lens(key, 4)


def test_tier_fill_by_example():
    assert filled_budget(budget=2, num_free_tokens=3, max_budget=9, tier_tokens=8) == 5
    assert filled_budget(budget=5, num_free_tokens=3, max_budget=9, tier_tokens=8) == 5
    assert filled_budget(budget=7, num_free_tokens=3, max_budget=8, tier_tokens=16) == 8  # no more than fits


def test_rules_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="finest_tokens"):
        TierRule(width=4, max_num_reqs=4, finest_tokens=0)


def test_a_shared_grid_cannot_be_changed():
    tiers = TierGrid(TierRule(width=4, max_num_reqs=4)).tiers(2)
    with pytest.raises(ValueError, match="read-only"):
        tiers.num_tokens[0] = 1
