"""The largest logits of each row, in two launches: the best of short runs, then what is in the best runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size

CHUNK = 4096  # logits of a program
RUN = 128  # neighbours of which only the best is looked at, at first
LOWEST = tl.constexpr(-(2**63))  # below the key of any number


@triton.jit
def sort_key(value, index):
    """int64 that orders like (value, -index): NaN above everything, of equal values the lower index first."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # of one zero
    bits = tl.where(value != value, 0x7FC00000, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_value(key):
    """The float32 of a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_index(key):
    """The index of a key, int64."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _keys_at(logits_ptr, forbidden_ptr, index, size, NUM_FORBIDDEN: tl.constexpr):
    """Keys of the logits at `index`, below that of any number past the vocabulary."""
    value = tl.load(logits_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    for i in range(NUM_FORBIDDEN):
        value = tl.where(index == tl.load(forbidden_ptr + i), float("-inf"), value)
    return tl.where(index < size, sort_key(value, index), LOWEST)


@triton.jit
def _run_best_kernel(
    logits_ptr,
    forbidden_ptr,
    keys_ptr,
    size,
    stride,
    num_runs,
    NUM_FORBIDDEN: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """The best key of each run of `RUN` neighbours, `RUNS` of them per program."""
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    index = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    key = _keys_at(logits_ptr + row * stride, forbidden_ptr, index, size, NUM_FORBIDDEN)
    tl.store(keys_ptr + row * num_runs + run, tl.max(key, axis=1), mask=run < num_runs)


@triton.jit
def _row_top_kernel(
    logits_ptr,
    forbidden_ptr,
    keys_ptr,
    ids_ptr,
    values_ptr,
    size,
    stride,
    num_runs,
    K: tl.constexpr,
    NUM_FORBIDDEN: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The K best of a row are in the K runs whose best are best: whoever is elsewhere has K better ones before it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row * num_runs + at, mask=at < num_runs, other=LOWEST)
    if K > 1:
        place = tl.arange(0, BLOCK_K)
        chosen = tl.full((BLOCK_K,), num_runs, tl.int32)  # a run past the end: nobody is in it
        for i in range(K):
            best = tl.max(key, axis=0)
            run = tl.where(best == LOWEST, num_runs, (key_index(best) // RUN).to(tl.int32))
            chosen = tl.where(place == i, run, chosen)
            key = tl.where(key == best, LOWEST, key)
        index = (chosen[:, None] * RUN + tl.arange(0, RUN)[None, :]).reshape(BLOCK_K * RUN)
        index = tl.minimum(index, size)  # past the last run, which may be a short one
        key = _keys_at(logits_ptr + row * stride, forbidden_ptr, index, size, NUM_FORBIDDEN)
    for i in range(K):
        best = tl.max(key, axis=0)
        tl.store(ids_ptr + row * K + i, key_index(best))
        tl.store(values_ptr + row * K + i, key_value(best))
        key = tl.where(key == best, LOWEST, key)


def top_tokens(logits: Tensor, k: int, forbidden_ids: Tensor | Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """`(ids int64 [M, k], logits float32 [M, k])`, largest first, ties to the lower id; `logits` [M, V] stays as it is.

    `forbidden_ids` count as -inf.
    """
    num_rows, size = logits.shape
    assert logits.stride(1) == 1 and k <= size
    if forbidden_ids is not None and not isinstance(forbidden_ids, Tensor):
        forbidden_ids = torch.tensor(list(forbidden_ids), dtype=torch.int64, device=logits.device)
    ids = torch.empty((num_rows, k), dtype=torch.int64, device=logits.device)
    values = torch.empty((num_rows, k), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return ids, values
    # One best of a long run is all that is asked for; of several, short runs leave little to look at again.
    run = CHUNK if k == 1 else RUN
    run = min(run, block_size(size))
    num_runs = triton.cdiv(size, run)
    runs = max(1, min(CHUNK // run, block_size(num_runs)))
    keys = torch.empty((num_rows, num_runs), dtype=torch.int64, device=logits.device)
    forbidden = logits if forbidden_ids is None else forbidden_ids
    num_forbidden = 0 if forbidden_ids is None else len(forbidden_ids)
    _run_best_kernel[(num_rows, triton.cdiv(num_runs, runs))](
        logits,
        forbidden,
        keys,
        size,
        logits.stride(0),
        num_runs,
        NUM_FORBIDDEN=num_forbidden,
        RUNS=runs,
        RUN=run,
    )
    _row_top_kernel[(num_rows,)](
        logits,
        forbidden,
        keys,
        ids,
        values,
        size,
        logits.stride(0),
        num_runs,
        K=k,
        NUM_FORBIDDEN=num_forbidden,
        RUN=run,
        BLOCK=block_size(num_runs),
        BLOCK_K=block_size(k),
    )
    return ids, values
