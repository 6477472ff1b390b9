"""`kernels.target_probs` in Triton, without a sort: what top-k and top-p leave is everything from one key on.

A key orders like (logit, token order), see `top_tokens`; the two thresholds are found bit by bit, each bit with one
pass over the row, which lies in the cache by then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size
from .top_tokens import LOWEST, sort_key

CHUNK = 4096


@triton.jit
def _adjust_kernel(
    logits_ptr,
    counts_ptr,
    prompt_seen_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    bias_ptr,
    suppressed_ptr,
    out_ptr,
    size,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = index < size
    at = row * size + index
    value = tl.load(logits_ptr + at, mask=inside, other=0.0)
    count = tl.load(counts_ptr + at, mask=inside, other=0).to(tl.float32)
    seen = tl.load(prompt_seen_ptr + at, mask=inside, other=0) != 0
    factor = tl.where((count > 0.0) | seen, tl.load(repetition_ptr + row), 1.0)
    value = tl.where(value > 0.0, value / factor, value * factor)
    value -= tl.load(frequency_ptr + row) * count
    value -= tl.load(presence_ptr + row) * (count > 0.0).to(tl.float32)
    value += tl.load(bias_ptr + at, mask=inside, other=0.0)
    suppressed = tl.load(suppressed_ptr + at, mask=inside, other=0) != 0
    tl.store(out_ptr + at, tl.where(suppressed, float("-inf"), value), mask=inside)


@triton.jit
def _chunk(row_ptr, start, size, temperature, CHUNK: tl.constexpr):
    """Keys, and logits over the temperature, of a chunk; nothing past the row's end counts."""
    index = start + tl.arange(0, CHUNK)
    value = tl.load(row_ptr + index, mask=index < size, other=float("-inf"))
    return tl.where(index < size, sort_key(value, index), LOWEST), value / temperature


@triton.jit
def _mass_from(row_ptr, key, size, temperature, peak, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Number (`COUNT`) or unnormalised mass of the tokens from `key` on, float64."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, size, CHUNK):
        keys, scaled = _chunk(row_ptr, start, size, temperature, CHUNK)
        weight = tl.exp(scaled - peak)
        if COUNT:
            weight = weight * 0.0 + 1.0
        mass += tl.sum(tl.where(keys >= key, weight.to(tl.float64), 0.0), axis=0)
    return mass


@triton.jit
def _threshold(row_ptr, wanted, floor, size, temperature, peak, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """The largest key from which on there is `wanted`; keys below `floor` count for nothing."""
    found = tl.full((), LOWEST, tl.int64)
    step = tl.full((), 1 << 62, tl.int64)
    zero = tl.full((), 0, tl.int64)
    if _mass_from(row_ptr, tl.maximum(zero, floor), size, temperature, peak, COUNT, CHUNK) >= wanted:
        found = zero
    for _ in range(63):
        tried = found + step
        if _mass_from(row_ptr, tl.maximum(tried, floor), size, temperature, peak, COUNT, CHUNK) >= wanted:
            found = tried
        step = step >> 1
    return found


@triton.jit
def _target_probs_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    size,
    stride,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    peak = tl.full((), float("-inf"), tl.float32)
    largest = tl.full((), LOWEST, tl.int64)
    for start in range(0, size, CHUNK):
        keys, scaled = _chunk(row_ptr, start, size, temperature, CHUNK)
        peak = tl.maximum(peak, tl.max(scaled, axis=0))
        largest = tl.maximum(largest, tl.max(keys, axis=0))

    first = tl.full((), LOWEST + 1, tl.int64)  # of what is kept: everything so far
    top_k = tl.load(top_k_ptr + row)
    if (top_k >= 1) & (top_k < size):
        first = _threshold(row_ptr, top_k.to(tl.float64), first, size, temperature, peak, True, CHUNK)
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        mass = _mass_from(row_ptr, first, size, temperature, peak, False, CHUNK)
        wanted = top_p.to(tl.float64) * mass
        cut = _threshold(row_ptr, wanted, first, size, temperature, peak, False, CHUNK)
        first = tl.minimum(tl.maximum(first, cut), largest)  # at least one token

    smallest = tl.load(min_p_ptr + row)  # the largest weight is exp(0)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, size, CHUNK):
        keys, scaled = _chunk(row_ptr, start, size, temperature, CHUNK)
        weight = tl.exp(scaled - peak)
        weight = tl.where((keys >= first) & (weight >= smallest), weight, 0.0)
        total += tl.sum(weight.to(tl.float64), axis=0)
    for start in range(0, size, CHUNK):
        keys, scaled = _chunk(row_ptr, start, size, temperature, CHUNK)
        weight = tl.exp(scaled - peak)
        weight = tl.where((keys >= first) & (weight >= smallest), weight, 0.0)
        index = start + tl.arange(0, CHUNK)
        tl.store(out_ptr + row * size + index, weight.to(tl.float64) / total, mask=index < size)


def adjust_logits(
    logits: Tensor,
    output_counts: Tensor,
    prompt_seen: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
    bias: Tensor,
    suppressed: Tensor,
) -> Tensor:
    """See `kernels.target_probs.adjust_logits`."""
    num_rows, size = logits.shape
    out = torch.empty((num_rows, size), dtype=torch.float32, device=logits.device)
    chunk = min(CHUNK, block_size(size))
    if num_rows:
        _adjust_kernel[(num_rows, triton.cdiv(size, chunk))](
            logits.contiguous(),
            output_counts.contiguous(),
            prompt_seen.contiguous(),
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            bias.contiguous(),
            suppressed.contiguous(),
            out,
            size,
            CHUNK=chunk,
        )
    return out


def target_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `kernels.target_probs.target_probs`."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=torch.float32, device=logits.device)
    if num_rows:
        _target_probs_kernel[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            out,
            size,
            logits.stride(0),
            CHUNK=min(CHUNK, block_size(size)),
            num_warps=8,
        )
    return out
