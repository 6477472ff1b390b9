"""The largest logits of each row, in two launches: of every chunk of the vocabulary, then of those."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size

CHUNK = 4096
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
def _chunk_top_kernel(
    logits_ptr,
    forbidden_ptr,
    keys_ptr,
    size,
    stride,
    num_chunks,
    K: tl.constexpr,
    NUM_FORBIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits_ptr + row * stride + index, mask=index < size, other=0.0).to(tl.float32)
    for i in range(NUM_FORBIDDEN):
        value = tl.where(index == tl.load(forbidden_ptr + i), float("-inf"), value)
    key = tl.where(index < size, sort_key(value, index), LOWEST)
    for i in range(K):
        best = tl.max(key, axis=0)
        tl.store(keys_ptr + (row * num_chunks + chunk) * K + i, best)
        key = tl.where(key == best, LOWEST, key)


@triton.jit
def _row_top_kernel(keys_ptr, ids_ptr, values_ptr, num_keys, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row * num_keys + at, mask=at < num_keys, other=LOWEST)
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
    chunk = min(CHUNK, block_size(size))
    num_chunks = triton.cdiv(size, chunk)
    keys = torch.empty((num_rows, num_chunks * k), dtype=torch.int64, device=logits.device)
    _chunk_top_kernel[(num_rows, num_chunks)](
        logits,
        logits if forbidden_ids is None else forbidden_ids,
        keys,
        size,
        logits.stride(0),
        num_chunks,
        K=k,
        NUM_FORBIDDEN=0 if forbidden_ids is None else len(forbidden_ids),
        CHUNK=chunk,
    )
    _row_top_kernel[(num_rows,)](keys, ids, values, num_chunks * k, K=k, BLOCK=block_size(num_chunks * k))
    return ids, values
