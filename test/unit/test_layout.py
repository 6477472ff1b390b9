"""Packing against the definition, for any mix of verify lengths, padded up to a tier or not."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.engine.request_rows import RequestRows
from flashspark.speculative.layout import full_rows, pack
from flashspark.speculative.tiers import TierGrid, TierRule

PAGE_SIZE, MAX_REQS, GAMMA = 4, 6, 4
WIDTH = GAMMA + 1
GRID = TierGrid(TierRule(WIDTH, MAX_REQS, finest_tokens=4))
CPU = torch.device("cpu")

context_lens = st.integers(0, 30)
batches = st.lists(st.tuples(context_lens, st.integers(1, WIDTH)), min_size=1, max_size=MAX_REQS)
seeds = st.integers(0, 1000)


def batch_of(lens, seed):
    """Requests of these (context, verify) lengths in rows, pages and words of their own."""
    g = torch.Generator().manual_seed(seed)
    state = RequestRows(MAX_REQS, 10, PAGE_SIZE, CPU)
    state.page_table[:MAX_REQS] = torch.randperm(MAX_REQS * 10, generator=g).view(MAX_REQS, 10) + 1
    rows = torch.randperm(MAX_REQS, generator=g)[: len(lens)]
    drafts = torch.randint(100, (len(lens), GAMMA), generator=g)
    for row, (context_len, _) in zip(rows.tolist(), lens, strict=True):
        state.set_context(row, context_len, anchor=200 + row)
    verify_lens = torch.tensor([length for _, length in lens])
    return SimpleNamespace(state=state, rows=rows, drafts=drafts, lens=verify_lens)


def packed(batch, num_tokens=None, **how):
    num_tokens = int(batch.lens.sum()) if num_tokens is None else num_tokens
    return pack(batch.state, batch.rows, batch.drafts, batch.lens, num_tokens, **how)


def check(layout, batch, num_tokens):
    """Every row is where the definition puts it; rows past the last request's are nobody's."""
    page_table, at = batch.state.page_table, 0
    queries = layout.queries
    assert queries.qo_indptr[0] == 0
    for r, (row, length) in enumerate(zip(batch.rows.tolist(), batch.lens.tolist(), strict=True)):
        block, context_len = [200 + row, *batch.drafts[r].tolist()], int(batch.state.context_lens[row])
        for i in range(length):
            position = context_len + i
            page = page_table[row, position // PAGE_SIZE].item()
            assert layout.input_ids[at] == block[i]
            assert queries.positions[at] == position
            assert queries.slots[at] == page * PAGE_SIZE + position % PAGE_SIZE
            assert layout.block_rows[r, i] == at
            at += 1
        assert (layout.block_rows[r, length:] == at - 1).all()
        assert queries.kv_lens[r] == context_len + length
        assert queries.qo_indptr[r + 1] == at
    assert layout.input_ids.shape == queries.positions.shape == queries.slots.shape == (num_tokens,)
    for padding in (layout.input_ids[at:], queries.positions[at:], queries.slots[at:]):
        assert not padding.any()  # id 0 at position 0 in the scratch slot
    assert layout.block_rows.max() < at


@settings(deadline=None)
@given(lens=batches, seed=seeds)
def test_every_packed_row_is_where_it_belongs(lens, seed):
    batch = batch_of(lens, seed)
    check(packed(batch), batch, int(batch.lens.sum()))


@settings(deadline=None)
@given(lens=batches, seed=seeds)
def test_padding_up_to_the_tier_moves_no_row(lens, seed):
    batch = batch_of(lens, seed)
    num_tokens = GRID.key(len(lens), int(batch.lens.sum())).num_tokens
    check(packed(batch, num_tokens, padded=True), batch, num_tokens)


@settings(deadline=None)
@given(lens=batches, seed=seeds, shards=st.integers(1, 5))
def test_block_rows_undo_the_packing_also_of_a_vocabulary_shard(lens, seed, shards):
    batch = batch_of(lens, seed)
    layout = packed(batch)
    blocks = torch.randn(len(lens), WIDTH, 10)
    rows = torch.cat([block[:length] for block, length in zip(blocks, batch.lens, strict=True)])
    back = rows[layout.block_rows]
    for r, length in enumerate(batch.lens.tolist()):
        assert torch.equal(back[r, :length], blocks[r, :length])
        assert torch.equal(back[r, length:], blocks[r, length - 1].expand(WIDTH - length, -1))
    apart = [shard[layout.block_rows] for shard in rows.chunk(shards, dim=1)]
    assert torch.equal(torch.cat(apart, dim=2), back)


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.tuples(batches, seeds, st.booleans()), min_size=2, max_size=6))
def test_a_shape_used_before_leaves_nothing_behind(steps):
    """Full blocks and others by turns, tier after tier: a layout follows from its own step alone."""
    for lens, seed, full in steps:
        batch = batch_of([(n, WIDTH) for n, _ in lens] if full else lens, seed)
        num_tokens = GRID.key(len(lens), int(batch.lens.sum())).num_tokens
        layout = packed(batch, num_tokens, padded=True, full=full)
        check(layout, batch, num_tokens)
        assert layout.queries.plans == {}
        layout.queries.plans["backend"] = "of this step"


@pytest.mark.parametrize("num_tokens", [2 * WIDTH, 2 * WIDTH + 3])
def test_full_blocks_share_what_does_not_change(num_tokens):
    layouts = [
        packed(batch_of([(n, WIDTH), (3, WIDTH)], n), num_tokens, padded=True, full=True) for n in (5, 9)
    ]
    assert layouts[0].block_rows is layouts[1].block_rows
    assert layouts[0].queries.qo_indptr is layouts[1].queries.qo_indptr
    shared = full_rows(2, WIDTH, num_tokens, CPU)
    assert shared.qo_indptr is layouts[0].queries.qo_indptr
    assert (shared.is_padding is None) == (num_tokens == 2 * WIDTH)


@pytest.mark.parametrize(
    ("lens", "positions"),
    [([3, 2, 3], [10, 11, 12, 20, 21, 30, 31, 32]), ([3, 2, 2], [10, 11, 12, 20, 21, 30, 31, 0])],
)
def test_worked_example(lens, positions):
    """Budgets of 5 and 4 after 10, 20 and 30 tokens, in a tier of 8: no padding, and one row of it."""
    state = RequestRows(3, 10, PAGE_SIZE, CPU)
    state.page_table[:3] = torch.arange(1, 31).view(3, 10)
    for row in range(3):
        state.set_context(row, 10 * (row + 1), anchor=100 * (row + 1))
    drafts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    layout = pack(state, torch.arange(3), drafts, torch.tensor(lens), 8, padded=True)
    assert layout.queries.qo_indptr.tolist() == [0, 3, 5, sum(lens)]
    assert layout.queries.positions.tolist() == positions
    assert layout.queries.kv_lens.tolist() == [13, 22, 30 + lens[2]]
    ids = [100, 1, 2, 200, 4, 300, 7, 8]
    assert layout.input_ids.tolist() == ids[: sum(lens)] + [0] * (8 - sum(lens))
    last = sum(lens) - 1
    assert layout.block_rows.tolist() == [[0, 1, 2, 2], [3, 4, 4, 4], [5, 6, last, last]]
    assert layout.queries.slots.tolist()[7] == (0 if sum(lens) == 7 else 116)
