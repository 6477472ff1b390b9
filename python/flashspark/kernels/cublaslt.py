"""Products by an algorithm of cuBLASLt that the caller names, through the library that PyTorch has loaded already.

For a shape, cuBLASLt lists some algorithms that it thinks best: tiles, stages, clusters, splits of the inner dimension.
PyTorch runs the first. Many more can do the product, some of them faster: those that are listed for other shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for its Hopper GPUs
MAX_LISTED = 64  # for one shape; 8 are usual

# Enumerators of library_types.h, cublas_api.h and cublasLt.h.
_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FLOAT32, _SCALE_FLOAT32 = 68, 0
_DESCRIPTION_TRANSPOSE_A = 3
_PREFERENCE_WORKSPACE_BYTES = 1
# cublasLtMatmulAlgoConfigAttributes_t: algorithm, tile, splits, their reduction, swizzle, custom option, stages; then,
# in 16 bits, inner shape and cluster shape.
_CONFIG_WORDS = (0, 1, 2, 3, 4, 5, 6)
_CONFIG_HALF_WORDS = (7, 8)


class _AlgorithmData(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque, may be copied."""

    _fields_ = [("data", c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _AlgorithmData),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True)
class Algorithm:
    """One way to multiply."""

    configuration: tuple[int, ...]  # the attributes above, in their order
    data: _AlgorithmData = field(repr=False, compare=False)
    has_workspace: bool = True

    @property
    def lean(self) -> Algorithm:
        """The same without workspace, where it can do a product so.

        With one, tiles of more than a wave are handed out as programs get to them, by a counter there that a launch of
        its own sets to zero. Without, it is settled before who takes which: on an H200, 1 to 2 % less for a large
        product that keeps it at its power limit.
        """
        return replace(self, has_workspace=False)

    @classmethod
    def configured(
        cls, configuration: tuple[int, ...], dtype: torch.dtype, out_dtype: torch.dtype
    ) -> Algorithm | None:
        """The algorithm of this configuration for operands of `dtype`; None where the library has no such one."""
        library = _library()
        if library is None:
            return None
        data, number = _AlgorithmData(), configuration[0]
        of_in, of_out = _DATA_TYPES[dtype], _DATA_TYPES[out_dtype]
        try:
            library.call(
                "cublasLtMatmulAlgoInit",
                *(library.handle, _COMPUTE_FLOAT32, _SCALE_FLOAT32, of_in, of_in, of_out, of_out),
                *(number, byref(data)),
            )
            for attribute, value in list(enumerate(configuration))[1:]:
                kind = c_uint16 if attribute in _CONFIG_HALF_WORDS else c_uint32
                library.set_config(data, attribute, kind(value))
        except CublasLtError:
            return None
        return cls(configuration, data)


class CublasLtError(RuntimeError):
    """The library refused a call."""


def is_available() -> bool:
    """Whether this PyTorch came with the library, and there is a GPU to use it."""
    return _library() is not None


def is_dense(weight: Tensor) -> bool:
    """Whether a matrix lies without gaps, row by row or column by column: `Product` describes no other weight."""
    return weight.is_contiguous() or weight.t().is_contiguous()


