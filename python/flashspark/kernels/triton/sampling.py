"""Draws by inverse CDF from rows as long as the vocabulary.

Weights are summed in float64, per chunk of the vocabulary and then over the chunks in order; the draw goes to the
chunk in which its share of the mass ends, and to the token within it. Nothing of the vocabulary's size is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import block_size

CHUNK = 4096
NO_Q, SPARSE_Q, DENSE_Q = 0, 1, 2


@triton.jit
def _weights(p_ptr, q_ids_ptr, q_ptr, index, size, subtract, K: tl.constexpr, Q_KIND: tl.constexpr):
    """p and max(p - q, 0) of one row at `index`, float32; both p where nothing is to be subtracted."""
    p = tl.load(p_ptr + index, mask=index < size, other=0.0)
    residual = p
    if Q_KIND == 2:
        q = tl.load(q_ptr + index, mask=index < size, other=0.0)
        residual = tl.where(subtract, tl.maximum(p - q, 0.0), p)
    if Q_KIND == 1:
        if subtract:
            for i in range(K):
                token = tl.load(q_ids_ptr + i)
                residual = tl.where(index == token, residual - tl.load(q_ptr + i), residual)
            residual = tl.maximum(residual, 0.0)
    return p, residual


@triton.jit
def _row_of(
    block_rows_ptr, num_accepted_ptr, verify_lens_ptr, request, WIDTH: tl.constexpr, Q_KIND: tl.constexpr
):
    """A request's row of p, its row of q, and whether q is to be subtracted: after a refusal."""
    if WIDTH == 0:
        return request, request, False
    n = tl.load(num_accepted_ptr + request)
    row = tl.load(block_rows_ptr + request * WIDTH + n)
    refused = n < tl.load(verify_lens_ptr + request) - 1
    return row, request * (WIDTH - 1) + tl.minimum(n, WIDTH - 2), refused


@triton.jit
def _chunk_sums_kernel(
    p_ptr,
    q_ids_ptr,
    q_ptr,
    block_rows_ptr,
    num_accepted_ptr,
    verify_lens_ptr,
    sums_ptr,
    size,
    p_stride,
    num_chunks,
    K: tl.constexpr,
    Q_KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sums of the residual and of p, float64 [R, 2, chunks]."""
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, q_row, refused = _row_of(block_rows_ptr, num_accepted_ptr, verify_lens_ptr, request, WIDTH, Q_KIND)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    p, residual = _weights(
        p_ptr + row * p_stride, q_ids_ptr + q_row * K, q_ptr + q_row * K, index, size, refused, K, Q_KIND
    )
    at = request * 2 * num_chunks + chunk
    tl.store(sums_ptr + at, tl.sum(residual.to(tl.float64), axis=0))
    tl.store(sums_ptr + at + num_chunks, tl.sum(p.to(tl.float64), axis=0))


@triton.jit
def _draw_kernel(
    p_ptr,
    q_ids_ptr,
    q_ptr,
    block_rows_ptr,
    num_accepted_ptr,
    verify_lens_ptr,
    sums_ptr,
    uniforms_ptr,
    greedy_ptr,
    tokens_ptr,
    size,
    p_stride,
    num_chunks,
    uniforms_stride,
    K: tl.constexpr,
    Q_KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row, q_row, refused = _row_of(block_rows_ptr, num_accepted_ptr, verify_lens_ptr, request, WIDTH, Q_KIND)
    number = 0
    if WIDTH > 0:
        number = tl.load(num_accepted_ptr + request)
    uniform = tl.load(uniforms_ptr + request * uniforms_stride + number)
    if HAS_GREEDY:  # a point mass: any share of it ends at its token
        uniform = tl.where(tl.load(greedy_ptr + request) != 0, 0.0, uniform)
    chunks = tl.arange(0, CHUNKS)
    sums_at = sums_ptr + request * 2 * num_chunks + chunks
    mass = tl.load(sums_at, mask=chunks < num_chunks, other=0.0)
    # p = q up to rounding leaves no residual mass, though a refusal was drawn: p is then the right fallback.
    is_empty = tl.sum(mass, axis=0) <= 0.0
    mass = tl.where(is_empty, tl.load(sums_at + num_chunks, mask=chunks < num_chunks, other=0.0), mass)
    until = tl.cumsum(mass, axis=0)
    wanted = uniform * tl.sum(tl.where(chunks == num_chunks - 1, until, 0.0), axis=0)
    chunk = tl.sum(((until <= wanted) & (chunks < num_chunks)).to(tl.int32), axis=0)
    chunk = tl.minimum(chunk, tl.max(tl.where(mass > 0.0, chunks, 0), axis=0))
    before = tl.sum(tl.where(chunks == chunk - 1, until, 0.0), axis=0)

    lane = tl.arange(0, CHUNK)
    index = chunk * CHUNK + lane
    p, residual = _weights(
        p_ptr + row * p_stride, q_ids_ptr + q_row * K, q_ptr + q_row * K, index, size, refused, K, Q_KIND
    )
    weights = tl.where(is_empty, p, residual).to(tl.float64)
    place = tl.sum((before + tl.cumsum(weights, axis=0) <= wanted).to(tl.int32), axis=0)
    # Rounding can push what is wanted up to the chunk's end: then its last token that has weight.
    place = tl.minimum(place, tl.max(tl.where(weights > 0.0, lane, 0), axis=0))
    tl.store(tokens_ptr + request, (chunk * CHUNK + place).to(tl.int64))


@triton.jit
def _accept_kernel(
    p_ptr,
    block_rows_ptr,
    drafts_ptr,
    q_ids_ptr,
    q_ptr,
    verify_lens_ptr,
    uniforms_ptr,
    num_accepted_ptr,
    num_matched_ptr,
    p_stride,
    uniforms_stride,
    K: tl.constexpr,
    Q_KIND: tl.constexpr,
    GAMMA: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Leading drafts with u * q < p, below the cutoff and without it."""
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_K)
    matched = tl.full((), 0, tl.int64)
    going = tl.full((), 1, tl.int64)
    for i in range(GAMMA):
        draft = tl.load(drafts_ptr + request * GAMMA + i)
        row = tl.load(block_rows_ptr + request * (GAMMA + 1) + i)
        p = tl.load(p_ptr + row * p_stride + draft).to(tl.float64)
        q_row = (request * GAMMA + i) * K
        if Q_KIND == 2:
            q = tl.load(q_ptr + q_row + draft).to(tl.float64)
        else:
            ids = tl.load(q_ids_ptr + q_row + candidate, mask=candidate < K, other=-1)
            qs = tl.load(q_ptr + q_row + candidate, mask=candidate < K, other=0.0)
            q = tl.sum(tl.where(ids == draft, qs, 0.0), axis=0).to(tl.float64)
        uniform = tl.load(uniforms_ptr + request * uniforms_stride + i)
        going = going * (uniform * q < p).to(tl.int64)
        matched += going
    tl.store(num_matched_ptr + request, matched)
    tl.store(num_accepted_ptr + request, tl.minimum(matched, tl.load(verify_lens_ptr + request) - 1))


