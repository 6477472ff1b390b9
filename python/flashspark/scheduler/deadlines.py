"""How long a request may wait for its first row, and how long it may run from then on."""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request


@dataclass(frozen=True)
class Deadlines:
    """Seconds; None: as long as it takes."""

    waiting_s: float | None = None
    running_s: float | None = None

    def missed(self, request: Request, now_s: float) -> str | None:
        """Why `request` has taken too long at `now_s` (monotonic); None while it has not."""
        if request.queue_seconds is None:
            what, limit_s, since_s = "wait for a row", self.waiting_s, request.arrived_s
        else:
            what, limit_s, since_s = "run", self.running_s, request.arrived_s + request.queue_seconds
        if limit_s is None or now_s - since_s <= limit_s:
            return None
        return f"the server ended this request: it may {what} {limit_s:g} s"
