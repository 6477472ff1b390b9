"""`kernels.commit_rows` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

REQUESTS = 128  # of a program


@triton.jit(do_not_specialize=["num_reqs"])
def _commit_rows_kernel(
    context_lens_ptr,
    anchors_ptr,
    rows_ptr,
    tokens_ptr,
    num_tokens_ptr,
    num_reqs,
    tokens_stride,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    there = request < num_reqs
    row = tl.load(rows_ptr + request, mask=there, other=0)
    number = tl.load(num_tokens_ptr + request, mask=there, other=1)
    length = tl.load(context_lens_ptr + row, mask=there, other=0)
    last = tl.load(tokens_ptr + request * tokens_stride + number - 1, mask=there, other=0)
    tl.store(context_lens_ptr + row, length + number, mask=there)
    tl.store(anchors_ptr + row, last, mask=there)


def commit_rows(
    context_lens: Tensor, anchors: Tensor, rows: Tensor, tokens: Tensor, num_tokens: Tensor
) -> None:
    """See `kernels.commit_rows.commit_rows`."""
    num_reqs = rows.shape[0]
    assert tokens.stride(1) == 1 or tokens.shape[1] == 1
    if num_reqs:
        _commit_rows_kernel[(triton.cdiv(num_reqs, REQUESTS),)](
            context_lens,
            anchors,
            rows,
            tokens,
            num_tokens,
            num_reqs,
            tokens.stride(0),
            REQUESTS=REQUESTS,
        )
