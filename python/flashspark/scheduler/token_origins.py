"""How each output token of one request came about; kept for requests that ask for it."""

from __future__ import annotations

from flashspark.ipc import TokenOrigin


class TokenOrigins:
    """Takes every verify step of a request in order. Positions count its output tokens from 0."""

    def __init__(self) -> None:
        self._num_tokens = 0
        # Positions from here on that some step drafted for and did not verify: gamma of them at most.
        self._trimmed: set[int] = set()
        self._untold: list[TokenOrigin] = []

    def add_step(self, num_tokens: int, num_kept: int, verify_len: int, num_drafted: int) -> None:
        """A step drafted for the next `num_drafted` positions and verified `verify_len` rows, the anchor's included.

        It committed `num_tokens` tokens, of which the request kept `num_kept` up to its end.
        """
        start = self._num_tokens
        for i in range(num_kept):
            if num_drafted == 0:
                self._untold.append("target")
            elif i == num_tokens - 1:
                self._untold.append("bonus")
            else:
                self._untold.append("redraft" if start + i in self._trimmed else "draft")
        self._num_tokens = start + num_tokens
        self._trimmed.update(range(start + verify_len - 1, start + num_drafted))
        self._trimmed = {position for position in self._trimmed if position >= self._num_tokens}

    def take(self) -> list[TokenOrigin]:
        """Those of the tokens since the last call, in order."""
        untold, self._untold = self._untold, []
        return untold
