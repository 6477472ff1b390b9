"""Token ids to text, piece by piece, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

# The "byte to printable character" table of byte-level BPE: printable Latin-1 stands for itself, the other
# bytes are moved to U+0100 and up, in order.
_PRINTABLE_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_of_char() -> dict[str, int]:
    table = {chr(byte): byte for byte in _PRINTABLE_BYTES}
    moved = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(0x100 + rank): byte for rank, byte in enumerate(list(moved))}


_BYTE_OF_CHAR = _byte_of_char()


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for.

    A token with a character outside the table is an added one and stands for its own text.
    """
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


class IncrementalDetokenizer(Protocol):
    """One request's text. All pushes and the final flush together are the decoding of all ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Appends ids; the text that became complete. The end of an unfinished character is held back."""
        ...

    def flush(self) -> str:
        """The rest, at the end of a request: an unfinished character becomes U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For byte-level vocabularies (Qwen, Llama 3, GPT-2): bytes per token through one UTF-8 decoder.

    Python's and Rust's lossy decoding replace the same ill-formed runs, so the result is exactly the
    library's own decoding, at a constant cost per token.
    """

    def __init__(self, bytes_of_id: Callable[[int], bytes]) -> None:
        self._bytes_of_id = bytes_of_id
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of_id, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes a short window before and after, and takes the difference.

    The window starts where the text before last began, so that rules at the start of a text (a dropped
    leading space) do not apply in its middle.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window_start = 0
        self._num_read = 0  # ids whose text has been returned
        self._emitted: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        before = self._decode(self._ids[self._window_start : self._num_read])
        after = self._decode(self._ids[self._window_start :])
        if len(after) <= len(before) or after.endswith("�"):
            return ""
        delta = after[len(before) :]
        self._window_start, self._num_read = self._num_read, len(self._ids)
        self._emitted.append(delta)
        return delta

    def flush(self) -> str:
        emitted = "".join(self._emitted)
        whole = self._decode(self._ids)
        if whole.startswith(emitted):
            delta = whole[len(emitted) :]
        else:  # a decoder that rewrites earlier text; what was shown stays
            before = self._decode(self._ids[self._window_start : self._num_read])
            delta = self._decode(self._ids[self._window_start :])[len(before) :]
        self._num_read = len(self._ids)
        self._emitted.append(delta)
        return delta
