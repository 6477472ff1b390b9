"""What the wrappers around Triton kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What factors of `tl.dot` are cast to: nothing, natively. The interpreter multiplies bfloat16 as raw bits, so
    there it is float32, in which such products are exact."""
    return tl.float32 if is_interpreted() else _TYPES[dtype]


def block_size(size: int, smallest: int = 1) -> int:
    """The power of two that holds `size`: blocks have no other lengths."""
    return max(smallest, triton.next_power_of_2(size))
