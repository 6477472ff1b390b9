"""The residual stream of a transformer, with each sum where it costs least."""

from __future__ import annotations

from torch import Tensor

from flashspark.layers.linear import RowLinear
from flashspark.layers.norm import RMSNorm


class ResidualStream:
    """What sublayers read through a norm and add to: `value` [..., H].

    On a CPU a product adds itself to the stream as it is made. On a GPU that would cost a copy of the stream: there the
    sum waits for the next norm, which makes it on the way.
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._pending: Tensor | None = None
        self._is_wanted = False
        self.kept: list[Tensor] = []  # what `keep` asked for, in order, once it is made

    def normed(self, norm: RMSNorm) -> Tensor:
        """The stream through `norm`."""
        if self._pending is None:
            return norm(self._value)
        normed, total = norm.of_sum(self._pending, self._value)
        self._settle(total)
        return normed

    def add_product(self, linear: RowLinear, x: Tensor) -> None:
        """Adds `linear(x)`; `x` [..., in], or cut into heads."""
        if self._value.device.type == "cpu":
            self._value = linear.add_to(self.value, x)
        else:
            value = self.value
            self._pending = linear(x.reshape(-1, linear.in_features)).view(value.shape)

    def replace(self, value: Tensor) -> None:
        """`value` is the stream from now on."""
        self._settle(value)

    @property
    def value(self) -> Tensor:
        """The stream as it is now."""
        if self._pending is not None:
            self._settle(self._value + self._pending)
        return self._value

    def keep(self) -> None:
        """Wants the stream as it is now in `kept`, at the latest when it is next read."""
        if self._pending is None:
            self.kept.append(self._value)
        else:
            self._is_wanted = True

    def _settle(self, value: Tensor) -> None:
        self._value, self._pending = value, None
        if self._is_wanted:
            self.kept.append(value)
            self._is_wanted = False
