"""Where each token of one answer came from and where its text ends; kept for requests with `return_token_origin`."""

from __future__ import annotations

from typing import Any

from flashspark.ipc import RequestOutput, TokenOrigin
from flashspark.text.detokenizer import IncrementalDetokenizer


class TokenTrail:
    """Grows with the answer. A detokenizer of its own takes the tokens one by one."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._origins: list[TokenOrigin] = []
        self._text_ends: list[int] = []
        self._num_chars = self._num_taken = 0

    def add(self, output: RequestOutput) -> None:
        """Appends what the scheduler sent."""
        self._origins += output.token_origins
        for token_id in output.token_ids:
            self._num_chars += len(self._detokenizer.push([token_id]))
            self._text_ends.append(self._num_chars)

    def fields(self, incremental: bool) -> dict[str, Any]:
        """For `meta_info`: of all tokens, or only of those since the last call.

        `token_text_ends` counts characters from the start of the answer's text. Where a stop cut the text, or holds
        some of it back, it reaches beyond what is shown.
        """
        since = self._num_taken if incremental else 0
        self._num_taken = len(self._origins)
        return {"token_origins": self._origins[since:], "token_text_ends": self._text_ends[since:]}