def sample_categorical(weights: Tensor, uniforms: Tensor, greedy: Tensor | None = None) -> Tensor:
    """See `kernels.target_probs.sample_categorical`; rows that are `greedy` (bool [N]) hold a point mass, and their
    uniforms are not looked at."""
    return _draw(weights, None, None, None, None, None, uniforms[:, None], greedy)


def accept_sampled(
    probs: Tensor,
    block_rows: Tensor,
    drafts: Tensor,
    candidate_ids: Tensor | None,
    candidate_probs: Tensor,
    verify_lens: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.accept.accept_sampled`."""
    num_reqs, gamma = drafts.shape
    num_accepted, num_matched = (torch.empty_like(verify_lens) for _ in range(2))
    block_rows, drafts, candidate_probs = (x.contiguous() for x in (block_rows, drafts, candidate_probs))
    ids = None if candidate_ids is None else candidate_ids.contiguous()
    k = candidate_probs.shape[2]
    if num_reqs:
        accept_uniforms = _last_contiguous(accept_uniforms)
        _accept_kernel[(num_reqs,)](
            probs,
            block_rows,
            drafts,
            drafts if ids is None else ids,
            candidate_probs,
            verify_lens,
            accept_uniforms,
            num_accepted,
            num_matched,
            probs.stride(0),
            accept_uniforms.stride(0),
            K=k,
            Q_KIND=DENSE_Q if ids is None else SPARSE_Q,
            GAMMA=gamma,
            BLOCK_K=1 if ids is None else block_size(k),
            num_warps=1,
        )
    q = candidate_probs if gamma else None
    tokens = _draw(probs, ids, q, block_rows, num_accepted, verify_lens, final_uniforms, None)
    return num_accepted, tokens, num_matched


def _draw(
    weights: Tensor,
    q_ids: Tensor | None,
    q: Tensor | None,
    block_rows: Tensor | None,
    num_accepted: Tensor | None,
    verify_lens: Tensor | None,
    uniforms: Tensor,
    greedy: Tensor | None,
) -> Tensor:
    """One token for each row of `uniforms`, int64."""
    num_reqs, size = uniforms.shape[0], weights.shape[1]
    assert weights.stride(1) == 1
    uniforms = _last_contiguous(uniforms)
    tokens = torch.empty(num_reqs, dtype=torch.int64, device=weights.device)
    if num_reqs == 0:
        return tokens
    chunk = min(CHUNK, block_size(size))
    num_chunks = triton.cdiv(size, chunk)
    sums = torch.empty((num_reqs, 2, num_chunks), dtype=torch.float64, device=weights.device)
    kind = NO_Q if q is None else DENSE_Q if q_ids is None else SPARSE_Q
    sources = (
        weights,
        tokens if q_ids is None else q_ids,
        weights if q is None else q,
        tokens if block_rows is None else block_rows,
        tokens if num_accepted is None else num_accepted,
        tokens if verify_lens is None else verify_lens,
        sums,
    )
    shape = {
        "K": 0 if q is None else q.shape[2],
        "Q_KIND": kind,
        "WIDTH": 0 if block_rows is None else block_rows.shape[1],
        "CHUNK": chunk,
    }
    _chunk_sums_kernel[(num_reqs, num_chunks)](*sources, size, weights.stride(0), num_chunks, **shape)
    _draw_kernel[(num_reqs,)](
        *sources,
        uniforms,
        tokens if greedy is None else greedy,
        tokens,
        size,
        weights.stride(0),
        num_chunks,
        uniforms.stride(0),
        HAS_GREEDY=greedy is not None,
        CHUNKS=block_size(num_chunks),
        **shape,
    )
    return tokens


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
