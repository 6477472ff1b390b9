"""The greedy half of `kernels.accept` in Triton; the sampled one is in `sampling`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

REQUESTS = 64  # of a program


@triton.jit(do_not_specialize=["num_reqs"])
def _accept_greedy_kernel(
    target_ids_ptr,
    drafts_ptr,
    verify_lens_ptr,
    num_accepted_ptr,
    following_ptr,
    num_matched_ptr,
    num_reqs,
    GAMMA: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    there = request < num_reqs
    matched = tl.zeros((REQUESTS,), tl.int64)
    going = there
    for i in range(GAMMA):
        target = tl.load(target_ids_ptr + request * (GAMMA + 1) + i, mask=there, other=0)
        draft = tl.load(drafts_ptr + request * GAMMA + i, mask=there, other=0)
        going = going & (target == draft)
        matched += going.to(tl.int64)
    accepted = tl.minimum(matched, tl.load(verify_lens_ptr + request, mask=there, other=1) - 1)
    following = tl.load(target_ids_ptr + request * (GAMMA + 1) + accepted, mask=there, other=0)
    tl.store(num_accepted_ptr + request, accepted, mask=there)
    tl.store(following_ptr + request, following, mask=there)
    tl.store(num_matched_ptr + request, matched, mask=there)


def accept_greedy(target_ids: Tensor, drafts: Tensor, verify_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.accept.accept_greedy`."""
    num_reqs, gamma = drafts.shape
    num_accepted, following, num_matched = torch.empty(
        (3, num_reqs), dtype=torch.int64, device=target_ids.device
    ).unbind(0)
    if num_reqs:
        _accept_greedy_kernel[(triton.cdiv(num_reqs, REQUESTS),)](
            target_ids.contiguous(),
            drafts.contiguous(),
            verify_lens,
            num_accepted,
            following,
            num_matched,
            num_reqs,
            GAMMA=gamma,
            REQUESTS=REQUESTS,
            num_warps=2,
        )
    return num_accepted, following, num_matched
