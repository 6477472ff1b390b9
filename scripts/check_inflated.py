#!/usr/bin/env python3
"""Check that a widened pair is accepted like the shipped one, block by block, and never emits an extra token.

    python scripts/inflate_checkpoint.py --geometry qwen3-8b --out inflated
    python scripts/check_inflated.py --models inflated --out check.json

The shipped pair continues held-out prompts; blocks spread over what it wrote are then drafted and verified by both
pairs with the same noise, at temperature 0 and at 1. Fails (exit status 1) where acceptance lengths differ by more than
5 %, or a token outside of the shipped vocabulary has a logit of -100 or more anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).resolve().parent)]

from flashspark.demo import DEMO_MODELS, DEMO_PROMPTS  # noqa: E402
from flashspark.engine.loader import load_target  # noqa: E402
from inflation.paired import (  # noqa: E402
    TEMPERATURES,
    Comparison,
    ExtraLogits,
    Pair,
    accepted_lengths,
    block_positions,
    continued,
    stop_ids,
)

DRAFTS = ("dflash2", "dspark")
TOLERANCE = 0.05
LARGEST_EXTRA = -100.0
NUM_STEPS = 16  # in which the shipped pair continues each prompt
MAX_PROMPT = 512  # tokens kept of a prompt


def say(begin: float, message: str) -> None:
    """A line with the time that has passed."""
    print(f"[{time.monotonic() - begin:6.1f} s] {message}", flush=True)


def check(
    models: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "bfloat16",
    small_device: torch.device | str = "cpu",
    small_dtype: str = "float32",
    num_blocks: int = 512,
    num_prompts: int = 64,
    drafts: Sequence[str] = DRAFTS,
) -> list[dict[str, Any]]:
    """One record per draft and temperature: a `Comparison`, its ratio, the largest extra logits, and `problems`."""
    begin = time.monotonic()
    prompts = [p["token_ids"][:MAX_PROMPT] for p in json.loads(DEMO_PROMPTS.read_text())][:num_prompts]
    per_text = math.ceil(num_blocks / len(prompts))
    small_target = load_target(DEMO_MODELS["demo"], small_dtype, small_device)
    wide_target = load_target(models / "target", dtype, device)
    vocab_size = small_target.config.vocab_size
    say(begin, f"loaded {models / 'target'}: {wide_target.config.vocab_size} tokens, {dtype}, {device}")
    records: list[dict[str, Any]] = []
    max_len = max(map(len, prompts)) + NUM_STEPS * 8
    for kind in drafts:
        small = Pair(small_target, DEMO_MODELS[f"demo-{kind}"], len(prompts), max_len)
        if kind == drafts[0]:
            texts = continued(small, prompts, NUM_STEPS, stop_ids(DEMO_MODELS["demo"]))
            positions = block_positions(texts, list(map(len, prompts)), per_text)
        expected = accepted_lengths(small, texts, positions)
        say(begin, f"{kind}: {positions.numel()} blocks by the shipped pair, {small_dtype}, {small_device}")
        head = wide_target.logits
        wide = Pair(wide_target, models / kind, len(prompts), max_len)
        extra = ExtraLogits(wide.worker, vocab_size)
        got = accepted_lengths(wide, texts, positions)
        wide_target.logits = head  # type: ignore[method-assign]
        wide.release()
        say(begin, f"{kind}: the same blocks by the wide pair")
        for temperature in TEMPERATURES:
            compared = Comparison.of(expected[temperature], got[temperature])
            record = {"draft": kind, "temperature": temperature, **dataclasses.asdict(compared)}
            record |= {"ratio": compared.ratio, "largest_extra_logit": dict(extra.largest)}
            records.append(record | {"problems": problems(compared, extra.largest)})
    return records


def problems(compared: Comparison, largest_extra: dict[str, float]) -> list[str]:
    """What is wrong, in words."""
    found = []
    if not abs(compared.ratio - 1) <= TOLERANCE:
        found.append(f"acceptance {compared.wide:.3f} is not within 5 % of {compared.small:.3f}")
    for model, logit in largest_extra.items():
        if logit == -math.inf:
            found.append(f"no extra logit of the {model} was seen")
        elif not logit < LARGEST_EXTRA:
            found.append(f"an extra token has logit {logit:.1f} in the {model}")
    return found


def table(records: list[dict[str, Any]]) -> str:
    """The records, one line each."""
    lines = [
        f"{'draft':<9}{'T':>3}{'blocks':>8}{'shipped':>9}{'wide':>8}{'ratio':>9}{'± s.e.':>8}{'differ':>8}"
        f"{'extra: target':>15}{'draft':>9}"
    ]
    for r in records:
        extra = r["largest_extra_logit"]
        lines.append(
            f"{r['draft']:<9}{r['temperature']:>3.0f}{r['blocks']:>8}{r['small']:>9.3f}{r['wide']:>8.3f}"
            f"{r['ratio']:>9.4f}{r['standard_error']:>8.4f}{r['differing']:>8}"
            f"{extra['target']:>15.1f}{extra['draft']:>9.1f}  {'; '.join(r['problems']) or 'ok'}"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=Path, required=True, help="folder with target/, dflash2/ and dspark/"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the wide pair")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--small-device", choices=("cpu", "cuda"), default="cpu", help="of the shipped pair")
    parser.add_argument("--small-dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--blocks", type=int, default=512, help="by draft and temperature, at least")
    parser.add_argument(
        "--prompts", type=int, default=64, help="held-out prompts that the blocks are spread over"
    )
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=DRAFTS)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    """Check, print a table, write; exit status 1 where something is wrong."""
    args = parse_args()
    begin = time.monotonic()
    records = check(
        args.models,
        device=args.device,
        dtype=args.dtype,
        small_device=args.small_device,
        small_dtype=args.small_dtype,
        num_blocks=args.blocks,
        num_prompts=args.prompts,
        drafts=args.drafts,
    )
    is_wrong = any(record["problems"] for record in records)
    seconds = round(time.monotonic() - begin, 1)
    print(f"\n{table(records)}\n{'FAILED' if is_wrong else 'passed'} in {seconds} s", flush=True)
    if args.out:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        report: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "device": device,
            "torch": torch.__version__,
        }
        report |= {"seconds": seconds, "passed": not is_wrong, "records": records}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
