"""The same blocks, drafted and verified by two pairs: same contexts, same noise, one step of the engine each."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashspark.attention.registry import make_backend
from flashspark.engine.loader import load_draft
from flashspark.engine.model_runner import ModelRunner, PrefillChunk
from flashspark.engine.request_rows import RequestRows
from flashspark.models.qwen3 import Qwen3
from flashspark.speculative.drafter import make_drafter
from flashspark.speculative.sampling import RowSampling, SamplingRows
from flashspark.speculative.types import StepBatch
from flashspark.speculative.worker import SpeculativeWorker

PAGE_SIZE = 16
PREFILL_TEXTS = 16  # prompts of one prefill
TEMPERATURES = (0.0, 1.0)
FIRST_POSITION = 8  # no block starts earlier in its text


class ExtraLogits:
    """The largest logit, of any row, that each model gave to a token past the first `vocab_size`."""

    def __init__(self, worker: SpeculativeWorker, vocab_size: int) -> None:
        self.largest = {"target": -math.inf, "draft": -math.inf}
        self._vocab_size, self._seen = vocab_size, 0
        target, drafter = worker.runner.target, worker.drafter
        assert drafter is not None
        head, propose = target.logits, drafter.propose
        drafted: list[Tensor] = []
        is_drafting = False

        def logits(hidden: Tensor, out: Tensor | None = None) -> Tensor:
            out = head(hidden, out)
            if is_drafting:
                drafted.append(out)
            self._note("draft" if is_drafting else "target", out)
            return out

        def note_and_propose(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_drafting
            is_drafting = True
            block = propose(*args, **kwargs)
            is_drafting = False
            for out in drafted:  # once more: DSpark's walk has corrected them in place
                self._note("draft", out)
            drafted.clear()
            return block

        target.logits, drafter.propose = logits, note_and_propose  # type: ignore[method-assign]

    def _note(self, model: str, logits: Tensor) -> None:
        extra = logits[..., self._vocab_size :]
        if extra.numel():
            self.largest[model] = max(self.largest[model], float(extra.max()))


class Pair:
    """A target and a draft over `num_texts` texts, each with a request row per temperature over the same pages."""

    def __init__(self, target: Qwen3, draft_folder: Path, num_texts: int, max_len: int) -> None:
        """`max_len`: of a text, everything that is generated included."""
        device = target.device
        draft = load_draft(draft_folder, target)
        self.num_texts, self.max_len, self.device = num_texts, max_len, device
        num_pages = -(-(max_len + draft.config.verify_width) // PAGE_SIZE)
        rows = RequestRows(len(TEMPERATURES) * num_texts, num_pages, PAGE_SIZE, device)
        for row in range(len(TEMPERATURES) * num_texts):
            first = 1 + row % num_texts * num_pages
            rows.set_pages(row, range(first, first + num_pages))
        backend = make_backend("auto", device.type)
        num_slots = (1 + num_texts * num_pages) * PAGE_SIZE
        runner = ModelRunner(target, draft, rows, num_slots, backend, backend)
        sampling = SamplingRows(len(TEMPERATURES) * num_texts, target.config.vocab_size, device)
        self.worker = SpeculativeWorker(runner, sampling, make_drafter(runner))

    def start(self, texts: Sequence[Sequence[int]]) -> None:
        """K/V of all texts but of their last tokens, and the noise from its beginning."""
        for row in range(len(TEMPERATURES) * self.num_texts):
            params = RowSampling(seed=row, temperature=TEMPERATURES[row // self.num_texts])
            self.worker.sampling.assign(row, params, (), (), 0)
        for start in range(0, self.num_texts, PREFILL_TEXTS):
            part = enumerate(texts[start : start + PREFILL_TEXTS], start)
            self.worker.prefill([PrefillChunk(row, 0, text[:-1]) for row, text in part])

    def step(self, temperature: float, context_lens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """One block per text after `context_lens` [N] tokens: what it emits, int64 [N, W], and how much of it, [N]."""
        first = TEMPERATURES.index(temperature) * self.num_texts
        row_list = list(range(first, first + self.num_texts))
        rows = torch.tensor(row_list, device=self.device)
        request_rows = self.worker.runner.request_rows
        request_rows.context_lens[rows] = context_lens.to(self.device)
        request_rows.anchors[rows] = anchors.to(self.device)
        caps = [self.worker.width] * self.num_texts
        batch = StepBatch(rows, row_list, torch.tensor(caps, device=self.device), caps)
        accepted = self.worker.decode(batch)
        if not bool(accepted.is_finite.all()):
            raise ValueError(f"logits that are no numbers, temperature {temperature}")
        return accepted.tokens.cpu(), accepted.num_tokens.cpu()

    def release(self) -> None:
        """Frees the pools and the draft; the target stays."""
        runner = self.worker.runner
        runner.target_pool, runner.draft_pool, runner.draft = None, None, None  # type: ignore[assignment]


def continued(
    pair: Pair, prompts: Sequence[Sequence[int]], num_steps: int, stop_ids: set[int]
) -> list[list[int]]:
    """`prompts` with what `pair` samples after them in `num_steps` steps, each cut before its first stop token."""
    pair.start(prompts)
    texts = [list(prompt) for prompt in prompts]
    for _ in range(num_steps):
        lens = torch.tensor([len(text) - 1 for text in texts])
        tokens, counts = pair.step(1.0, lens, torch.tensor([text[-1] for text in texts]))
        for text, new, count in zip(texts, tokens.tolist(), counts.tolist(), strict=True):
            text += new[:count]
    ended = []
    for prompt, text in zip(prompts, texts, strict=True):
        at = (i for i in range(len(prompt), len(text)) if text[i] in stop_ids)
        ended.append(text[: next(at, len(text))])
    return ended


def block_positions(texts: Sequence[Sequence[int]], prompt_lens: Sequence[int], per_text: int) -> Tensor:
    """int64 [per_text, N], descending: contexts' lengths, spread over what follows each prompt, and as far into the
    prompt as it takes to have `per_text` different ones."""
    columns = []
    for text, prompt_len in zip(texts, prompt_lens, strict=True):
        last = len(text) - 1
        first = min(prompt_len - 1, last + 1 - per_text)
        if first < FIRST_POSITION:
            raise ValueError(f"a text of {len(text)} tokens is too short for {per_text} blocks")
        columns.append(torch.linspace(last, first, per_text).round().long())
    return torch.stack(columns, dim=1)


def accepted_lengths(pair: Pair, texts: Sequence[Sequence[int]], positions: Tensor) -> dict[float, Tensor]:
    """Emitted tokens of every block, int64 [per_text, N] by temperature.

    Blocks of a text run from the last to the first: a step writes K/V behind its context alone, so the contexts of
    those to come stay what prefill made them.
    """
    pair.start(texts)
    counts: dict[float, list[Tensor]] = {temperature: [] for temperature in TEMPERATURES}
    for lens in positions:
        anchors = torch.tensor([text[at] for text, at in zip(texts, lens.tolist(), strict=True)])
        for temperature in TEMPERATURES:
            counts[temperature].append(pair.step(temperature, lens, anchors)[1])
    return {temperature: torch.stack(parts) for temperature, parts in counts.items()}


@dataclass(frozen=True)
class Comparison:
    """Acceptance of the same blocks by both pairs."""

    blocks: int
    small: float  # acceptance length
    wide: float
    differing: int  # blocks of another length
    standard_error: float  # of `ratio`, blocks being the units

    @property
    def ratio(self) -> float:
        return self.wide / self.small

    @classmethod
    def of(cls, small: Tensor, wide: Tensor) -> Comparison:
        """From the emitted tokens of each block."""
        a, b = small.flatten().double(), wide.flatten().double()
        ratio = b.mean() / a.mean()
        error = float((b - ratio * a).square().sum().sqrt() / a.sum())
        return cls(len(a), float(a.mean()), float(b.mean()), int((a != b).sum()), error)


def stop_ids(folder: Path) -> set[int]:
    """End-of-sequence ids of a target's config.json."""
    ids = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return set(ids if isinstance(ids, list) else [ids])
