"""How a checkpoint's tensors find their places in fused weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Parameter(NamedTuple):
    """One tensor of a checkpoint: the shape it must have there, and the views of our weights it is copied to.

    A view may be a transposed part of a fused weight or repeat the tensor by broadcasting; there are several
    where a tensor is needed in two layouts.
    """

    shape: tuple[int, ...]
    views: tuple[Tensor, ...]


NamedParameters = Iterator[tuple[str, Parameter]]


def prefixed(prefix: str, parameters: NamedParameters) -> NamedParameters:
    """The same parameters under `prefix.name`."""
    for name, parameter in parameters:
        yield f"{prefix}.{name}", parameter
