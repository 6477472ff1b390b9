"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

import torch

from flashspark.attention.interface import AttentionBackend
from flashspark.attention.torch_native import TorchNativeBackend

BACKENDS = ("torch_native", "triton", "flashinfer")


def make_backend(name: str, device_type: str = "cpu", flag: str = "--attention-backend") -> AttentionBackend:
    """The backend called `name`; `auto` is triton on a GPU and torch_native elsewhere.

    Raises:
        ValueError: naming `flag`, which asked for it, and the choices, or what the backend is missing here.
    """
    if name == "auto":
        name = "triton" if device_type == "cuda" else "torch_native"
    if name not in BACKENDS:
        choices = ", ".join(BACKENDS)
        raise ValueError(f"{flag} {name!r} is not known; choose one of: {choices}")
    if name == "torch_native":
        return TorchNativeBackend()
    try:
        return _make_triton(device_type) if name == "triton" else _make_flashinfer(device_type)
    except ValueError as error:
        raise ValueError(f"{flag} {name}{error}") from None


def _make_triton(device_type: str) -> AttentionBackend:
    try:
        from flashspark.attention.triton_paged import TritonBackend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            ": the triton package is not installed; install flashspark[cuda], or use torch_native"
        ) from None
    return TritonBackend(device_type)


def _make_flashinfer(device_type: str) -> AttentionBackend:
    if device_type != "cuda":
        raise ValueError(" needs a GPU: use torch_native on a CPU")
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ModuleNotFoundError as error:
        raise ValueError(
            f": the {error.name} package is not installed; install flashspark[flashinfer], or use triton"
        ) from None
    from flashspark.attention.flashinfer_paged import FlashInferBackend

    return FlashInferBackend(BatchPrefillWithPagedKVCacheWrapper, torch.device(device_type))
