"""Attention over paged keys and values, for windows of a few query rows: verify, prefill chunks, draft blocks.

One program takes one tile of a request's rows with all query heads of one key head, so that keys are loaded once for
the group, and one share of the keys. Shares follow from the request's own number of keys, read on the device; whoever
is done last puts their results together, in the order of the keys, and a request's numbers depend on nothing else of
the batch but its number of slots. Nothing is read on the host, and absent slots leave at once, so a launch can be
captured for a whole bucket of requests.

The reference is `attention.torch_native`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..qk_norm_rope import HeadTurn
from .attention_parts import add_block, add_pages, combined, span, turned_heads, write_window, zero_padding
from .launch import await_previous, block_size, dot_type, is_interpreted, launch_options

PROGRAMS = 264  # two for each multiprocessor of an H200: with half as many, keys are split
MANY_PROGRAMS = 384  # beyond, several share a multiprocessor, and smaller ones fill it better
MAX_SPLITS = 32
MAX_TILE = 128  # query rows times query heads of a key head
SMALL_TILE = 8  # rows; prefill has tiles of two sizes alone, so that few kernels are compiled
LOG2_E = 1.4426950408889634


# fmt: off
@triton.jit(do_not_specialize=["num_packed", "num_tiles"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, block_k_ptr, block_v_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, acc_ptr, stats_ptr, done_ptr,
    indptr_ptr, lens_ptr, num_reqs_ptr, table_ptr, num_packed, num_tiles, q_stride, block_k_stride, block_v_stride,
    table_stride, page_size, eps, scale, PROGRAMMATIC: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, TURN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    COUNTED: tl.constexpr, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LOCAL_N: tl.constexpr, DOT: tl.constexpr,
):
    # fmt: on
    await_previous(PROGRAMMATIC)
    request, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    num_slots = tl.num_programs(0) // num_tiles
    num_reqs = num_slots
    if COUNTED:
        num_reqs = tl.load(num_reqs_ptr).to(tl.int32)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    head = kv_head * GROUP + m % GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    if (tile == 0) & (split == 0):
        padding = num_reqs * BLOCK_ROWS
        if BLOCK_ROWS == 0:
            padding = tl.load(indptr_ptr + num_reqs).to(tl.int32)
        zero_padding(out_ptr, padding, num_packed, request, num_slots, head, m < GROUP, d, NUM_HEADS, DIM)
    if request >= num_reqs:
        return
    first_row, num_rows, length, start_key, end_key, share = span(
        request, tile, indptr_ptr, lens_ptr, BLOCK_ROWS, WINDOW, TILE, MAX_SPLITS, BLOCK_N
    )
    start = start_key + split * share
    if (tile * TILE >= num_rows) | ((start >= end_key) & (split > 0)):
        return

    row = tile * TILE + m // GROUP
    inside = ((m < TILE * GROUP) & (row < num_rows))[:, None] & (d < DIM)
    packed = (first_row + row).to(tl.int64)[:, None]
    pages_ptr, end = table_ptr + request.to(tl.int64) * table_stride, tl.minimum(start + share, end_key)
    if TURN:
        write_window(
            q_ptr, weight_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, pages_ptr, first_row, num_rows, length, start, end,
            kv_head, d, q_stride, page_size, eps, NUM_HEADS, NUM_KV_HEADS, DIM, LOCAL_N,
        )  # fmt: skip
        q = turned_heads(q_ptr, weight_ptr, cos_ptr, sin_ptr, packed, head, d, inside, q_stride, eps, DIM).to(DOT)
        tl.debug_barrier()  # the whole program has written what it reads
    else:
        q = tl.load(q_ptr + packed * q_stride + head[:, None] * DIM + d, mask=inside, other=0.0).to(DOT)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    position = length + row if BLOCK_ROWS > 0 else length - num_rows + row
    acc, peak, total = add_pages(
        q, k_ptr, v_ptr, pages_ptr, start, end, position, page_size, kv_head, d, scale, acc, peak, total,
        NUM_KV_HEADS, DIM, WINDOW, BLOCK_N, DOT,
    )  # fmt: skip
    if BLOCK_ROWS > 0:  # known when compiling, the next one is not
        if split == 0:
            own_k_ptr = block_k_ptr + first_row.to(tl.int64) * block_k_stride + kv_head * DIM
            own_v_ptr = block_v_ptr + first_row.to(tl.int64) * block_v_stride + kv_head * DIM
            acc, peak, total = add_block(
                q, own_k_ptr, own_v_ptr, row, d, block_k_stride, block_v_stride, scale, acc, peak, total,
                DIM, BLOCK_ROWS, CAUSAL, WINDOW, LOCAL_N, DOT,
            )  # fmt: skip

    out_place = (packed * NUM_HEADS + head[:, None]) * DIM + d
    num_shares = tl.cdiv(end_key - start_key, share)
    if num_shares <= 1:
        total = tl.where(total == 0.0, 1.0, total)  # of rows past the tile's
        tl.store(out_ptr + out_place, acc / total[:, None], mask=inside)
    elif MAX_SPLITS > 1:
        of_tile = tl.program_id(0).to(tl.int64) * NUM_KV_HEADS + kv_head
        base = of_tile * MAX_SPLITS * BLOCK_M
        place = base + split * BLOCK_M + m
        tl.store(acc_ptr + place[:, None] * DIM + d, acc, mask=inside)
        tl.store(stats_ptr + place * 2, peak)
        tl.store(stats_ptr + place * 2 + 1, total)
        tl.debug_barrier()  # the whole program has written before it says so
        if tl.atomic_add(done_ptr + of_tile, 1, sem="acq_rel") == num_shares - 1:
            tl.store(done_ptr + of_tile, 0)  # for the next launch
            whole = combined(acc_ptr, stats_ptr, base, num_shares, m, d, inside, BLOCK_M, DIM)
            tl.store(out_ptr + out_place, whole, mask=inside)


def ragged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    num_reqs: Tensor | None,
    page_table: Tensor,
    page_size: int,
    scale: float,
    max_rows: int,
    max_splits: int | None = None,
    is_prefill: bool = False,
    turn: HeadTurn | None = None,
) -> Tensor:
    """Causal attention, bottom-right aligned, of packed rows over their requests' pages.

    Args:
        q: [M, Hq, D]; k_cache, v_cache: [num_slots, Hkv, D].
        qo_indptr: [R + 1]; kv_lens: [R]; page_table: [R, max_pages]; int64. Entries of absent slots are not read.
        num_reqs: how many of the R slots are there, an integer tensor of one element on the device; None: all.
        max_rows: no request has more rows.
        max_splits: None: as many as it takes to fill the device.
        is_prefill: `max_rows` may be anything from one call to the next, and few kernels are to serve them all.
        turn: `q` is [M, Hq + 2 * Hkv, D], heads of queries, keys, values as projected. They are normed and turned
            (`kernels.qk_norm_rope`), and keys and values written to the rows' pages, in the same launch; rows of
            nobody are not written. Only where `fits_a_tile(max_rows, …)`, and not of prefill.

    Returns:
        [M, Hq, D]; rows of nobody are zero.
    """
    return _attend(
        q, k_cache, v_cache, None, None, qo_indptr, kv_lens, num_reqs, page_table, page_size, scale, max_rows, True, 0,
        max_splits, is_prefill, turn,
    )  # fmt: skip


def fits_a_tile(max_rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether one program has all rows of a window for a key head, so that it sees no keys that another one writes."""
    return max_rows <= max(1, MAX_TILE // (num_heads // num_kv_heads))


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    num_reqs: Tensor | None,
    page_table: Tensor,
    page_size: int,
    scale: float,
    causal: bool,
    window: int | None,
    max_splits: int | None = None,
) -> Tensor:
    """Attention of draft blocks over their context's pages and their own keys, which are in no page.

    Args:
        q: [R, width, Hq, D]; k, v: [R, width, Hkv, D].
        context_lens: int64 [R]; the others as in `ragged_attention`.
        causal: whether a row sees only the rows of the block up to itself.
        window: None, or how far back a row sees, itself included.

    Returns:
        As `q`; blocks of absent slots are zero.
    """
    width = q.shape[1]
    out = _attend(
        q.flatten(0, 1), k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), context_lens, context_lens, num_reqs,
        page_table, page_size, scale, width, causal, window or 0, max_splits,
    )  # fmt: skip
    return out.view(q.shape)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_k: Tensor | None,
    block_v: Tensor | None,
    indptr: Tensor,
    lens: Tensor,
    num_reqs: Tensor | None,
    page_table: Tensor,
    page_size: int,
    scale: float,
    max_rows: int,
    causal: bool,
    window: int,
    max_splits: int | None,
    is_prefill: bool = False,
    turn: HeadTurn | None = None,
) -> Tensor:
    num_packed, num_heads, dim = q.shape
    num_slots, num_kv_heads = page_table.shape[0], k_cache.shape[1]
    if turn is not None:
        num_heads -= 2 * num_kv_heads
        assert fits_a_tile(max_rows, num_heads, num_kv_heads) and not is_prefill
        assert turn.weight.is_contiguous() and turn.cos.is_contiguous() and turn.sin.is_contiguous()
    out = torch.empty((num_packed, num_heads, dim), dtype=q.dtype, device=q.device)
    if num_packed == 0:
        return out
    q = _evenly_spaced(q)
    k, v = (
        (q, q) if block_k is None or block_v is None else (_evenly_spaced(block_k), _evenly_spaced(block_v))
    )
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and page_table.stride(1) == 1
    group = num_heads // num_kv_heads
    wanted = max_rows
    if is_prefill:
        wanted = SMALL_TILE if max_rows <= SMALL_TILE else MAX_TILE
    tile = min(wanted, max(1, MAX_TILE // group))
    num_tiles = triton.cdiv(max_rows, tile)
    block_m = block_size(tile * group, 16)
    num_programs = num_slots * num_tiles * num_kv_heads
    block_n, num_warps, num_stages = _tuning(q.dtype, block_m, num_programs, dim)
    if max_splits is None:
        max_splits = _num_splits(num_programs, page_table.shape[1] * page_size, block_n, is_prefill)
    num_partial = num_programs * max_splits * block_m if max_splits > 1 else 0
    acc = torch.empty((num_partial, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((num_partial, 2), dtype=torch.float32, device=q.device)
    shape = {
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "DIM": dim,
        "BLOCK_ROWS": 0 if block_k is None else max_rows,
        "TURN": turn is not None,
        "WINDOW": window,
        "COUNTED": num_reqs is not None,
        "TILE": tile,
        "MAX_SPLITS": max_splits,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_size(dim, 16),
    }
    count = lens if num_reqs is None else num_reqs
    weight, eps, cos, sin = (q, 0.0, q, q) if turn is None else turn
    of_block = 16  # rows of the block, or of the window that is written
    if block_k is not None or turn is not None:
        of_block = block_size(max_rows, 16 if turn is None else 1)
    done = stats
    if max_splits > 1:
        done = _counters(q.device)
        assert num_programs <= len(done), "so many programs need no shares"
    _attention_kernel[(num_slots * num_tiles, num_kv_heads, max_splits)](
        q, k_cache, v_cache, k, v, weight, cos, sin, out, acc, stats, done, indptr, lens, count, page_table,
        num_packed, num_tiles, q.stride(0), k.stride(0), v.stride(0), page_table.stride(0), page_size, eps,
        scale * LOG2_E, CAUSAL=causal, LOCAL_N=of_block, DOT=dot_type(q.dtype),
        num_warps=num_warps, num_stages=num_stages, **shape, **launch_options(num_packed),
    )  # fmt: skip
    return out


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> Tensor:
    """How many shares of each tile and key head are done: zeros between launches, of which one runs at a time."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "to be made before a capture"
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def _evenly_spaced(x: Tensor) -> Tensor:
    """Rows [N, heads, D] whose heads lie together."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _tuning(dtype: torch.dtype, block_m: int, num_programs: int, dim: int) -> tuple[int, int, int]:
    """Keys of a block, warps of a program, and loads in flight.

    Measured on an H200 with windows of 8 rows over 512 keys, between products: with two warps instead of four, 64
    requests take 41 µs instead of 62, 128 requests 76 instead of 94; 32 requests take 24 instead of 30 with blocks of
    128 keys.
    """
    if dtype == torch.float32:
        return 32, 8 if block_m > 64 else 4, 3
    if block_m > 64:
        return 64, 8, 3
    if block_m > 16 and num_programs > MANY_PROGRAMS:
        return 64, 2, 2
    keys_and_values = 2 * 2 * 128 * dim * dtype.itemsize
    if block_m > 16 and num_programs > PROGRAMS // 2 and keys_and_values < 0.75 * _shared_bytes():
        return 128, 4, 2
    return 64, 4, 2


@lru_cache(maxsize=1)
def _shared_bytes() -> int:
    """Shared memory that a program may have."""
    if not torch.cuda.is_available():
        return 0
    driver = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


def _num_splits(num_programs: int, max_keys: int, block_n: int, is_prefill: bool) -> int:
    """A power of two, so that few kernels are compiled; of four for prefill, whose are compiled before they are needed
    (`speculative.warm_up`)."""
    if is_interpreted():
        return 1  # programs run one after the other
    wanted = min(MAX_SPLITS, PROGRAMS // num_programs, triton.cdiv(max_keys, 2 * block_n))
    splits = block_size(max(1, wanted))
    return splits >> 1 if is_prefill and splits.bit_length() % 2 == 0 else splits
