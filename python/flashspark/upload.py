"""Small facts of the host, on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = Sequence[int] | Sequence[bool] | Sequence[float] | NDArray[np.int64]


def upload(values: Values, device: torch.device) -> Tensor:
    """`values` as a tensor on `device`: int64, bool or float32 after their own type.

    A copy from pageable memory to a GPU waits for all that is queued there. From pinned memory it is queued too; torch
    keeps the pinned block until the copy has been made.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
