#!/usr/bin/env python3
"""Measure the shipped demo pair: bits per byte of the target, acceptance of a draft at temperature 0 and 1.

    python benchmark/demo_acceptance.py --out benchmark/results/demo_acceptance.json
    python benchmark/demo_acceptance.py --draft dspark --ablation --out benchmark/results/demo_dspark.json

The decoder is scripts/demo_pair/decode.py, independent of the engine. Acceptance length is emitted tokens per verify
step, the bonus token included, over the 64 prompts of python/flashspark/demo/prompts.json. A request ends at a stop
token, at --max-new tokens, or when a period of at most 32 tokens has been repeated 4 times (at both temperatures).
"Without loops" leaves out, besides, every step that reaches beyond the first occurrence of that period.

Bits per byte are measured on held-out files of the running interpreter's standard library, which anyone has, and, where
`scripts/train_demo_pair.py corpus` has been run, on all held-out files of the corpus.

For DSpark the confidence head is measured instead: how well it ranks, and the calibration error of its survival without
and with the temperatures (STS) in the draft's folder. `--fit-sts` fits those first, at temperature 0, on other prompts
from held-out files; it needs the corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]

from demo_pair import calibration, checkpoint, corpus, decode, sources, tokens, train_target  # noqa: E402
from flashspark.benchmark import sts_fit  # noqa: E402
from flashspark.speculative.calibration import StsCalibration  # noqa: E402

DEMO = ROOT / "python" / "flashspark" / "demo"


def loop_start(ids: list[int]) -> int:
    """Index behind the first occurrence of the period in which `ids` end; len(ids) where they end in no loop."""
    if decode.loop_end(ids) != len(ids):
        return len(ids)
    for period in range(1, decode.MAX_PERIOD + 1):
        span = period * decode.MIN_REPEATS
        tail = ids[-span:]
        if len(tail) == span and tail[:-period] == tail[period:]:
            return len(ids) - span + period
    return len(ids)


def without_loops(traces: list[decode.Trace]) -> float:
    """Acceptance length over the steps that end before a loop's second round."""
    kept = steps = 0
    for trace in traces:
        end = loop_start(trace.ids) if trace.finish == "loop" else len(trace.ids)
        place = 0
        for count in trace.kept:
            place += count
            if place > end:
                break
            kept, steps = kept + count, steps + 1
    return kept / max(1, steps)


def standard_error(traces: list[decode.Trace]) -> float:
    """Standard error of the ratio tokens / steps, requests being the independent units."""
    steps = torch.tensor([float(len(t.kept)) for t in traces])
    kept = torch.tensor([float(sum(t.kept)) for t in traces])
    ratio = kept.sum() / steps.sum()
    return float((kept - ratio * steps).square().sum().sqrt() / steps.sum())


def summarise(traces: list[decode.Trace], num_drafted: int) -> dict[str, Any]:
    """Acceptance figures of one run over the prompts."""
    steps = sum(len(t.kept) for t in traces)
    kept = sum(sum(t.kept) for t in traces)
    counts = [a for t in traces for a in t.accepted]
    reached = [sum(1 for a in counts if a >= k) for k in range(num_drafted + 1)]
    finishes = {name: sum(1 for t in traces if t.finish == name) for name in ("stop", "length", "loop")}
    return {
        "acceptance_length": round(kept / steps, 4),
        "standard_error": round(standard_error(traces), 4),
        "acceptance_length_without_loops": round(without_loops(traces), 4),
        "verify_steps": steps,
        "tokens": kept,
        "finish": finishes,
        "unconditional": [round(n / steps, 4) for n in reached[1:]],
        "conditional": [round(n / max(1, m), 4) for m, n in itertools.pairwise(reached)],
    }


def library_stream(tokenizer_file: Path) -> torch.Tensor:
    """Held-out files of the running interpreter's standard library, cleaned as for training, as ids."""
    from tokenizers import Tokenizer

    texts = []
    for path, raw in sources.iter_library_files():
        document = corpus.Document("cpython", path, raw)
        if document.split == corpus.HELD_OUT and (text := corpus.clean(raw)) is not None:
            texts.append(text)
    ids, _ = tokens.encode(Tokenizer.from_file(str(tokenizer_file)), texts)
    return torch.from_numpy(ids.astype("int64"))


def measure_bits(args: argparse.Namespace, target: Any, device: torch.device) -> dict[str, Any]:
    """Bits per byte on the standard library's held-out files and, if built, on the corpus' held-out files."""
    tokenizer_file = args.demo / "target" / "tokenizer.json"
    sizes = tokens.bytes_per_id(tokenizer_file)
    figures: dict[str, Any] = {}
    streams = {"standard_library": library_stream(tokenizer_file)}
    if (args.corpus / "tokens.json").exists() and not args.quick:
        packed = tokens.load_streams(args.corpus).streams
        streams["corpus"] = torch.from_numpy(packed["heldout"].astype("int64"))
    for name, stream in streams.items():
        limit = 20_000 if args.quick else args.bits_tokens
        measured = train_target.bits_per_byte(
            target, stream.to(device), sizes, tokens.MODEL_MAX_LENGTH, limit, 8
        )
        measured.pop("seconds")
        figures[name] = {k: round(v, 4) for k, v in measured.items()}
    return figures


