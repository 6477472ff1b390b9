"""The calibration file of a confidence head (STS): one temperature per draft position, SGLang's JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True)
class StsCalibration:
    """Temperatures that a head's raw logits are divided by; the rest says where they come from."""

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("temperatures is empty")
        if any(not 0.0 < value < math.inf for value in self.temperatures):
            raise ValueError(f"temperatures must be > 0 and finite, got {list(self.temperatures)}")

    def to_json(self) -> str:
        """The file's text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"


def load_sts(path: str | Path) -> StsCalibration:
    """Reads a calibration file; unknown keys are passed over.

    Raises:
        ValueError: names the file, and the key that is missing, of the wrong type, or against a rule.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=StsCalibration)
    except (OSError, ValueError) as error:
        raise ValueError(f"calibration file {path}: {error}") from error
