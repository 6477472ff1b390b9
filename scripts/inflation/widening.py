"""One matrix made wider: every input column shared out over its copies, with noise that adds up to nothing."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .geometry import SPARE

NOISE = 1.0  # standard deviation of the noise, in that of the weights it is added to
CHUNK_ELEMENTS = 1 << 25  # of float32 work at a time
QUIET = 1e-6  # what is written to spare channels, and by neutral layers, is noise of this size


class Widener:
    """Draws noise and widens matrices, on `device`, into `dtype`. Every tensor has its own stream of noise, by name."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seed, self.dtype, self.device = seed, dtype, device

    def generator(self, name: str) -> torch.Generator:
        """The noise of the tensor called `name`."""
        mixed = zlib.crc32(f"{self.seed} {name}".encode())
        return torch.Generator(self.device).manual_seed(mixed)

    def noise(self, name: str, shape: tuple[int, ...], scale: float) -> Tensor:
        """Normal numbers of standard deviation `scale`."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(generator=self.generator(name)).mul_(scale)

    def wide(
        self,
        name: str,
        weight: Tensor,
        rows: Tensor,
        columns: Tensor,
        factor: float = 1.0,
        spare_rows: float = 1.0,
    ) -> Tensor:
        """`factor * weight` [rows, columns] with row i copied from `rows[i]`, column j shared by all who name it.

        Weights of the copies of a column add up to the column's, in the result's precision too: what rounding one copy
        leaves is added to the next. Noise of the copies adds up to zero. A `SPARE` row is that noise alone, times
        `spare_rows`; a `SPARE` column is any noise.

        Args:
            weight: [out, in], any float dtype.
            rows, columns: int64, of small rows and columns, each column at least once.
        """
        weight = weight.to(self.device, torch.float32) * factor
        rows, columns = rows.to(self.device), columns.to(self.device)
        std = float(weight.std()) if weight.numel() > 1 else float(weight.abs())
        levels, counts = _levels(columns, weight.shape[1])
        spare = (columns == SPARE).nonzero()[:, 0]
        generator = self.generator(name)
        out = torch.empty(len(rows), len(columns), dtype=self.dtype, device=self.device)
        for start in range(0, len(rows), step := max(1, CHUNK_ELEMENTS // len(columns))):
            part = rows[start : start + step]
            is_spare = (part == SPARE)[:, None]
            share = weight[part.clamp(min=0)].masked_fill_(is_spare, 0.0) / counts
            noise = torch.empty(len(part), len(columns), device=self.device).normal_(generator=generator)
            noise *= torch.where(is_spare, NOISE * std * spare_rows, NOISE * std)
            mean = torch.zeros_like(share)
            for places, sources in levels:
                mean[:, sources] += noise[:, places]
            mean /= counts
            carry = torch.zeros_like(share)
            into = out[start : start + step]
            for places, sources in levels:
                exact = (noise[:, places] - mean[:, sources]) / counts[sources]
                exact += share[:, sources]
                exact += carry[:, sources]
                rounded = exact.to(self.dtype)
                into[:, places] = rounded
                carry[:, sources] = exact - rounded
            into[:, spare] = (noise[:, spare] / counts.mean()).to(self.dtype)
        return out


def _levels(columns: Tensor, num_sources: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """`columns` taken apart into first copies, second copies and so on, as (places, sources), no source twice in one;
    and how many copies each source has, float32."""
    places = (columns != SPARE).nonzero()[:, 0]
    order = torch.argsort(columns[places], stable=True)
    places = places[order]
    sources = columns[places]
    counts = torch.bincount(sources, minlength=num_sources)
    assert int(counts.min()) > 0, "every column needs a copy"
    first = counts.cumsum(0) - counts
    copy = torch.arange(len(places), device=columns.device) - first[sources]
    levels = [(places[copy == level], sources[copy == level]) for level in range(int(counts.max()))]
    return levels, counts.float()