def describe_machine(device: torch.device, commit: str | None) -> dict[str, Any]:
    """What ran the script."""
    if commit is None:
        git = ["git", "-C", str(ROOT), "rev-parse", "--verify", "HEAD"]
        found = subprocess.run(git, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() if found.returncode == 0 else "unknown"
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    return {
        "machine": f"{name}, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
    }


def command_line() -> str:
    """This call, without what only says where the figures go."""
    words = ["python", "benchmark/demo_acceptance.py", *sys.argv[1:]]
    hidden = {i + skip for i, word in enumerate(words) if word in ("--out", "--commit") for skip in (0, 1)}
    return " ".join(word for i, word in enumerate(words) if i not in hidden)


def fit_sts(target: Any, draft: Any, folder: Path, measured: list[list[int]], max_new: int) -> StsCalibration:
    """Temperatures fitted on greedy decoding from other prompts than the `measured` ones."""
    prompts = calibration.fit_prompts(folder, measured)
    traces = decode.speculate(target, draft, prompts, 0.0, max_new)
    dataset = f"{len(prompts)} windows of held-out files ending in a docstring, temperature 0"
    return sts_fit.fit(*calibration.records(traces), dataset)


def digests(demo: Path, draft: str) -> dict[str, str]:
    """SHA-256 of the weights that were measured."""
    files = {name: demo / name / "model.safetensors" for name in ("target", draft)}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--demo", type=Path, default=DEMO, help="folder with target/, the drafts and prompts.json"
    )
    parser.add_argument("--draft", choices=("dflash2", "dspark"), default="dflash2")
    parser.add_argument("--prompts", type=Path, help="another file of prompts")
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / ".pair", help="folder of the built corpus, if any"
    )
    parser.add_argument("--commit", help="the commit to record, where there is no repository to ask")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument(
        "--bits-tokens", type=int, default=200_000, help="at most this many held-out tokens per stream"
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs at temperature 1")
    parser.add_argument("--ablation", action="store_true", help="also without the selector or Markov head")
    parser.add_argument("--quick", action="store_true", help="8 prompts, 64 tokens: does it run at all")
    parser.add_argument(
        "--fit-sts", action="store_true", help="DSpark: first write the draft folder's sts.json"
    )
    parser.add_argument("--records", type=Path, help="DSpark: save raw confidences and prefix masks (torch)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    device = torch.device(args.device)
    target = checkpoint.load_target(args.demo / "target", device)
    draft = checkpoint.load_draft(args.demo / args.draft, target)
    prompts = [p["token_ids"] for p in json.loads((args.prompts or args.demo / "prompts.json").read_text())]
    prompts, max_new = (prompts[:8], 64) if args.quick else (prompts, args.max_new)
    is_dspark = args.draft == "dspark"
    num_drafted = draft.shape.block_size - (not is_dspark)
    begin = time.monotonic()
    results: dict[str, Any] = {
        "command": command_line(),
        **describe_machine(device, args.commit),
        "max_new": max_new,
    }
    results["sha256"] = digests(args.demo, args.draft)
    if not is_dspark:
        results["bits_per_byte"] = measure_bits(args, target, device)
        print(json.dumps(results["bits_per_byte"]), flush=True)
    sts = [1.0] * num_drafted
    if is_dspark:
        file = args.demo / "dspark" / "sts.json"
        if args.fit_sts:
            file.write_text(fit_sts(target, draft, args.corpus, prompts, max_new).to_json())
        sts = json.loads(file.read_text())["temperatures"] if file.exists() else sts
    runs = [("temperature_0", 0.0, [0], True), ("temperature_1", 1.0, list(range(args.seeds)), True)]
    if args.ablation:
        bare = "no_markov" if is_dspark else "no_selector"
        runs += [(f"temperature_0_{bare}", 0.0, [0], False), (f"temperature_1_{bare}", 1.0, [0], False)]
    measured: dict[str, list[decode.Trace]] = {}
    for name, temperature, seeds, selector in runs:
        traces: list[decode.Trace] = []
        for seed in seeds:
            traces += decode.speculate(target, draft, prompts, temperature, max_new, seed, selector)
        results[name] = {"seeds": seeds, **summarise(traces, num_drafted)}
        if is_dspark and selector:
            measured[name] = traces
            head = calibration.records(traces)
            results[name]["confidence"] = calibration.ranking(*head) | calibration.check(*head, sts)
        print(name, json.dumps(results[name]), flush=True)
    if args.records:
        torch.save({name: calibration.records(traces) for name, traces in measured.items()}, args.records)
    results["seconds"] = math.ceil(time.monotonic() - begin)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