class Product:
    """`out` = `x @ weight`, [M, in] · [in, out] = [M, out], described to the library once.

    `x` and `out` are contiguous, `weight` is dense (`is_dense`). `out` has the dtype of the others or is float32.
    The tensors must stay where they are. Products of one device share a workspace: they run one after the other.
    """

    def __init__(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        library = _library()
        assert library is not None
        assert x.is_contiguous() and out.is_contiguous() and is_dense(weight)
        is_transposed = not weight.is_contiguous()
        self._library, self._x, self._weight, self._out = library, x, weight, out
        (num_rows, inner), width = x.shape, weight.shape[1]
        # The library's matrices are column by column, so that ours are transposed to it: outᵀ = weightᵀ xᵀ.
        self._description = c_void_p()
        library.call("cublasLtMatmulDescCreate", byref(self._description), _COMPUTE_FLOAT32, _SCALE_FLOAT32)
        library.set("cublasLtMatmulDesc", self._description, _DESCRIPTION_TRANSPOSE_A, c_int(is_transposed))
        rows, columns = (inner, width) if is_transposed else (width, inner)
        self._layouts = [
            library.layout(weight.dtype, rows, columns),
            library.layout(x.dtype, inner, num_rows),
            library.layout(out.dtype, width, num_rows),
        ]
        of_weight, of_x, of_out = self._layouts
        self._one, self._zero, self._workspace = c_float(1.0), c_float(0.0), _workspace(x.device)
        p_weight, p_x, p_out = (c_void_p(tensor.data_ptr()) for tensor in (weight, x, out))
        self._before = [library.handle, self._description, byref(self._one), p_weight, of_weight, p_x, of_x]
        self._before += [byref(self._zero), p_out, of_out, p_out, of_out]
        self._after = (c_void_p(self._workspace.data_ptr()), c_size_t(WORKSPACE_BYTES))

    def __enter__(self) -> Product:
        return self

    def __exit__(self, *_: object) -> None:
        for layout in self._layouts:
            self._library.call("cublasLtMatrixLayoutDestroy", layout)
        self._library.call("cublasLtMatmulDescDestroy", self._description)

    def algorithms(self, workspace_bytes: int = WORKSPACE_BYTES) -> list[Algorithm]:
        """What the library would try, the most promising first; empty if it knows nothing.

        `workspace_bytes`: at most so much workspace; with less, it lists others.
        """
        library, preference = self._library, c_void_p()
        found, count = (_Heuristic * MAX_LISTED)(), c_int()
        of_weight, of_x, of_out = self._layouts
        library.call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            library.set(
                "cublasLtMatmulPreference", preference, _PREFERENCE_WORKSPACE_BYTES, c_uint64(workspace_bytes)
            )
            library.call(
                "cublasLtMatmulAlgoGetHeuristic",
                *(library.handle, self._description, of_weight, of_x, of_out, of_out, preference),
                *(MAX_LISTED, found, byref(count)),
            )
        except CublasLtError:  # also where nothing can do the product
            return []
        finally:
            library.call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [one.algorithm for one in found[: count.value] if one.state == 0]
        return [
            Algorithm(library.configuration(data), _AlgorithmData.from_buffer_copy(data)) for data in usable
        ]

    def multiply(self, algorithm: Algorithm) -> Tensor:
        """Fills `out` and returns it; on the current stream, and may be captured.

        Raises:
            CublasLtError: `algorithm` cannot do this product. Nothing was launched.
        """
        stream = c_void_p(torch.cuda.current_stream(self._x.device).cuda_stream)
        workspace = self._after if algorithm.has_workspace else (c_void_p(), c_size_t())
        self._library.call("cublasLtMatmul", *self._before, byref(algorithm.data), *workspace, stream)
        return self._out


class _Library:
    """The loaded library and a handle."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._loaded = loaded
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    def call(self, name: str, *arguments: Any) -> None:
        """Raises `CublasLtError` unless the function reports success."""
        function: Callable[..., int] = getattr(self._loaded, name)
        status = function(*arguments)
        if status != 0:
            raise CublasLtError(f"{name} failed with status {status}")

    def set(self, kind: str, thing: c_void_p, attribute: int, value: Any) -> None:
        """Sets an attribute of a description or a preference."""
        self.call(f"{kind}SetAttribute", thing, attribute, byref(value), c_size_t(ctypes.sizeof(value)))

    def set_config(self, algorithm: _AlgorithmData, attribute: int, value: Any) -> None:
        """Sets an attribute of an algorithm's configuration."""
        size = c_size_t(ctypes.sizeof(value))
        self.call("cublasLtMatmulAlgoConfigSetAttribute", byref(algorithm), attribute, byref(value), size)

    def layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        """Of a matrix that lies column by column without gaps."""
        layout = c_void_p()
        sizes = (c_uint64(rows), c_uint64(columns), c_int64(rows))
        self.call("cublasLtMatrixLayoutCreate", byref(layout), _DATA_TYPES[dtype], *sizes)
        return layout

    def configuration(self, algorithm: _AlgorithmData) -> tuple[int, ...]:
        """See `Algorithm`."""
        values = []
        for attributes, kind in ((_CONFIG_WORDS, c_uint32), (_CONFIG_HALF_WORDS, c_uint16)):
            for attribute in attributes:
                value, written = kind(), c_size_t()
                self.call(
                    "cublasLtMatmulAlgoConfigGetAttribute",
                    *(byref(algorithm), attribute, byref(value)),
                    *(c_size_t(ctypes.sizeof(value)), byref(written)),
                )
                values.append(int(value.value))
        return tuple(values)


@lru_cache(maxsize=1)
def _library() -> _Library | None:
    """PyTorch's copy: the loader answers with what is in the process already."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    torch.cuda.current_blas_handle()
    try:
        return _Library(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"))
    except (OSError, CublasLtError):
        return None


@lru_cache(maxsize=8)
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
