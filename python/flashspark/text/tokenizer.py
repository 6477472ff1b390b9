"""A model folder's tokenizer: encode, decode, chat template, end-of-sequence ids."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .chat_template import ChatTemplate, ChatTemplateError
from .detokenizer import (
    ByteLevelDetokenizer,
    IncrementalDetokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)

_INLINE_IDS = 4096
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerLoadError(ValueError):
    """The folder's tokenizer files are absent or broken; the message names the file."""


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerLoadError(
            f"{path} is not readable JSON ({error}); was it written completely?"
        ) from error
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{path} does not hold a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(
            f"the chat template {path} is not readable text in UTF-8 ({error}); --chat-template names another"
        ) from error


def _token_text(value: Any) -> str | None:
    """Special tokens are written as a string or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _decoder_types(decoder: Any) -> set[str]:
    """Names of a decoder and of everything it is made of."""
    if not isinstance(decoder, dict):
        return set()
    parts = decoder.get("decoders") or []
    return {str(decoder.get("type"))}.union(*map(_decoder_types, parts))


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


class TextTokenizer:
    """Text to ids and back for one model. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        """`tool_template` is for conversations with tools, where a model has one of its own."""
        self._tokenizer = tokenizer
        self._chat_template, self._tool_template = chat_template, tool_template or chat_template
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._byte_level = _is_byte_level(decoder)
        self._byte_fallback = "ByteFallback" in _decoder_types(decoder)
        self._special_ids = {
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._bytes_of_id: dict[int, bytes] = {}
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None) -> TextTokenizer:
        """Reads `tokenizer.json` and its neighbours; `chat_template` (a file or a text) replaces theirs."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerLoadError(f"{folder} has no tokenizer.json; --tokenizer-path names another folder")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions
            raise TokenizerLoadError(f"{file} cannot be loaded: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        special = {name: _token_text(settings.get(name)) for name in _SPECIAL_TOKEN_NAMES}
        special_tokens = {name: text for name, text in special.items() if text is not None}
        source, tool_source = _template_sources(folder, settings, chat_template)
        return cls(
            tokenizer,
            eos_token_ids=_eos_token_ids(folder, tokenizer, special_tokens.get("eos_token")),
            chat_template=ChatTemplate(source, special_tokens) if source else None,
            tool_template=ChatTemplate(tool_source, special_tokens) if tool_source else None,
        )

    @property
    def vocab_size(self) -> int:
        """Entries including added tokens. A model's own vocabulary may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return self._chat_template is not None

    @property
    def template_takes_tools(self) -> bool:
        """Whether tools that are given to `apply_chat_template` reach the text."""
        return self._tool_template is not None and self._tool_template.takes_tools

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Blocking for long texts: call it from a thread there."""
        # The batch call is the one that lets other Python threads run meanwhile.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids outside the vocabulary stand for nothing."""
        if len(token_ids) <= _INLINE_IDS:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        # As in `encode`: only the batch call lets other threads run meanwhile.
        return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh incremental decoder for one request."""
        if not self._byte_level:
            return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens))
        if skip_special_tokens:
            special = self._special_ids
            return ByteLevelDetokenizer(lambda i: b"" if i in special else self._token_bytes(i))
        return ByteLevelDetokenizer(self._token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for; part of a character for some ids of a byte-level vocabulary, nothing outside it."""
        if self._byte_level:
            return self._token_bytes(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The same as text, with U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        cached = self._bytes_of_id.get(token_id)
        if cached is None:
            token = self._tokenizer.id_to_token(token_id)
            cached = b"" if token is None else byte_level_bytes(token)
            self._bytes_of_id[token_id] = cached
        return cached

    def vocabulary(self, size: int) -> list[bytes] | None:
        """What each id from 0 to `size` - 1 adds to a text in its middle; nothing for special and unknown ids.

        None where a token's text depends on its neighbours, as in word-piece vocabularies.
        """
        if not (self._byte_level or self._byte_fallback):
            return None
        token_bytes = self._token_bytes if self._byte_level else self._byte_fallback_bytes
        return [b"" if i in self._special_ids else token_bytes(i) for i in range(size)]

    def _byte_fallback_bytes(self, token_id: int) -> bytes:
        """SentencePiece's: `▁` is a space, and `<0x0A>` a byte."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as prompt text. Encode it with `add_special_tokens=False`: the template has them."""
        template = self._tool_template if tools else self._chat_template
        if template is None:
            raise ChatTemplateError("this model has no chat template; --chat-template can name one")
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=template_kwargs,
        )


def _eos_token_ids(folder: Path, tokenizer: Tokenizer, eos_token: str | None) -> set[int]:
    """Every id that some file of the folder calls an end: a chat model often has two."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids.update(item for item in values if isinstance(item, int) and not isinstance(item, bool))
    if eos_token is not None:
        token_id = tokenizer.token_to_id(eos_token)
        if token_id is not None:
            ids.add(token_id)
    return ids


def _template_sources(folder: Path, settings: Mapping[str, Any], override: str | None) -> tuple[str, str]:
    """The chat template, and one for conversations with tools; empty where there is none."""
    source: Any = settings.get("chat_template")
    tool_source: Any = ""
    if isinstance(source, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source, tool_source = named.get("default"), named.get("tool_use")
    file = folder / "chat_template.jinja"
    if override is not None:
        tool_source = ""
        if os.path.isfile(override):  # Path's own raises where a text is too long to be a name
            source = _read_text(Path(override))
        elif "{" in override:
            source = override
        else:
            raise TokenizerLoadError(f"--chat-template {override}: no such file")
    elif file.is_file():
        source = _read_text(file)
    return source if isinstance(source, str) else "", tool_source if isinstance(tool_source, str) else ""
