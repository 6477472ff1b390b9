"""The draft that a peer's figures were made with: a DFlash of the first kind, in the shape of a DFlash2 folder.

    python benchmark/peer_draft.py PAIR/dflash2 OUT

Writes OUT/config.json and no weights: run it with `--speculative-draft-load-format dummy` and a simulated acceptance,
where what it drafts does not matter. A DFlash2 has convolutions and a selector besides, and takes longer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DFLASH2_ONLY = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config` of a DFlash2 without what makes it one."""
    inner = {name: value for name, value in config["dflash_config"].items() if name not in DFLASH2_ONLY}
    return {**config, "architectures": ["DFlashDraftModel"], "dflash_config": inner}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dflash2", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    config = plain_config(json.loads((options.dflash2 / "config.json").read_text()))
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
