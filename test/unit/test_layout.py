"""Packing against the definition, for any mix of verify lengths."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.engine.request_rows import RequestRows
from flashspark.speculative.layout import pack

PAGE_SIZE, MAX_REQS = 4, 6


@settings(deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=MAX_REQS),
    seed=st.integers(0, 1000),
)
def test_every_packed_row_is_where_it_belongs(lens, seed):
    g = torch.Generator().manual_seed(seed)
    rows_state = RequestRows(MAX_REQS, 10, PAGE_SIZE, torch.device("cpu"))
    rows_state.page_table[:] = torch.randperm(MAX_REQS * 10, generator=g).view(MAX_REQS, 10) + 1
    rows = torch.randperm(MAX_REQS, generator=g)[: len(lens)]
    drafts = torch.randint(100, (len(lens), 4), generator=g)
    for row, (context_len, _) in zip(rows.tolist(), lens, strict=True):
        rows_state.set_context(row, context_len, anchor=200 + row)
    verify_lens = torch.tensor([length for _, length in lens])
    layout = pack(rows_state, rows, drafts, verify_lens, int(verify_lens.sum()))

    at = 0
    for r, (row, (context_len, length)) in enumerate(zip(rows.tolist(), lens, strict=True)):
        block = [200 + row, *drafts[r].tolist()]
        for i in range(length):
            position = context_len + i
            page = rows_state.page_table[row, position // PAGE_SIZE].item()
            assert layout.input_ids[at] == block[i]
            assert layout.queries.positions[at] == position
            assert layout.queries.slots[at] == page * PAGE_SIZE + position % PAGE_SIZE
            assert layout.block_rows[r, i] == at
            at += 1
        assert (layout.block_rows[r, length:] == at - 1).all()
        assert layout.queries.kv_lens[r] == context_len + length
        assert layout.queries.qo_indptr[r + 1] == at
    assert layout.input_ids.shape == (at,)
