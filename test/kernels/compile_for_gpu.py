"""Compiles every Triton kernel for an H200 (sm_90), which takes no GPU: what the interpreter allows is not all valid.

Run by `test_triton_compiles.py` in a process without TRITON_INTERPRET; prints a line per kernel and call. Each call is
made with a size of 1, which Triton specialises on, and with an ordinary one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from flashspark.kernels import estimator, qk_norm_rope, rms_norm, rope, silu_mul
from flashspark.kernels.accept import accept_greedy, accept_sampled
from flashspark.kernels.accept_step import accept_step
from flashspark.kernels.allocate import allocate
from flashspark.kernels.block_conv import dynamic_block_conv
from flashspark.kernels.commit_rows import commit_rows
from flashspark.kernels.draft_inputs import draft_inputs
from flashspark.kernels.markov_walk import markov_walk
from flashspark.kernels.pack_rows import pack_rows
from flashspark.kernels.philox import step_uniforms
from flashspark.kernels.selector import (
    selector_walk,
    selector_walk_with_confidence,
    selector_walk_with_feature,
    top_candidates,
)
from flashspark.kernels.target_probs import adjust_logits, target_probs
from flashspark.kernels.top_tokens import best_tokens
from flashspark.kernels.triton import launch, paged_attention

BFLOAT16 = torch.bfloat16
SHARED_BYTES = 227 * 1024  # of one program on an H200


class NoDevice:
    """What the compiler asks of a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only(kernel: JITFunction, *args, grid, warmup: bool, **options) -> None:
    compiled = run(kernel, *args, grid=grid, warmup=True, **options)
    assert compiled.metadata.shared <= SHARED_BYTES, (kernel.__name__, compiled.metadata.shared)
    print(kernel.__name__, len(compiled.asm["cubin"]), compiled.metadata.shared)


run = JITFunction.run


