"""Holds Triton kernels against their torch references: natively on a GPU, without one under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
DEVICE = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu"
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
# A value that is rounded another way in between may end two units in the last place off. The interpreter cuts bfloat16
# off instead of rounding it, every time.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2 if DEVICE == "cuda" else 8e-2,
    torch.float16: 4e-3,
}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Uniform in [0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=dtype).to(DEVICE)


def integers(values: list | Tensor) -> Tensor:
    """int64 on the device."""
    return torch.as_tensor(values, dtype=torch.int64).to(DEVICE)


def reference(function: Callable[..., Any], *args: Any) -> Any:
    """What the torch body of a kernel's function makes of `args` on the CPU, on the tests' device.

    A scan of torch's on a GPU may fall at the end of a row, in the last bit, where it should stay: no reference for
    draws at the very end of the mass.
    """
    found = function(*(a.cpu() if torch.is_tensor(a) else a for a in args), implementation="torch")
    return found.to(DEVICE) if torch.is_tensor(found) else tuple(x.to(DEVICE) for x in found)


def assert_close(got: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Of the same shape and dtype, and within the dtype's tolerance, absolute and relative."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    limit = TOLERANCE.get(got.dtype, 0.0) if tolerance is None else tolerance
    torch.testing.assert_close(got, expected, atol=limit, rtol=limit)
