"""The shipped demo pair: a small target and its drafts, found by name instead of by path."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent

# What `--model-path` and `--speculative-draft-model-path` accept in place of a folder.
DEMO_MODELS: dict[str, Path] = {
    "demo": _HERE / "target",
    "demo-dflash2": _HERE / "dflash2",
    "demo-dspark": _HERE / "dspark",
}
# The 64 held-out prompts (id, source, licence, text, token_ids) on which acceptance is measured.
DEMO_PROMPTS: Path = _HERE / "prompts.json"
