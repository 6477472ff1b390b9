#!/usr/bin/env python3
"""Choose the benchmarks' prompt sets W1 and W2 from the demo pair's held-out files (`benchmark/prompts`).

    python scripts/train_demo_pair.py corpus                # what prompts are cut from; 10 minutes
    python scripts/choose_prompts.py candidates             # 1 minute
    python scripts/choose_prompts.py measure --seconds 200  # again until it says that nothing is left; 25 minutes
    python scripts/choose_prompts.py choose

docs/demo-pair.md says what the sets are and how they were chosen (`demo_pair/prompt_sets.py`). Everything is drawn from
fixed seeds; greedy texts are written in float32 on one thread in batches of fixed members, so pieces do not matter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]

from demo_pair import prompt_sets  # noqa: E402


def candidates(folder: Path, work: Path) -> None:
    """Cuts the candidates of both splits out of the corpus."""
    found = prompt_sets.cut_candidates(folder)
    work.mkdir(parents=True, exist_ok=True)
    (work / "candidates.json").write_text(json.dumps(found))
    for split in prompt_sets.SPLITS:
        print(f"{split}: {sum(c['split'] == split for c in found)} candidates", flush=True)


def measure(work: Path, seconds: float, part: str) -> None:
    """Writes greedy texts for the batches that have none yet, for about so long.

    Args:
        part: `i/n`: only every n-th batch, from the i-th on.
    """
    which, _, parts = part.partition("/")
    batches = prompt_sets.batches(json.loads((work / "candidates.json").read_text()))
    mine = list(enumerate(batches))[int(which) - 1 :: int(parts)]
    missing = [(number, batch) for number, batch in mine if not batch_file(work, number).exists()]
    started = time.monotonic()
    for done, (number, batch) in enumerate(missing):
        elapsed = time.monotonic() - started
        if elapsed > seconds:
            print("there is more: run it again")
            return
        left = f"about {elapsed / done * (len(missing) - done):.0f} s left" if done else "of this part"
        print(f"batch {number + 1}, {done + 1} of {len(missing)}, {left}", flush=True)
        temporary = batch_file(work, number).with_suffix(".partial")
        temporary.write_text(json.dumps(prompt_sets.write_texts(batch)))
        temporary.replace(batch_file(work, number))
    print("nothing is left of this part")


def batch_file(work: Path, number: int) -> Path:
    """Where the greedy texts of a batch are kept."""
    return work / f"texts-{number:03d}.json"


def choose(work: Path, out: Path) -> None:
    """Chooses both sets and writes them."""
    measured = []
    for number, batch in enumerate(prompt_sets.batches(json.loads((work / "candidates.json").read_text()))):
        if not batch_file(work, number).exists():
            raise SystemExit(f"batch {number + 1} is not measured yet")
        texts = json.loads(batch_file(work, number).read_text())
        measured += [prompt_sets.Measured(c, steps) for c, steps in zip(batch, texts, strict=True)]
    for prompt_set in prompt_sets.choose(measured, prompt_sets.licences()):
        path = out / f"{prompt_set['name'].lower()}.json"
        prompt_sets.save(path, prompt_set)
        shown = {key: value for key, value in prompt_set.items() if key != "prompts"}
        print(f"{path}: {json.dumps(shown)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("candidates", "measure", "choose"))
    parser.add_argument("--corpus", type=Path, default=ROOT / ".pair", help="folder of the built corpus")
    parser.add_argument("--seconds", type=float, default=3600.0, help="measure: begin no batch after so long")
    parser.add_argument("--part", default="1/1", help="measure: 1/2 and 2/2 side by side, on two cores")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark" / "prompts")
    args = parser.parse_args()
    work = args.corpus / "prompts"
    if args.stage == "candidates":
        candidates(args.corpus, work)
    elif args.stage == "measure":
        measure(work, args.seconds, args.part)
    else:
        choose(work, args.out)


if __name__ == "__main__":
    main()
