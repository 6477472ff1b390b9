"""Windows of the packed token streams, drawn at random on the training device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .tokens import END_OF_TEXT


class Windows:
    """Token streams on the device and the positions at which their documents start."""

    def __init__(self, streams: Mapping[str, np.ndarray], device: torch.device) -> None:
        self.device = device
        self.streams = {n: torch.from_numpy(s.astype(np.int32)).to(device) for n, s in streams.items()}
        self._ends: dict[tuple[str, int], Tensor] = {}
        self.starts = {n: self._document_starts(s) for n, s in self.streams.items()}

    def _document_starts(self, stream: Tensor) -> Tensor:
        ends = (stream == END_OF_TEXT).nonzero().flatten()
        return torch.cat((ends.new_zeros(1), ends[:-1] + 1))

    def at(self, name: str, starts: Tensor, length: int) -> Tensor:
        """Windows [n, length] that begin at `starts`, moved back where they would run over the end."""
        stream = self.streams[name]
        starts = starts.clamp(max=len(stream) - length - 1)
        return stream[starts[:, None] + torch.arange(length, device=self.device)].long()

    def anywhere(self, name: str, count: int, length: int) -> Tensor:
        """Windows at uniformly random places."""
        high = max(1, len(self.streams[name]) - length - 1)
        return self.at(name, torch.randint(high, (count,), device=self.device), length)

    def document_starts(self, name: str, count: int, length: int) -> Tensor:
        """Windows at the starts of random documents."""
        starts = self.starts[name]
        return self.at(name, starts[torch.randint(len(starts), (count,), device=self.device)], length)

    def ending_with(self, name: str, closing_ids: Tensor, count: int, length: int) -> Tensor:
        """Windows whose last token is one of `closing_ids` (anywhere, where the stream has none)."""
        key = (name, length)
        if key not in self._ends:
            ends = torch.isin(self.streams[name], closing_ids.to(torch.int32)).nonzero().flatten()
            self._ends[key] = ends[ends >= length]
        ends = self._ends[key]
        if not len(ends):
            return self.anywhere(name, count, length)
        return self.at(
            name, ends[torch.randint(len(ends), (count,), device=self.device)] - length + 1, length
        )

    def mixed(self, name: str, count: int, length: int, chat_share: float, start_share: float) -> Tensor:
        """A batch of `count` windows: chats, document starts and places in the middle of files."""
        num_chat = round(count * chat_share)
        num_start = round((count - num_chat) * start_share)
        parts = [
            self.document_starts("chat", num_chat, length),
            self.document_starts(name, num_start, length),
            self.anywhere(name, count - num_chat - num_start, length),
        ]
        return torch.cat(parts)
