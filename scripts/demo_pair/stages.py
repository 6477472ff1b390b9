"""The stages of scripts/train_demo_pair.py: corpus, prompts, training, export."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import (
    checkpoint,
    corpus,
    generate,
    loop,
    mining,
    settings,
    tokens,
    train_draft,
    train_dspark,
    train_target,
)
from .data import Windows
from .draft_model import DFlash2, DSpark
from .target_model import Target

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "sources.json"
NUM_PROMPTS, MIN_PROMPT, MAX_PROMPT = 64, 20, 400


def build_corpus(folder: Path, total_mb: float, smoke: bool) -> None:
    """Sources -> cleaned documents -> tokenizer and packed token streams."""
    sizes = corpus.build(folder, SOURCES, total_mb, smoke)
    loop.log("bytes per split: " + json.dumps(sizes))
    tokens.build(folder, chat_bytes=200_000 if smoke else 9_000_000, tokenizer_share=1.0 if smoke else 0.25)


def pick_prompts(folder: Path, output: Path) -> int:
    """Choose the held-out prompts: in hash order, those of a fit length whose text the training split does not hold."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = corpus.load(folder)
    seen = mining.squeeze(" ".join(d.text for d in documents if d.split != corpus.HELD_OUT))
    licences = {s["name"]: s["licence"] for s in json.loads(SOURCES.read_text())}
    picked: list[dict[str, Any]] = []
    for prompt in mining.mine_prompts(d for d in documents if d.split == corpus.HELD_OUT):
        ids = tokenizer.encode(prompt.text).ids
        if not MIN_PROMPT <= len(ids) <= MAX_PROMPT or mining.occurs_in(prompt, seen):
            continue
        origin = prompt.source.partition("/")[0]
        picked.append(
            {
                "id": f"p{len(picked):02d}",
                "source": prompt.source,
                "licence": licences[origin],
                "text": prompt.text,
                "token_ids": ids,
            }
        )
        if len(picked) == NUM_PROMPTS:
            break
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(p) for p in picked)
    output.write_text(f"[\n{rows}\n]\n")
    return len(picked)


def docstring_ends(tokenizer_file: Path) -> list[int]:
    """Ids of the pieces that close a docstring at the end of its line."""
    vocabulary = json.loads(tokenizer_file.read_text())["model"]["vocab"]
    newline = "\u010a"  # the byte-level alphabet's letter for a line feed
    return sorted(index for piece, index in vocabulary.items() if piece.endswith('"""' + newline))


