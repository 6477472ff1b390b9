"""`kernels.target_probs` in Triton, without a sort: what top-k and top-p leave is everything from one key on.

A key orders like (logit, token order), see `top_tokens`; a threshold is found bit by bit. What is surely below it is
left out first: what k runs of neighbours have something better than, or for top-p seven eighths of all runs, if what is
left has mass enough. These candidates are looked at again and again; where they are too many, the whole row is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size
from .top_tokens import LOWEST, key_value, sort_key

CHUNK = 4096
SAME_LOGIT = tl.constexpr(1 << 32)  # keys of one logit are less than half of that apart
RUN = 128  # neighbours of which only the best is looked at, to see what top-k surely leaves out
CAPACITY = 4096  # candidates of a row
FEW_ROWS = 132  # on so many, a program may have all of a multiprocessor


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
def _chunk(source_ptr, start, size, temperature, ARE_KEYS: tl.constexpr, CHUNK: tl.constexpr):
    """Keys, and logits over the temperature, of a chunk of a row of logits, or of candidates (`ARE_KEYS`); nothing past
    the end counts."""
    index = start + tl.arange(0, CHUNK)
    inside = index < size
    if ARE_KEYS:
        keys = tl.load(source_ptr + index, mask=inside, other=LOWEST, cache_modifier=".cg")
        value = tl.where(inside, key_value(keys), float("-inf"))
    else:
        value = tl.load(source_ptr + index, mask=inside, other=float("-inf"))
        keys = tl.where(inside, sort_key(value, index), LOWEST)
    return keys, value / temperature


@triton.jit
def _mass_from(
    source_ptr,
    key,
    size,
    temperature,
    peak,
    COUNT: tl.constexpr,
    ARE_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Number (`COUNT`) or unnormalised mass of the tokens from `key` on, float64."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, size, CHUNK):
        keys, scaled = _chunk(source_ptr, start, size, temperature, ARE_KEYS, CHUNK)
        weight = tl.exp(scaled - peak)
        if COUNT:
            weight = weight * 0.0 + 1.0
        mass += tl.sum(tl.where(keys >= key, weight.to(tl.float64), 0.0), axis=0)
    return mass


@triton.jit
def _with_bits(
    source_ptr,
    found,
    step,
    wanted,
    floor,
    size,
    temperature,
    peak,
    COUNT: tl.constexpr,
    ARE_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`found` and those of 31 bits, from `step` down, with which there still is `wanted`."""
    for _ in range(31):
        key = tl.maximum(found + step, floor)
        if _mass_from(source_ptr, key, size, temperature, peak, COUNT, ARE_KEYS, CHUNK) >= wanted:
            found += step
        step = step >> 1
    return found


