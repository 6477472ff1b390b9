"""Products of rows with a weight, each shape by whatever was measured to be quickest for it.

PyTorch has two libraries for a GPU's half-precision products, cuBLAS and cuBLASLt, an idea of its own of which to take,
and takes the algorithm that the library lists first. On an H200 the chain of Qwen3-8B's products takes 5.3 ms instead
of 6.3 with 224 rows, and 19.6 instead of 21.4 with 1,024, if other algorithms are tried as well. What runs is chosen by
measuring, shape by shape, before steps are captured (`matmul_choice`); a captured product keeps the choice.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from .cublaslt import Algorithm, Product, is_dense

LIBRARIES = ("default", "cublas", "cublaslt")  # the first is PyTorch's own choice
Way = str | Algorithm  # how to multiply: a library, or an algorithm of cuBLASLt
Shape = tuple[int, int, int, torch.dtype]  # rows, in, out, of what comes out

_chosen: dict[Shape, Way] = {}


def matmul(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`x @ weight`: [M, in] times [in, out] -> [M, out].

    Args:
        out: where to put it, contiguous; float32 where the operands are in half precision keeps what the product was
            summed up in. None: a new tensor of the operands' dtype.
    """
    way: Way | None = None
    if _chosen:
        way = _chosen.get((x.shape[0], *weight.shape, x.dtype if out is None else out.dtype))
    return multiply(x, weight, out, LIBRARIES[0] if way is None else way)


def multiply(x: Tensor, weight: Tensor, out: Tensor | None, way: Way) -> Tensor:
    """`matmul` in a certain way. Raises `CublasLtError` if that cannot do the product."""
    if isinstance(way, Algorithm) and not is_dense(weight):
        way = LIBRARIES[0]  # chosen for another weight of this shape
    if isinstance(way, Algorithm):
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[1])
        with Product(x.contiguous(), weight, out) as product:
            return product.multiply(way)
    with nullcontext() if way == LIBRARIES[0] else _Library(way):
        if out is None:
            return torch.mm(x, weight)
        if out.dtype == x.dtype:
            return torch.mm(x, weight, out=out)
        return torch.mm(x, weight, out_dtype=out.dtype, out=out)


def remember(shape: Shape, way: Way) -> None:
    """Products of this shape are made this way from now on."""
    _chosen[shape] = way


def chosen() -> dict[Shape, Way]:
    """What was chosen."""
    return dict(_chosen)


class _Library:
    """Makes products within it go to one library."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.backends.cuda.preferred_blas_library(self._name)

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.preferred_blas_library(LIBRARIES[0])
