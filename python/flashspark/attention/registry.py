"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

from collections.abc import Callable

from flashspark.attention.interface import AttentionBackend
from flashspark.attention.torch_native import TorchNativeBackend

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch_native": TorchNativeBackend}


def make_backend(name: str) -> AttentionBackend:
    """The backend called `name`. ValueError names the flag and the choices."""
    if name not in BACKENDS:
        choices = ", ".join(sorted(BACKENDS))
        raise ValueError(f"--attention-backend {name!r} is not known; choose one of: {choices}")
    return BACKENDS[name]()