@triton.jit
def _threshold(
    source_ptr,
    wanted,
    floor,
    size,
    temperature,
    peak,
    COUNT: tl.constexpr,
    ARE_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A key from which on there is `wanted`, and not from the next token's; keys below `floor` count for nothing."""
    found = tl.full((), LOWEST, tl.int64)
    zero = tl.full((), 0, tl.int64)
    key = tl.maximum(zero, floor)
    if _mass_from(source_ptr, key, size, temperature, peak, COUNT, ARE_KEYS, CHUNK) >= wanted:
        found = zero
    step = tl.full((), 1 << 62, tl.int64)
    found = _with_bits(
        source_ptr, found, step, wanted, floor, size, temperature, peak, COUNT, ARE_KEYS, CHUNK
    )
    key = tl.maximum(found, floor)
    num_there = _mass_from(source_ptr, key, size, temperature, peak, True, ARE_KEYS, CHUNK)
    key = tl.maximum(found + SAME_LOGIT, floor)
    num_above = _mass_from(source_ptr, key, size, temperature, peak, True, ARE_KEYS, CHUNK)
    if num_there - num_above > 1.5:  # only of equal logits does the order matter
        step = tl.full((), SAME_LOGIT >> 2, tl.int64)
        found = _with_bits(
            source_ptr, found, step, wanted, floor, size, temperature, peak, COUNT, ARE_KEYS, CHUNK
        )
    return found


@triton.jit
def _run_floor(runs_ptr, wanted, num_runs, RUNS: tl.constexpr):
    """The smallest key of the largest logit that `wanted` runs reach: at least so many tokens are there or above."""
    run = tl.arange(0, RUNS)
    best = tl.load(runs_ptr + run, mask=run < num_runs, other=LOWEST, cache_modifier=".cg")
    best = best >> 32  # without the tokens' order
    found = tl.full((), -(1 << 31), tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(32):
        tried = found + step
        if tl.sum(((best >= tried) & (run < num_runs)).to(tl.int32), axis=0) >= wanted:
            found = tried
        step = step >> 1
    return found << 32


@triton.jit
def _gather_candidates(
    row_ptr, candidates_ptr, floor, size, temperature, CAPACITY: tl.constexpr, CHUNK: tl.constexpr
):
    """Writes the keys from `floor` on; how many there are, not all of them written if they are more than `CAPACITY`."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, size, CHUNK):
        keys, _ = _chunk(row_ptr, start, size, temperature, False, CHUNK)
        is_one = (keys >= floor).to(tl.int32)
        place = count + tl.cumsum(is_one, axis=0) - 1
        tl.store(candidates_ptr + place, keys, mask=(is_one > 0) & (place < CAPACITY))
        count += tl.sum(is_one, axis=0)
    return count


@triton.jit
def _first_of(
    source_ptr,
    top_k,
    top_p,
    mass,
    largest,
    size,
    temperature,
    peak,
    cuts_k,
    ARE_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first key that is kept of a row, or of candidates; `mass`: of the whole row, where top-k does not cut."""
    first = tl.full((), LOWEST + 1, tl.int64)
    if cuts_k:
        first = _threshold(
            source_ptr, top_k.to(tl.float64), first, size, temperature, peak, True, ARE_KEYS, CHUNK
        )
        mass = _mass_from(source_ptr, first, size, temperature, peak, False, ARE_KEYS, CHUNK)
    if top_p < 1.0:
        wanted = top_p.to(tl.float64) * mass
        cut = _threshold(source_ptr, wanted, first, size, temperature, peak, False, ARE_KEYS, CHUNK)
        first = tl.minimum(tl.maximum(first, cut), largest)  # at least one token
    return first


@triton.jit
def _first_kept(
    row_ptr,
    runs_ptr,
    candidates_ptr,
    top_k,
    top_p,
    largest,
    size,
    num_runs,
    temperature,
    peak,
    RUNS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The smallest key that top-k and top-p keep."""
    cuts_k = (top_k >= 1) & (top_k < size)
    first = tl.full((), LOWEST + 1, tl.int64)
    if cuts_k | (top_p < 1.0):
        floor = first
        mass = tl.full((), 0.0, tl.float64)
        if cuts_k:
            if top_k <= num_runs:
                floor = _run_floor(runs_ptr, top_k, num_runs, RUNS)
        else:
            floor = _run_floor(runs_ptr, tl.maximum(num_runs - num_runs // 8, 1), num_runs, RUNS)
            mass = _mass_from(row_ptr, first, size, temperature, peak, False, False, CHUNK)
        count = _gather_candidates(row_ptr, candidates_ptr, floor, size, temperature, CAPACITY, CHUNK)
        tl.debug_barrier()  # all of them are written
        num = tl.minimum(count, CAPACITY)
        there = _mass_from(candidates_ptr, first, num, temperature, peak, False, True, CAPACITY)
        is_enough = cuts_k | (there >= top_p.to(tl.float64) * mass)
        if (count <= CAPACITY) & is_enough:
            first = _first_of(
                candidates_ptr, top_k, top_p, mass, largest, num, temperature, peak, cuts_k, True, CAPACITY
            )
        else:
            first = _first_of(
                row_ptr, top_k, top_p, mass, largest, size, temperature, peak, cuts_k, False, CHUNK
            )
    return first


@triton.jit
def _target_probs_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    runs_ptr,
    candidates_ptr,
    out_ptr,
    size,
    stride,
    num_runs,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    runs_ptr += row * num_runs
    temperature = tl.load(temperature_ptr + row)
    peak = tl.full((), float("-inf"), tl.float32)
    largest = tl.full((), LOWEST, tl.int64)
    for start in range(0, size, CHUNK):
        keys, scaled = _chunk(row_ptr, start, size, temperature, False, CHUNK)
        peak = tl.maximum(peak, tl.max(scaled, axis=0))
        best = tl.max(keys.reshape(CHUNK // RUN, RUN), axis=1)
        run = start // RUN + tl.arange(0, CHUNK // RUN)
        tl.store(runs_ptr + run, best, mask=run < num_runs)
        largest = tl.maximum(largest, tl.max(best, axis=0))
    tl.debug_barrier()  # all runs' best are written
    first = _first_kept(
        row_ptr,
        runs_ptr,
        candidates_ptr + row * CAPACITY,
        tl.load(top_k_ptr + row),
        tl.load(top_p_ptr + row),
        largest,
        size,
        num_runs,
        temperature,
        peak,
        RUNS,
        CAPACITY,
        CHUNK,
    )

    smallest = tl.load(min_p_ptr + row)  # the largest weight is exp(0)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, size, CHUNK):
        keys, scaled = _chunk(row_ptr, start, size, temperature, False, CHUNK)
        weight = tl.exp(scaled - peak)
        weight = tl.where((keys >= first) & (weight >= smallest), weight, 0.0)
        total += tl.sum(weight.to(tl.float64), axis=0)
    for start in range(0, size, CHUNK):
        keys, scaled = _chunk(row_ptr, start, size, temperature, False, CHUNK)
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
    chunk = min(CHUNK, block_size(size))
    run = min(RUN, chunk)
    num_runs = triton.cdiv(size, run)
    runs, candidates = (
        torch.empty((num_rows, n), dtype=torch.int64, device=logits.device) for n in (num_runs, CAPACITY)
    )
    if num_rows:
        _target_probs_kernel[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            runs,
            candidates,
            out,
            size,
            logits.stride(0),
            num_runs,
            RUN=run,
            RUNS=block_size(num_runs),
            CAPACITY=CAPACITY,
            CHUNK=chunk,
            num_warps=16 if num_rows <= FEW_ROWS else 8,
        )
    return out