def zeros(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def rows(n: int, dtype: torch.dtype) -> None:
    rms_norm.rms_norm(zeros(n, 4096, dtype=dtype), zeros(4096, dtype=dtype), 1e-6, "triton")
    rms_norm.rms_norm(zeros(n, 6, 128, dtype=dtype), zeros(6, 128, dtype=dtype), 1e-6, "triton")
    x = zeros(n, 4096, dtype=dtype)
    rms_norm.add_rms_norm(x, x, zeros(4096, dtype=dtype), 1e-6, "triton")
    silu_mul.silu_mul(zeros(n, 2 * 12288, dtype=dtype), "triton")
    tables = rope.rope_tables(ids(n, 1), zeros(128, dtype=torch.float32), 1.0, dtype, "triton")
    qkv, weight, cache = (zeros(*shape, dtype=dtype) for shape in ((n, 48, 128), (40, 128), (64, 8, 128)))
    qk_norm_rope.qk_norm_rope(qkv, weight, 1e-6, *tables, 8, 1.0, "triton")
    qk_norm_rope.qk_norm_rope_write(
        qkv, weight, 1e-6, *tables, ids(n), cache, cache.clone(), implementation="triton"
    )


def attention(n: int, dtype: torch.dtype) -> None:
    for dim, max_rows in ((128, 8), (64, 300)):
        q, cache = zeros(n * 8, 32, dim, dtype=dtype), zeros(64, 8, dim, dtype=dtype)
        common = (ids(n, 1 if n == 1 else 64), 1 if n == 1 else 16, 0.1)
        for count, splits in ((None, None), (ids(1), 8 if max_rows == 8 else None)):
            paged_attention.ragged_attention(
                q, cache, cache, ids(n + 1), ids(n), count, *common, max_rows, splits
            )
    for num_tables, max_rows, splits in ((n * 8, 8, None), (n, 1, 8)):
        tables = zeros(num_tables, 1, 128, dtype=dtype)
        turn = qk_norm_rope.HeadTurn(zeros(40, 128, dtype=dtype), 1e-6, tables, tables)
        heads, cache = zeros(num_tables, 48, 128, dtype=dtype), zeros(64, 8, 128, dtype=dtype)
        paged_attention.ragged_attention(
            heads, cache, cache, ids(n + 1), ids(n), ids(1), *common, max_rows, splits, turn=turn
        )
    block = zeros(n, 8, 48, 128, dtype=dtype).split([32, 8, 8], 2)
    cache = zeros(64, 8, 128, dtype=dtype)
    for causal, window in ((False, None), (True, 100)):
        paged_attention.block_attention(*block, cache, cache, ids(n), None, *common, causal, window)


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def doubles(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def flags(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bool)


def planning(n: int, dtype: torch.dtype) -> None:
    for budget in (5, ids()):
        allocate(floats(n, 7), budget, ids(n), ids(n), 0.01, "triton")
    for limits in (None, ids(n)):
        args = (ids(n), ids(n), ids(n), ids(n, n), n, ids(n, 7), ids(n), 8 * n, True, None)
        pack_rows(*args, limits, limits, "triton")
    draft_inputs(ids(n), ids(n), ids(n), ids(n, n), 8, 5, "triton")
    commit_rows(ids(n), ids(n), ids(n), ids(n, 8), ids(n), "triton")
    step_uniforms(ids(n), ids(n), ids(n), 8, "triton")


def tokens(n: int, dtype: torch.dtype) -> None:
    logits = zeros(n, VOCAB_SIZE, dtype=dtype)
    best_tokens(logits, "triton")
    top_candidates(logits, 16, ids(1), "triton")
    scores, values, marks = floats(n, VOCAB_SIZE), floats(n), flags(n, VOCAB_SIZE)
    target_probs(scores, values, ids(n), values, values, "triton")
    counts = scores.to(torch.int32)
    adjust_logits(scores, counts, marks, values, values, values, scores, marks, "triton")
    accept_greedy(ids(n, 8), ids(n, 7), ids(n), "triton")
    for width, simulated in ((8, None), (8, ids(n)), (1, None)):
        block = ids(8 * n), floats(8 * n), ids(n, width), ids(n, width - 1), ids(n)
        accept_step(*block, ids(n), ids(n + 1), ids(n + 1), ids(n + 1), n, simulated, "triton")
    for candidate_ids, k in ((ids(n, 7, 16), 16), (None, VOCAB_SIZE)):
        args = (floats(n, VOCAB_SIZE), ids(n, 8), ids(n, 7), candidate_ids, floats(n, 7, k), ids(n))
        accept_sampled(*args, doubles(n, 7), doubles(n, 8), "triton")


def draft(n: int, dtype: torch.dtype) -> None:
    x, base, delta = (
        zeros(n, 8, 4096, dtype=dtype),
        zeros(2, 2, 4096, dtype=dtype),
        zeros(n, 8, 1024, dtype=dtype),
    )
    dynamic_block_conv(x, base, delta, 0, None, "triton")
    dynamic_block_conv(x, base, delta, 1, x, "triton")
    codebook, projected = zeros(VOCAB_SIZE, 256, dtype=dtype), zeros(n, 7, 256, dtype=dtype)
    walk = (floats(n, 7, 16), ids(n, 7, 16), ids(n), projected, codebook, codebook, floats(n), flags(n))
    for noise in (floats(n, 7), doubles(n, 7)):
        selector_walk(*walk, noise, False, "triton")
        selector_walk_with_feature(*walk, noise, implementation="triton")
        for c in (1, 2):
            model = estimator.RowEstimator(ids(n), floats(c), floats(c, 7), floats(n, 2, 7))
            selector_walk_with_confidence(*walk, noise, True, ids(n), model, "triton")
    for noise in (None, doubles(n, 2)):
        markov_walk(floats(n, 2, VOCAB_SIZE), ids(n), None, None, floats(n), flags(n), noise, None, "triton")
    moments, values = doubles(2, estimator.NUM_MOMENTS, 7), floats(n, 7)
    estimator.observe(moments, values, values, ids(n), ids(n), ids(n), flags(n), "triton")
    estimator.refit(floats(2), floats(2, 7), moments, implementation="triton")
    estimator.predict(values, ids(n), floats(2), floats(2, 7), "triton")
    estimator.predict_rows(values, ids(n), ids(n), floats(2), floats(2, 7), floats(n, 2, 7), "triton")


def large_batches(n: int, dtype: torch.dtype) -> None:
    """Attention with the tunings of 24, 32 and more requests."""
    if dtype == BFLOAT16:
        paged_attention._shared_bytes = lambda: 227 << 10
        cache = zeros(64, 8, 128)
        for count in (24 * n, 32 * n, 64 * n):
            q = zeros(count * 8, 32, 128)
            paged_attention.ragged_attention(
                q, cache, cache, ids(count + 1), ids(count), None, ids(count, 64), 16, 0.1, 8
            )


def programmatic(n: int, dtype: torch.dtype) -> None:
    """A layer's kernels that start early."""
    if dtype == BFLOAT16:
        usual, launch.PROGRAMMATIC_ROWS, launch.can_launch_early = (
            launch.PROGRAMMATIC_ROWS,
            1024,
            lambda: True,
        )
        rows(n, dtype)
        q, cache = zeros(n * 8, 32, 128), zeros(64, 8, 128)
        paged_attention.ragged_attention(q, cache, cache, ids(n + 1), ids(n), None, ids(n, 64), 16, 0.1, 8)
        launch.PROGRAMMATIC_ROWS = usual


VOCAB_SIZE = 151936
GROUPS = {
    "rows": rows,
    "attention": attention,
    "programmatic": programmatic,
    "large_batches": large_batches,
    "planning": planning,
    "tokens": tokens,
    "draft": draft,
}


def calls(names: list[str]) -> Iterator[None]:
    for name in names or GROUPS:
        for n, dtype in ((1, BFLOAT16), (24, BFLOAT16), (24, torch.float32)):
            yield GROUPS[name](n, dtype)


if __name__ == "__main__":
    triton.runtime.driver.set_active(NoDevice())
    JITFunction.run = compile_only
    for _ in calls(sys.argv[1:]):
        pass
