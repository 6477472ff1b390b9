"""The reference backend against a loop over queries, heads and visible keys in float64."""

import math

import pytest
import torch

from flashspark.attention.kv_pool import KVPool
from flashspark.attention.registry import make_backend
from paged import Pages

HEADS, KV_HEADS, DIM = 6, 2, 8
BACKEND = make_backend("torch_native")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def attend(q, keys, values, visible):
    """One query [D] over the visible rows of [n, D], in float64."""
    weights = torch.softmax(keys[visible].double() @ q.double() / math.sqrt(DIM), 0)
    return weights @ values[visible].double()


def filled(pages):
    pool = KVPool(1, pages.num_slots, KV_HEADS, DIM, torch.float32, "cpu")
    pool.k[0].normal_()
    pool.v[0].normal_()
    return pool.k[0], pool.v[0]


@pytest.mark.parametrize("seed", [0, None], ids=["shuffled pages", "pages in one run"])
@pytest.mark.parametrize(
    "spans", [[(0, 0, 5)], [(0, 9, 1)], [(0, 3, 6)], [(1, 7, 2), (0, 0, 4), (2, 10, 1)]], ids=str
)
def test_ragged_is_causal_and_bottom_right_aligned(seed, spans):
    pages = Pages(3, 12, seed)
    k, v = filled(pages)
    queries = pages.ragged(spans, padding=1)
    q = torch.randn(len(queries.positions), HEADS, DIM)
    got = BACKEND.ragged(q, k, v, queries, DIM**-0.5)
    assert got.shape == q.shape
    assert got.isfinite().all()
    row = 0
    for r, start, count in spans:
        slots = pages.slots(r, torch.arange(start + count))
        for position in range(start, start + count):
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                expected = attend(q[row, head], k[slots, kv], v[slots, kv], range(position + 1))
                torch.testing.assert_close(got[row, head].double(), expected, atol=1e-5, rtol=0)
            row += 1


@pytest.mark.parametrize("seed", [0, None], ids=["shuffled pages", "pages in one run"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_block_sees_context_and_itself(seed, causal, window):
    pages, width = Pages(3, 16, seed), 4
    k_cache, v_cache = filled(pages)
    lens = [0, 9, 5]
    q = torch.randn(3, width, HEADS, DIM)
    k, v = torch.randn(3, width, KV_HEADS, DIM), torch.randn(3, width, KV_HEADS, DIM)
    queries = pages.block([0, 1, 2], lens, width)
    got = BACKEND.block(q, k, v, k_cache, v_cache, queries, DIM**-0.5, causal, window)
    for r, n in enumerate(lens):
        slots = pages.slots(r, torch.arange(n))
        keys, values = torch.cat((k_cache[slots], k[r])), torch.cat((v_cache[slots], v[r]))
        for row in range(width):
            visible = [
                key
                for key in range(n + width)
                if (not causal or key <= n + row) and (window is None or n + row - key < window)
            ]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                expected = attend(q[r, row, head], keys[:, kv], values[:, kv], visible)
                torch.testing.assert_close(got[r, row, head].double(), expected, atol=1e-5, rtol=0)


def test_layers_with_different_windows_share_one_set_of_queries():
    pages = Pages(1, 16)
    k_cache, v_cache = filled(pages)
    q, k, v = (
        torch.randn(1, 4, HEADS, DIM),
        torch.randn(1, 4, KV_HEADS, DIM),
        torch.randn(1, 4, KV_HEADS, DIM),
    )
    shared = pages.block([0], [9], 4)
    for causal, window in [(False, None), (True, 3), (False, 3), (True, None)]:
        args = (q, k, v, k_cache, v_cache)
        fresh = BACKEND.block(*args, pages.block([0], [9], 4), 1.0, causal, window)
        assert torch.equal(BACKEND.block(*args, shared, 1.0, causal, window), fresh)


def test_pool_writes_rows_to_their_slots():
    pool = KVPool(2, 8, KV_HEADS, DIM, torch.float32, "cpu")
    k, v = torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, DIM)
    pool.write(1, torch.tensor([6, 2, 3]), k, v)
    assert torch.equal(pool.k[1][[6, 2, 3]], k)
    assert torch.equal(pool.v[1][[6, 2, 3]], v)
    assert not pool.k[0].any()
    assert not pool.k[1][[0, 1, 4, 5, 7]].any()
    assert KVPool.bytes_per_slot(2, KV_HEADS, DIM, torch.float32) * 8 == sum(
        c.nbytes for c in pool.k + pool.v
    )


def test_unknown_backend_names_flag_and_choices():
    with pytest.raises(ValueError, match=r"--attention-backend 'fa9'.*torch_native"):
        make_backend("fa9")
