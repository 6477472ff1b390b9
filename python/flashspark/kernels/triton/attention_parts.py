"""What attention kernels are made of (`paged_attention`): shares of keys, blocks of them into a running softmax, and
heads as they come out of the projection."""

from __future__ import annotations

import triton
import triton.language as tl

from .qk_norm_rope import normed_heads, turned


@triton.jit
def add_keys(q, k, v, visible, scale, acc, peak, total, DOT: tl.constexpr):
    """One block of keys into the running softmax: `acc` [M, D], `peak` and `total` [M], all float32."""
    scores = tl.dot(q, tl.trans(k).to(DOT), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # rows that have seen no key yet
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, axis=1)
    product = tl.dot(weights.to(v.dtype).to(DOT), v.to(DOT), input_precision="ieee")
    return acc * decay[:, None] + product, new_peak, total


@triton.jit
def span(
    request,
    tile,
    indptr_ptr,
    lens_ptr,
    BLOCK_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile's first row and number of rows, its request's number of keys; its range of keys, and of one share."""
    length = tl.load(lens_ptr + request).to(tl.int32)
    if BLOCK_ROWS > 0:  # a draft block: all of the context, as far as the window of its first row reaches
        first_row = request * BLOCK_ROWS
        num_rows = BLOCK_ROWS
        start_key = 0
        if WINDOW > 0:
            start_key = tl.maximum(length - WINDOW + 1, 0)
        end_key = length
    else:
        first_row = tl.load(indptr_ptr + request).to(tl.int32)
        num_rows = tl.load(indptr_ptr + request + 1).to(tl.int32) - first_row
        start_key = 0
        end_key = tl.minimum(length, length - num_rows + (tile + 1) * TILE)
    share = tl.cdiv(tl.cdiv(end_key - start_key, MAX_SPLITS), BLOCK_N) * BLOCK_N
    return first_row, num_rows, length, start_key, end_key, tl.maximum(share, BLOCK_N)


@triton.jit
def zero_padding(
    out_ptr,
    first,
    num_packed,
    request,
    num_slots,
    head,
    in_group,
    d,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Rows of nobody, shared out over the slots: their numbers mean nothing, and are finite."""
    for row in range(first + request, num_packed, num_slots):
        at = ((head * 0 + row).to(tl.int64)[:, None] * NUM_HEADS + head[:, None]) * DIM + d
        tl.store(out_ptr + at, 0.0, mask=in_group[:, None] & (d < DIM))


@triton.jit
def add_pages(
    q,
    k_ptr,
    v_ptr,
    pages_ptr,
    start,
    end,
    position,
    page_size,
    kv_head,
    d,
    scale,
    acc,
    peak,
    total,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """Keys `start` … `end` - 1 of one request's pages; a row sees those up to its own `position` [M], and within the
    window that ends there."""
    for at in range(start, end, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        page = tl.load(pages_ptr + key // page_size, mask=key < end, other=0)
        slot = page * page_size + key % page_size
        source = (slot * NUM_KV_HEADS + kv_head)[:, None] * DIM + d
        there = (key < end)[:, None] & (d < DIM)
        k = tl.load(k_ptr + source, mask=there, other=0.0)
        v = tl.load(v_ptr + source, mask=there, other=0.0)
        visible = (key < end)[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (position[:, None] - key[None, :] < WINDOW)
        acc, peak, total = add_keys(q, k, v, visible, scale, acc, peak, total, DOT)
    return acc, peak, total


@triton.jit
def add_block(
    q,
    k_ptr,
    v_ptr,
    row,
    d,
    k_stride,
    v_stride,
    scale,
    acc,
    peak,
    total,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """The block's own keys, `ROWS` of them."""
    key = tl.arange(0, BLOCK_N)
    wide = key.to(tl.int64)[:, None]
    there = (key < ROWS)[:, None] & (d < DIM)
    k = tl.load(k_ptr + wide * k_stride + d, mask=there, other=0.0)
    v = tl.load(v_ptr + wide * v_stride + d, mask=there, other=0.0)
    visible = (key < ROWS)[None, :] & (row >= 0)[:, None]
    if CAUSAL:
        visible = visible & (key[None, :] <= row[:, None])
    if WINDOW > 0:
        visible = visible & (row[:, None] - key[None, :] < WINDOW)
    return add_keys(q, k, v, visible, scale, acc, peak, total, DOT)


@triton.jit
def combined(acc_ptr, stats_ptr, base, num_shares, m, d, inside, BLOCK_M: tl.constexpr, DIM: tl.constexpr):
    """What the shares of a tile have left from place `base` on, added up in their order: [M, D].

    Several at once, so that their loads are under way together; past the first cache, which may be stale.
    """
    AT_ONCE: tl.constexpr = max(1, 128 // BLOCK_M)
    acc = tl.zeros((BLOCK_M, d.shape[1]), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, num_shares, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)[None, :]
        place = base + split * BLOCK_M + m[:, None]
        there = (m >= 0)[:, None] & (split < num_shares)
        peaks = tl.load(stats_ptr + place * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats_ptr + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        wide = inside[:, None, :] & there[:, :, None]
        source = acc_ptr + place[:, :, None] * DIM + d[:, None, :]
        parts = tl.load(source, mask=wide, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(peaks, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # of rows past the tile's
        decay, weights = tl.exp2(peak - shift), tl.exp2(peaks - shift[:, None])
        total = total * decay + tl.sum(totals * weights, axis=1)
        acc = acc * decay[:, None] + tl.sum(parts * weights[:, :, None], axis=1)
        peak = new_peak
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def turned_heads(
    heads_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    row,
    head,
    d,
    inside,
    stride,
    eps,
    DIM: tl.constexpr,
):
    """Heads `head` [M] of rows `row` [M, 1], as projected, normed and turned as `kernels.qk_norm_rope` does: [M, D].

    Each element is loaded twice, for itself and for its partner in the other half.
    """
    partner = (d + DIM // 2) % DIM
    source = heads_ptr + row * stride + head[:, None] * DIM
    weights = weight_ptr + head[:, None] * DIM
    x = tl.load(source + d, mask=inside, other=0.0)
    other = tl.load(source + partner, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
    own = normed_heads(x, tl.load(weights + d, mask=inside, other=0.0), inverse)
    other = normed_heads(other, tl.load(weights + partner, mask=inside, other=0.0), inverse)
    at = row * DIM + d
    return turned(own, other, cos_ptr + at, sin_ptr + at, inside, x.dtype)


@triton.jit
def write_window(
    heads_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    pages_ptr,
    first_row,
    num_rows,
    length,
    start,
    end,
    kv_head,
    d,
    stride,
    page_size,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A window's own keys and values of one head to its pages, as far as they are keys `start` … `end` - 1."""
    row = tl.arange(0, ROWS)
    key = length - num_rows + row
    is_mine = (row < num_rows) & (key >= start) & (key < end)
    inside = is_mine[:, None] & (d < DIM)
    packed = (first_row + row).to(tl.int64)[:, None]
    head = NUM_HEADS + kv_head + row * 0
    k = turned_heads(heads_ptr, weight_ptr, cos_ptr, sin_ptr, packed, head, d, inside, stride, eps, DIM)
    source = heads_ptr + packed * stride + (NUM_HEADS + NUM_KV_HEADS + kv_head) * DIM + d
    v = tl.load(source, mask=inside, other=0.0)
    page = tl.load(pages_ptr + key // page_size, mask=is_mine, other=0)
    slot = page * page_size + key % page_size
    at = (slot * NUM_KV_HEADS + kv_head)[:, None] * DIM + d
    tl.store(k_ptr + at, k, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
