#!/usr/bin/env python3
"""Build the demo pair: corpus, tokenizer, target, DFlash2 and DSpark drafts. See docs/demo-pair.md.

python scripts/train_demo_pair.py corpus     # once; needs a package index
python scripts/train_demo_pair.py prompts    # once; the 64 held-out prompts
python scripts/train_demo_pair.py train      # on a GPU; may be stopped and started again
python scripts/train_demo_pair.py export     # into the package; benchmark/demo_acceptance.py measures, then
python scripts/train_demo_pair.py cards      # fills the model cards from the recorded figures
python scripts/train_demo_pair.py --smoke all # everything, tiny, on a CPU, in a few minutes
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_pair import cards, settings, stages  # noqa: E402

SHIPPED = ROOT / "python" / "flashspark" / "demo"


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("corpus", "prompts", "train", "export", "cards", "all"))
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes, standard library only, a few steps"
    )
    parser.add_argument(
        "--corpus", type=Path, help="folder of the corpus (default .pair, with --smoke .pair/smoke)"
    )
    parser.add_argument(
        "--work", type=Path, help="folder of checkpoints and results (default: corpus folder/run)"
    )
    parser.add_argument(
        "--final", type=Path, help="folder that export fills (default: the package's demo folder)"
    )
    parser.add_argument("--corpus-mb", type=float, default=500.0, help="stop collecting text at this size")
    parser.add_argument("--budget-seconds", type=float, default=800.0, help="wall clock of one `train` call")
    parser.add_argument(
        "--overhead-seconds", type=float, default=40.0, help="part of it kept for loading and compiling"
    )
    parser.add_argument(
        "--shares", type=float, nargs=3, default=(0.34, 0.08, 0.58), metavar=("TARGET", "TEXT", "DRAFT")
    )
    parser.add_argument(
        "--drafts",
        nargs="+",
        choices=("dflash2", "dspark"),
        default=("dflash2", "dspark"),
        help="which drafts to train; they share the time and the text",
    )
    parser.add_argument("--target-only", action="store_true", help="train the target and stop")
    parser.add_argument("--init-draft", type=Path, help="safetensors to start the one draft from")
    parser.add_argument("--max-steps", type=int, help="end each training phase after this many steps")
    parser.add_argument("--max-batches", type=int, default=64, help="most batches of text the target writes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PART.FIELD=JSON", help="override a setting"
    )
    args = parser.parse_args()
    args.corpus = args.corpus or ROOT / ".pair" / ("smoke" if args.smoke else "")
    args.work = args.work or args.corpus / "run"
    if args.init_draft and len(args.drafts) > 1:
        parser.error("--init-draft needs one --drafts")
    if args.smoke:
        args.max_steps, args.max_batches = args.max_steps or 60, 2
        args.final = args.final or args.corpus / "final"
    return args


def main() -> None:
    """Run the command."""
    args = parse_args()
    run = stages.with_overrides(settings.smoke() if args.smoke else settings.Settings(), args.set)
    if args.command in ("corpus", "all"):
        stages.build_corpus(args.corpus, args.corpus_mb, args.smoke)
    if args.command == "prompts":
        print(stages.pick_prompts(args.corpus, (args.final or SHIPPED) / "prompts.json"), "prompts")
    if args.command in ("train", "all"):
        stages.train(args, run)
    if args.command == "export":
        stages.export(run, args.work, args.corpus, args.final or SHIPPED)
    if args.command == "cards":
        cards.write_cards(args.final or SHIPPED, ROOT / "benchmark" / "results", stages.SOURCES)


if __name__ == "__main__":
    main()
