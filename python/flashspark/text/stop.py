"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A completed stop string; offsets count characters of all text pushed so far."""

    stop: str
    start: int

    @property
    def end(self) -> int:
        """Offset just behind the stop string."""
        return self.start + len(self.stop)


class StopMatcher:
    """Finds the first stop string that completes, however the text is cut into pieces.

    "First" is the one that ends earliest, the longer one where two end together. Scheduler and API see the
    same text in different pieces and have to agree, so the answer must not depend on the pieces: the leftmost
    *start* would, since a later push can complete a string that began earlier.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._max_len = max((len(stop) for stop in self._stops), default=0)
        self._tail = ""
        self._tail_start = 0
        self._match: StopMatch | None = None

    @property
    def match(self) -> StopMatch | None:
        """The match found so far. It never changes once there is one."""
        return self._match

    def push(self, text: str) -> StopMatch | None:
        """Appends text; the match if one is complete."""
        if self._match is not None or not self._stops:
            return self._match
        window = self._tail + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self._match = StopMatch(best[2], self._tail_start + best[1])
            return self._match
        keep = min(len(window), self._max_len - 1)
        self._tail_start += len(window) - keep
        self._tail = window[len(window) - keep :]
        return None

    def skip(self, text: str) -> None:
        """Appends text in which nothing is looked for, and into which no match may reach back.

        No text changes nothing: a stop string that has begun goes on.
        """
        if not text:
            return
        self._tail_start += len(self._tail) + len(text)
        self._tail = ""

    def releasable(self, text: str) -> int:
        """How many leading characters of `text` no stop string can reach any more.

        `text` is the end of what was pushed, as long as there is no match: the rest is a beginning of a stop
        string, to be held back until it is decided.
        """
        longest = min(len(text), self._max_len - 1)
        for held in range(longest, 0, -1):
            suffix = text[len(text) - held :]
            if any(stop.startswith(suffix) for stop in self._stops):
                return len(text) - held
        return len(text)
