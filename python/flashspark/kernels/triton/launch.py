"""What the wrappers around Triton kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Whether a layer's kernels start while the one before them ends (programmatic dependent launch, from sm_90 on).
PROGRAMMATIC_LAUNCH = False

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def launch_options() -> dict[str, bool]:
    """Of kernels that call `await_previous`: its argument, and how they are launched."""
    if PROGRAMMATIC_LAUNCH and not is_interpreted():
        return {"PROGRAMMATIC": True, "launch_pdl": True}
    return {"PROGRAMMATIC": False}


@triton.jit
def await_previous(PROGRAMMATIC: tl.constexpr):
    """Lets the next kernel start, and waits until the one before has ended and all of its writes are seen.

    Every program of a kernel that is launched so calls this, before it reads or writes anything but weights: a kernel
    that ended without having waited would let its successor overtake its predecessor.
    """
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What factors of `tl.dot` are cast to: nothing, natively. The interpreter multiplies bfloat16 as raw bits, so
    there it is float32, in which such products are exact."""
    return tl.float32 if is_interpreted() else _TYPES[dtype]


def block_size(size: int, smallest: int = 1) -> int:
    """The power of two that holds `size`: blocks have no other lengths."""
    return max(smallest, triton.next_power_of_2(size))
