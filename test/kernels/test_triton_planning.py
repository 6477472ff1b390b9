"""Allocation and packing in Triton: integers, equal to their references."""

import pytest
import torch

from flashspark.kernels.allocate import allocate
from flashspark.kernels.commit_rows import commit_rows
from flashspark.kernels.draft_inputs import draft_inputs
from flashspark.kernels.pack_rows import pack_rows
from parity import DEVICE, NEEDS_TRITON, integers, rand, reference

pytestmark = NEEDS_TRITON


@pytest.mark.parametrize(("num_reqs", "gamma"), [(1, 1), (1, 7), (4, 3), (5, 6)])
def test_allocate(num_reqs, gamma):
    floors = integers([1 + r % 3 for r in range(num_reqs)])
    caps = integers([gamma + 1 - r % 2 for r in range(num_reqs)])
    for seed, eps in ((0, 0.0), (1, 0.05)):
        confidence = rand(num_reqs, gamma, seed=seed) ** 0.3
        if seed:  # ties, and values that are no probabilities
            confidence = (confidence * 4).round() / 4
            confidence[0, 0], confidence[-1, -1] = float("nan"), 7.0
        for budget in (num_reqs, num_reqs * gamma // 2 + 1, 10**6):
            expected = reference(allocate, confidence, budget, floors, caps, eps)
            assert torch.equal(allocate(confidence, budget, floors, caps, eps, "triton"), expected)


def test_allocate_takes_a_budget_from_the_device():
    args = (rand(3, 4), integers(5), integers([1, 1, 2]), integers([5, 4, 5]), 0.0)
    assert torch.equal(allocate(*args, "triton"), reference(allocate, *args))


def test_allocate_without_drafts():
    floors, caps = integers([2, 1, 3]), integers([1, 1, 4])
    got = allocate(rand(3, 0), 5, floors, caps, 0.0, "triton")
    assert got.tolist() == [1, 1, 3] == allocate(rand(3, 0), 5, floors, caps, 0.0, "torch").tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("lens", "padding"), [([3], 0), ([1, 4, 2], 5), ([4, 4, 1, 3], 40), ([1], 1)])
def test_pack_rows(lens, padding, page_size):
    """Drafts past a cutoff, rows of others and pages past a request's own are poison that must not come through."""
    gamma, poison, max_rows = 3, -(10**9), 6
    context_lens = torch.full((max_rows,), poison)
    anchors, page_table = torch.full((max_rows,), poison), torch.full((max_rows, 40), poison)
    rows = torch.randperm(max_rows, generator=torch.Generator().manual_seed(padding))[: len(lens)]
    drafts = torch.arange(len(lens) * gamma).view(-1, gamma) + 300
    for r, (row, length) in enumerate(zip(rows.tolist(), lens, strict=True)):
        context_lens[row], anchors[row] = 7 * r + 2, 100 + row
        num_pages = -(-(7 * r + 2 + length) // page_size)
        page_table[row, :num_pages] = torch.arange(num_pages) * 3 + 50 * row
        drafts[r, length - 1 :] = poison
    args = [x.to(DEVICE) for x in (rows, anchors, context_lens, page_table)]
    args += [page_size, drafts.to(DEVICE), integers(lens), sum(lens) + padding]
    got = pack_rows(*args, implementation="triton")
    for name, a, b in zip(got._fields, got, pack_rows(*args, implementation="torch"), strict=True):
        assert torch.equal(a, b), name
    assert (torch.stack(got[2:6]) >= 0).all()


@pytest.mark.parametrize("max_pages", [3, 600])
def test_pack_rows_with_limits(max_pages):
    """Rows that run though they may not be accepted, and requests at their ends: cut to 1, to some, not at all."""
    rows, drafts = integers([4, 0, 2]), integers(torch.arange(9).view(3, 3))
    context_lens, max_lens = integers([9, 0, 20, 0, 6]), integers([2**40, 0, 23, 0, 7])
    table = integers(torch.arange(5 * max_pages).view(5, max_pages))
    args = (rows, integers(range(5)), context_lens, table, 16, drafts, integers([3, 2, 4]), 12, True, None)
    for implementation in ("torch", "triton"):
        packed = pack_rows(*args, integers([1, 4, 2]), max_lens, implementation)
        assert packed.cutoff.tolist() == [1, 2, 2]
        assert packed.qo_indptr.tolist() == [0, 3, 7, 11]
        assert packed.kv_lens.tolist() == [9, 13, 24]
        assert torch.equal(packed.page_table, table[rows])


@pytest.mark.parametrize(("width", "max_pages"), [(1, 1), (8, 3), (5, 600)])
def test_draft_inputs(width, max_pages):
    rows, anchors, lens = integers([4, 0, 4, 2]), integers(range(50, 55)), integers(range(9, 14))
    table = integers(torch.arange(5 * max_pages).view(5, max_pages))
    got = draft_inputs(rows, anchors, lens, table, width, 77, "triton")
    assert got.block_ids.tolist() == [[anchor] + [77] * (width - 1) for anchor in (54, 50, 54, 52)]
    for a, b in zip(got, draft_inputs(rows, anchors, lens, table, width, 77, "torch"), strict=True):
        assert torch.equal(a, b)


def test_commit_rows():
    """130 of 200 rows move on; the others keep what they have."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(200, generator=generator)[:130].to(DEVICE)
    tokens = integers(torch.randint(1000, (130, 6), generator=generator))
    num_tokens = integers(torch.randint(1, 7, (130,), generator=generator))
    context_lens, anchors = integers(torch.arange(200)), integers(torch.arange(200) + 5000)
    for implementation in ("torch", "triton"):
        lens, last = context_lens.clone(), anchors.clone()
        commit_rows(lens, last, rows, tokens, num_tokens, implementation)
        assert torch.equal(lens[rows], rows + num_tokens)
        picked = [row[n - 1] for row, n in zip(tokens.tolist(), num_tokens.tolist(), strict=True)]
        assert last[rows].tolist() == picked
        others = torch.ones(200, dtype=torch.bool, device=DEVICE).index_fill_(0, rows, False)
        assert torch.equal(lens[others], context_lens[others])
        assert torch.equal(last[others], anchors[others])
