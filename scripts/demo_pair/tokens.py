"""Train the byte-level BPE tokenizer and pack the splits as token ids."""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import corpus, mining

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
END_OF_TEXT, IM_START, IM_END, MASK = range(4)
VOCAB_SIZE = 4096
MODEL_MAX_LENGTH = 1024
SPLITS = ("train", "reserved", "chat", "heldout", "chat_heldout")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Words with one leading separator, single digits, runs of punctuation, line breaks with their indentation.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class TokenStreams:
    """The packed splits, documents separated by <|endoftext|>."""

    streams: dict[str, np.ndarray]
    num_bytes: dict[str, int]


def train_tokenizer(texts: Sequence[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE whose first ids are SPECIALS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """tokenizer_config.json of the shipped target."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[IM_END],
        "pad_token": SPECIALS[END_OF_TEXT],
        "mask_token": SPECIALS[MASK],
        "additional_special_tokens": [SPECIALS[IM_START]],
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """Texts as one uint16 stream, each followed by <|endoftext|>, and their size in bytes."""
    parts = [np.zeros(0, np.uint16)]
    for start in range(0, len(texts), 500):
        for encoding in tokenizer.encode_batch(list(texts[start : start + 500])):
            parts.append(np.array([*encoding.ids, END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(parts), sum(len(t.encode()) for t in texts)


def build(folder: Path, chat_bytes: int, tokenizer_share: float, seed: int = 3) -> None:
    """Read docs.jsonl; write tokenizer.json, tokens.u16.xz and tokens.json into `folder`."""
    documents = corpus.load(folder)
    by_split = {
        s: [d for d in documents if d.split == s] for s in (corpus.TRAIN, corpus.RESERVED, corpus.HELD_OUT)
    }
    chats = mining.mine_chats(by_split[corpus.TRAIN], chat_bytes)
    chats_held_out = mining.mine_chats(by_split[corpus.HELD_OUT], chat_bytes // 20)
    rng = random.Random(seed)
    sample = [d.text for d in by_split[corpus.TRAIN] if rng.random() < tokenizer_share]
    sample += [re.sub(r"<\|im_\w+\|>", "", c) for c in chats[:2000]]
    tokenizer = train_tokenizer(sample)
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = {
        "train": [d.text for d in by_split[corpus.TRAIN]],
        "reserved": [d.text for d in by_split[corpus.RESERVED]],
        "chat": chats,
        "heldout": [d.text for d in by_split[corpus.HELD_OUT]],
        "chat_heldout": chats_held_out,
    }
    encoded = {name: encode(tokenizer, texts[name]) for name in SPLITS}
    save_streams(folder, {n: e[0] for n, e in encoded.items()}, {n: e[1] for n, e in encoded.items()})
    for name in SPLITS:
        ids, size = encoded[name]
        print(f"{name}: {len(ids) / 1e6:.3f} M tokens, {size / max(1, len(ids)):.3f} bytes/token", flush=True)


def save_streams(folder: Path, streams: dict[str, np.ndarray], num_bytes: dict[str, int]) -> None:
    """Write the streams one after another, compressed, with their lengths beside them."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 0, "lp": 1, "pb": 1}]
    raw = np.concatenate([streams[n] for n in streams]).astype("<u2").tobytes()
    (folder / "tokens.u16.xz").write_bytes(lzma.compress(raw, format=lzma.FORMAT_XZ, filters=filters))
    meta = {"lengths": {n: len(s) for n, s in streams.items()}, "num_bytes": num_bytes}
    (folder / "tokens.json").write_text(json.dumps(meta, indent=1) + "\n")


def load_streams(folder: Path) -> TokenStreams:
    """Read what `save_streams` wrote."""
    meta = json.loads((folder / "tokens.json").read_text())
    flat = np.frombuffer(lzma.decompress((folder / "tokens.u16.xz").read_bytes()), dtype="<u2")
    streams, start = {}, 0
    for name, length in meta["lengths"].items():
        streams[name] = flat[start : start + length]
        start += length
    return TokenStreams(streams, meta["num_bytes"])


def bytes_per_id(tokenizer_file: Path) -> np.ndarray:
    """How many bytes of text each id stands for (0 for the specials)."""
    table = np.zeros(VOCAB_SIZE, np.int64)
    for piece, index in json.loads(tokenizer_file.read_text())["model"]["vocab"].items():
        table[index] = 0 if piece in SPECIALS else len(piece)
    return table
