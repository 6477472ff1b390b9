"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

from flashspark.attention.interface import AttentionBackend
from flashspark.attention.torch_native import TorchNativeBackend

BACKENDS = ("torch_native", "triton")


def make_backend(name: str, device_type: str = "cpu") -> AttentionBackend:
    """The backend called `name`; `auto` is triton on a GPU and torch_native elsewhere.

    Raises:
        ValueError: naming the flag and the choices, or what the backend is missing here.
    """
    if name == "auto":
        name = "triton" if device_type == "cuda" else "torch_native"
    if name not in BACKENDS:
        choices = ", ".join(BACKENDS)
        raise ValueError(f"--attention-backend {name!r} is not known; choose one of: {choices}")
    if name == "torch_native":
        return TorchNativeBackend()
    try:
        from flashspark.attention.triton_paged import TritonBackend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            "--attention-backend triton: the triton package is not installed; install flashspark[cuda], or use "
            "torch_native"
        ) from None
    return TritonBackend(device_type)
