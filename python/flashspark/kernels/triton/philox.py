"""`kernels.philox` in Triton: one launch for a step's uniforms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit(do_not_specialize=["num_values"])
def _step_uniforms_kernel(
    seeds_ptr,
    choices_ptr,
    steps_ptr,
    out_ptr,
    num_values,
    num_rows,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words in int64, each below 2**32; products wrap, but their 64 bits are right."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_values
    request = at // num_rows
    seed = tl.load(seeds_ptr + request, mask=inside, other=0)
    mask = 0xFFFFFFFF
    k0, k1 = seed & mask, (seed >> 32) & mask
    c0 = tl.load(steps_ptr + request, mask=inside, other=0) & mask
    c1 = (at % num_rows).to(tl.int64)
    c2 = tl.load(choices_ptr + request, mask=inside, other=0) & mask
    c3 = c1 * 0
    for _ in tl.static_range(ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((p1 >> 32) & mask) ^ c1 ^ k0, ((p0 >> 32) & mask) ^ c3 ^ k1
        c1, c3 = p1 & mask, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    out = out_ptr + at.to(tl.int64) * 4
    tl.store(out, (c0.to(tl.float64) + 0.5) * 2.0**-32, mask=inside)
    tl.store(out + 1, (c1.to(tl.float64) + 0.5) * 2.0**-32, mask=inside)
    tl.store(out + 2, (c2.to(tl.float64) + 0.5) * 2.0**-32, mask=inside)
    tl.store(out + 3, (c3.to(tl.float64) + 0.5) * 2.0**-32, mask=inside)


def step_uniforms(seeds: Tensor, choices: Tensor, steps: Tensor, num_rows: int, rounds: int) -> Tensor:
    """See `kernels.philox.step_uniforms`."""
    num_values = seeds.shape[0] * num_rows
    out = torch.empty((seeds.shape[0], num_rows, 4), dtype=torch.float64, device=seeds.device)
    if num_values:
        _step_uniforms_kernel[(triton.cdiv(num_values, BLOCK),)](
            seeds, choices, steps, out, num_values, num_rows, ROUNDS=rounds, BLOCK=BLOCK
        )
    return out
