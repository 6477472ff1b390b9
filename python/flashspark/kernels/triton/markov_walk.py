"""What one slot of `kernels.markov_walk` draws, in Triton; the products of the walk are torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import sampling
from .launch import block_size
from .top_tokens import LOWEST, key_index, sort_key, top_tokens

CHUNK = 4096


@triton.jit
def _chunk_softmax_kernel(
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    peaks_ptr,
    totals_ptr,
    size,
    stride,
    num_chunks,
    smallest_temperature,
    CHUNK: tl.constexpr,
):
    """Of one chunk: the largest logit, and peak and sum of its softmax."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < size
    value = tl.load(logits_ptr + row * stride + index, mask=inside, other=float("-inf"))
    scale = 1.0 / tl.maximum(tl.load(temperature_ptr + row), smallest_temperature)
    at = row * num_chunks + chunk
    tl.store(keys_ptr + at, tl.max(tl.where(inside, sort_key(value, index), LOWEST), axis=0))
    scaled = value * scale
    peak = tl.max(scaled, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks_ptr + at, peak)
    tl.store(totals_ptr + at, tl.sum(tl.exp(scaled - shift), axis=0))


@triton.jit
def _probs_kernel(
    logits_ptr,
    temperature_ptr,
    greedy_ptr,
    keys_ptr,
    peaks_ptr,
    totals_ptr,
    probs_ptr,
    size,
    stride,
    probs_stride,
    num_chunks,
    smallest_temperature,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Softmax of one chunk, or a greedy row's point mass."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    chunk = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunk
    peaks = tl.load(peaks_ptr + at, mask=chunk < num_chunks, other=float("-inf"))
    totals = tl.load(totals_ptr + at, mask=chunk < num_chunks, other=0.0)
    best = key_index(tl.max(tl.load(keys_ptr + at, mask=chunk < num_chunks, other=LOWEST), axis=0))
    peak = tl.max(peaks, axis=0)
    total = tl.sum(totals * tl.exp(peaks - peak), axis=0)
    value = tl.load(logits_ptr + row * stride + index, mask=index < size, other=float("-inf"))
    scale = 1.0 / tl.maximum(tl.load(temperature_ptr + row), smallest_temperature)
    q = tl.exp(value * scale - peak) / total
    is_greedy = tl.load(greedy_ptr + row) != 0
    q = tl.where(is_greedy, (index == best).to(tl.float32), q)
    tl.store(probs_ptr + row * probs_stride + index, q, mask=index < size)


def draw_slot(
    logits: Tensor,
    temperature: Tensor,
    greedy: Tensor,
    uniforms: Tensor | None,
    probs: Tensor | None,
    smallest_temperature: float,
) -> Tensor:
    """Tokens int64 [R] of one slot from corrected `logits` float32 [R, V].

    `uniforms` float64 [R], None when every row is greedy; else `probs` float32 [R, V] is filled with what each row
    was drawn from, a point mass for greedy rows.
    """
    if uniforms is None or probs is None:
        return top_tokens(logits, 1, None)[0][:, 0]
    num_rows, size = logits.shape
    assert logits.stride(1) == 1 and probs.stride(1) == 1
    chunk = min(CHUNK, block_size(size))
    num_chunks = triton.cdiv(size, chunk)
    keys = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    peaks, totals = (
        torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    grid = (num_rows, num_chunks)
    _chunk_softmax_kernel[grid](
        logits,
        temperature,
        keys,
        peaks,
        totals,
        size,
        logits.stride(0),
        num_chunks,
        smallest_temperature,
        CHUNK=chunk,
    )
    _probs_kernel[grid](
        logits,
        temperature,
        greedy,
        keys,
        peaks,
        totals,
        probs,
        size,
        logits.stride(0),
        probs.stride(0),
        num_chunks,
        smallest_temperature,
        CHUNK=chunk,
        CHUNKS=block_size(num_chunks),
    )
    return sampling.sample_categorical(probs, uniforms, greedy)
