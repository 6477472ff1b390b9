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

from flashspark.kernels import qk_norm_rope, rms_norm, silu_mul
from flashspark.kernels.triton import paged_attention

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
    return torch.zeros(*shape, dtype=torch.int64)


def rows(n: int, dtype: torch.dtype) -> None:
    rms_norm.rms_norm(zeros(n, 4096, dtype=dtype), zeros(4096, dtype=dtype), 1e-6, "triton")
    rms_norm.rms_norm(zeros(n, 6, 128, dtype=dtype), zeros(6, 128, dtype=dtype), 1e-6, "triton")
    x = zeros(n, 4096, dtype=dtype)
    rms_norm.add_rms_norm(x, x, zeros(4096, dtype=dtype), 1e-6, "triton")
    silu_mul.silu_mul(zeros(n, 2 * 12288, dtype=dtype), "triton")
    tables = zeros(n, 1, 128, dtype=dtype), zeros(n, 1, 128, dtype=dtype)
    qkv, weight, cache = (zeros(*shape, dtype=dtype) for shape in ((n, 48, 128), (40, 128), (64, 8, 128)))
    qk_norm_rope.qk_norm_rope(qkv, weight, 1e-6, *tables, 8, 1.0, "triton")
    qk_norm_rope.qk_norm_rope_write(
        qkv, weight, 1e-6, *tables, ids(n), cache, cache.clone(), implementation="triton"
    )


def attention(n: int, dtype: torch.dtype) -> None:
    for dim, max_rows in ((128, 8), (64, 300)):
        q, cache = zeros(n * 8, 32, dim, dtype=dtype), zeros(64, 8, dim, dtype=dtype)
        common = (ids(n, 1 if n == 1 else 64), 1 if n == 1 else 16, 0.1)
        for count in (None, ids(1)):
            paged_attention.ragged_attention(
                q, cache, cache, ids(n + 1), ids(n), count, *common, max_rows=max_rows
            )
    block = zeros(n, 8, 48, 128, dtype=dtype).split([32, 8, 8], 2)
    cache = zeros(64, 8, 128, dtype=dtype)
    for causal, window in ((False, None), (True, 100)):
        paged_attention.block_attention(*block, cache, cache, ids(n), None, *common, causal, window)


GROUPS = {"rows": rows, "attention": attention}


def calls(names: list[str]) -> Iterator[None]:
    for name in names or GROUPS:
        for n, dtype in ((1, BFLOAT16), (24, BFLOAT16), (24, torch.float32)):
            yield GROUPS[name](n, dtype)


if __name__ == "__main__":
    triton.runtime.driver.set_active(NoDevice())
    JITFunction.run = compile_only
    for _ in calls(sys.argv[1:]):
        pass