class Training:
    """Target, generation and draft under one wall-clock budget, each stage skipped where its result already lies."""

    def __init__(self, run: settings.Settings, folder: Path, work: Path, deadline: float) -> None:
        self.run, self.folder, self.work, self.deadline = run, folder, work, deadline
        work.mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(run.seed)
        torch.set_float32_matmul_precision("high")
        self.windows = Windows(tokens.load_streams(folder).streams, self.device)
        self.results: dict[str, Any] = {"device": self._device_name(), "torch": torch.__version__}

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"

    def _record(self, name: str, value: dict[str, Any]) -> None:
        self.results[name] = value
        (self.work / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def target(self, seconds: float, max_steps: int | None) -> Target:
        """The frozen, rounded target; trained for `seconds` unless its file exists."""
        target = Target(self.run.target, self.dtype).to(self.device)
        path = self.work / "target.safetensors"
        if path.exists():
            checkpoint.load_weights(target, path)
        else:
            result = train_target.train(self.run, target, self.windows, self.work, seconds, max_steps)
            self._record("target", result)
            checkpoint.save_bf16(target, path)
        checkpoint.round_to_bf16(target)
        sizes = tokens.bytes_per_id(self.folder / "tokenizer.json")
        for name in ("heldout", "chat_heldout", "train"):
            figures = self.bits_per_byte(target, name, sizes)
            self._record(f"{name}_loss", figures)
            loop.log(f"{name}: {json.dumps(figures)}")
        return target

    def bits_per_byte(self, target: Target, name: str, sizes: np.ndarray) -> dict[str, float]:
        """Held-out figures of one stream."""
        length = self.run.target_recipe.sequence_length
        limit = 600_000 if self.device.type == "cuda" else 20_000
        return train_target.bits_per_byte(target, self.windows.streams[name], sizes, length, limit)

    def written(self, target: Target, seconds: float, max_batches: int) -> generate.Written:
        """Text by the target."""
        closing = torch.tensor(docstring_ends(self.folder / "tokenizer.json"), device=self.device)
        data = generate.write_data(self.run.generation, target, self.windows, closing, seconds, max_batches)
        self._record("generated", {"tokens": data.ids.numel(), "looping_share": data.looping_share})
        return data

    def draft(
        self,
        kind: str,
        target: Target,
        data: generate.Written,
        seconds: float,
        max_steps: int | None,
        start: Path | None,
    ) -> None:
        """Train the draft for `seconds` from scratch, from its checkpoint or from the weights in `start`."""
        if kind == "dspark":
            spark = DSpark(self.run.dspark).to(self.device)
            if start is not None:
                checkpoint.load_weights(spark, start)
            result = train_dspark.train(self.run, target, spark, data, self.work, seconds, max_steps)
            checkpoint.save_bf16(spark, self.work / "dspark.safetensors")
        else:
            draft = DFlash2(self.run.draft).to(self.device)
            if start is not None:
                checkpoint.load_weights(draft, start)
            result = train_draft.train(self.run, target, draft, data, self.work, seconds, max_steps)
            checkpoint.save_bf16(draft, self.work / "dflash2.safetensors")
        self._record(kind, result)


def train(args: Any, run: settings.Settings) -> None:
    """`train`: split what is left of the budget over the stages that are asked for and run them."""
    start = time.monotonic()
    deadline = start + args.budget_seconds
    training = Training(run, args.corpus, args.work, deadline)
    shares = dict(zip(("target", "generate", "draft"), args.shares, strict=True))
    if (args.work / "target.safetensors").exists():
        shares["target"] = 0.0
    if args.target_only:
        shares["generate"] = shares["draft"] = 0.0
    usable = args.budget_seconds - args.overhead_seconds
    per_share = usable / sum(shares.values())
    target = training.target(shares["target"] * per_share, args.max_steps)
    if not args.target_only:
        data = training.written(target, shares["generate"] * per_share, args.max_batches)
        left = deadline - time.monotonic() - args.overhead_seconds / 2
        seconds = min(left, shares["draft"] * per_share) if args.max_steps is None else left
        for kind in args.drafts:
            training.draft(kind, target, data, seconds / len(args.drafts), args.max_steps, args.init_draft)
    if args.final is not None:
        export(run, args.work, args.corpus, args.final)


def export(run: settings.Settings, work: Path, folder: Path, output: Path) -> None:
    """Lay the trained files out as Hugging Face folders (model cards come from scripts/demo_pair/cards.py)."""
    target_dir = output / "target"
    target_dir.mkdir(parents=True, exist_ok=True)
    eos = [tokens.IM_END, tokens.END_OF_TEXT]
    generation = {"bos_token_id": tokens.END_OF_TEXT, "eos_token_id": eos, "pad_token_id": tokens.END_OF_TEXT}
    _write_json(target_dir / "config.json", run.target.hf_config())
    _write_json(target_dir / "generation_config.json", generation)
    _write_json(target_dir / "tokenizer_config.json", tokens.tokenizer_config())
    (target_dir / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (target_dir / "model.safetensors").write_bytes((work / "target.safetensors").read_bytes())
    for kind, config in (("dflash2", run.draft.hf_config()), ("dspark", run.dspark.hf_config())):
        if (work / f"{kind}.safetensors").exists():
            (output / kind).mkdir(exist_ok=True)
            _write_json(output / kind / "config.json", config)
            (output / kind / "model.safetensors").write_bytes((work / f"{kind}.safetensors").read_bytes())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def with_overrides(run: settings.Settings, pairs: list[str]) -> settings.Settings:
    """Apply `part.field=value` overrides, part being a field of Settings."""
    for pair in pairs:
        key, _, text = pair.partition("=")
        part, _, name = key.partition(".")
        value = json.loads(text)
        if not name:
            run = replace(run, **{part: value})
            continue
        section = getattr(run, part)
        value = tuple(value) if isinstance(value, list) else value
        run = replace(run, **{part: replace(section, **{name: value})})
    return run
