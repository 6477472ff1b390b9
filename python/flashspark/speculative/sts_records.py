"""Records to fit a confidence head's calibration to: raw logits, and which drafts were accepted.

SGLang's files: `<stem>.<i>.pt`, each a torch archive of two float32 tensors [m, gamma] over m blocks, `logits` and
`prefix_mask` (1 for the leading drafts that were accepted). There is no place in them for a draft that was not
verified, so only blocks that were verified in full are kept.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from .confidence import HeadConfidence, Outcomes

logger = logging.getLogger(__name__)

STEPS_PER_FILE = 256  # at least; outcomes are counted every few steps


class CollectingHead(HeadConfidence):
    """An uncalibrated head that writes down what it said and what became of it.

    Kept are full blocks of the requests that a head is scored by (`draft_sees`), greedy and sampled alike.
    """

    def __init__(self, max_reqs: int, gamma: int, device: torch.device, stem: str) -> None:
        super().__init__(max_reqs, [1.0] * gamma, device)
        self._stem = stem
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._written_at = 0  # step
        self.num_files = self.num_blocks = 0  # written

    def _count(self, outcomes: Outcomes) -> None:
        super()._count(outcomes)
        is_full = outcomes.verify_lens == self.gamma + 1
        kept = is_full & outcomes.teaches & outcomes.prediction.isfinite().all(dim=1)
        position = torch.arange(self.gamma, device=kept.device)
        prefix = position < outcomes.num_accepted[kept].unsqueeze(1)
        self._waiting.append((outcomes.signal[kept], prefix.float()))
        if self.num_steps - self._written_at >= STEPS_PER_FILE:
            self._write()

    def close(self) -> None:
        """Writes what is left, however little; after the last step."""
        self.settle()
        self._write()

    def _write(self) -> None:
        waiting, self._waiting, self._written_at = self._waiting, [], self.num_steps
        if not any(len(logits) for logits, _ in waiting):
            return
        logits, prefix = (torch.cat(parts).cpu() for parts in zip(*waiting, strict=True))
        path, part = f"{self._stem}.{self.num_files}.pt", f"{self._stem}.part"
        try:
            torch.save({"logits": logits, "prefix_mask": prefix}, part)
            os.replace(part, path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the second; serving goes on
            logger.error("%d confidence records are lost, %s cannot be written: %s", len(logits), path, error)
            return
        self.num_files += 1
        self.num_blocks += len(logits)
        logger.info("confidence records: %d blocks in %s, %d so far", len(logits), path, self.num_blocks)


def record_files(stem: str) -> list[Path]:
    """The files of `stem`, in the order they were written."""
    base = Path(stem)
    numbered = {}
    for path in base.parent.glob("*.pt"):
        name, _, number = path.name.removesuffix(".pt").rpartition(".")
        if name == base.name and number.isdecimal():
            numbered[int(number)] = path
    return [numbered[number] for number in sorted(numbered)]


def load_records(stem: str) -> tuple[Tensor, Tensor]:
    """All records of `stem`: logits float64 [m, gamma], prefix bool [m, gamma].

    Raises:
        ValueError: there are none, or a file is no record or contradicts the others; names it.
    """
    files = record_files(stem)
    if not files:
        raise ValueError(f"no records: there is no file {stem}.<number>.pt")
    logits, masks = zip(*(_load(path) for path in files), strict=True)
    widths = {part.shape[1]: path for part, path in zip(logits, files, strict=True)}
    if len(widths) > 1:
        named = ", ".join(f"{width} in {path}" for width, path in widths.items())
        raise ValueError(f"the records have blocks of different lengths: {named} drafts")
    return torch.cat(logits), torch.cat(masks)


def _load(path: Path) -> tuple[Tensor, Tensor]:
    try:
        record = torch.load(path, map_location="cpu", weights_only=True)  # tensors alone: runs no code
        logits, prefix = record["logits"].double(), record["prefix_mask"] > 0
    except Exception as error:  # a file that is something else fails in its own way
        raise ValueError(f"{path} is no file of records: {error}") from error
    if logits.dim() != 2 or logits.shape != prefix.shape:
        raise ValueError(
            f"{path}: logits {list(logits.shape)} and prefix_mask {list(prefix.shape)} must be [blocks, drafts] both"
        )
    if not logits.isfinite().all():
        raise ValueError(f"{path}: logits must be finite")
    if (prefix[:, 1:] & ~prefix[:, :-1]).any():
        raise ValueError(f"{path}: prefix_mask must be 1 for leading drafts only")
    return logits, prefix
