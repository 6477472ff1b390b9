#!/usr/bin/env python3
"""Widen the shipped pair to the shape of a real model without changing what it computes. See docs/demo-pair.md.

    python scripts/inflate_checkpoint.py --geometry qwen3-8b --out inflated
    python scripts/check_inflated.py --models inflated

Writes OUT/target, OUT/dflash2 and OUT/dspark, ordinary Hugging Face folders whose steps cost what a model of that shape
costs and whose drafts are accepted as the small ones are. Text longer than the pair's context means nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).resolve().parent)]

from demo_pair import checkpoint, decode  # noqa: E402
from flashspark.demo import DEMO_MODELS, DEMO_PROMPTS  # noqa: E402
from inflation import folders  # noqa: E402
from inflation.geometry import GEOMETRIES, Geometry, Tiling, check_geometry, shown_taps  # noqa: E402
from inflation.models import HeadBias, Inflation, small_taps  # noqa: E402
from inflation.widening import Widener  # noqa: E402

DRAFTS = ("dflash2", "dspark")
SHIPPED = {"target": DEMO_MODELS["demo"], **{kind: DEMO_MODELS[f"demo-{kind}"] for kind in DRAFTS}}
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "sts.json")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def largest_rms(device: torch.device, num_prompts: int, max_new: int) -> dict[str, float]:
    """Root mean squares that the last hidden states of the three models reach on held-out prompts, sampled on."""
    prompts = [p["token_ids"] for p in json.loads(DEMO_PROMPTS.read_text())][:num_prompts]
    target = checkpoint.load_target(SHIPPED["target"], device)
    largest = dict.fromkeys(SHIPPED, 0.0)

    def watch(name: str, norm: nn.Module) -> None:
        def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            rms = float(arguments[0].float().square().mean(-1).max().sqrt())
            largest[name] = max(largest[name], rms)

        norm.register_forward_pre_hook(note)

    watch("target", target.model.norm)
    for kind in DRAFTS:
        draft = checkpoint.load_draft(SHIPPED[kind], target)
        watch(kind, draft.norm)
        decode.speculate(target, draft, prompts, 1.0, max_new)
    return largest


def reporting(tensors: Iterator[tuple[str, Tensor]], name: str) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, with a line every few seconds."""
    begin = shown = time.monotonic()
    num_bytes = 0
    for count, (tensor_name, tensor) in enumerate(tensors, 1):
        yield tensor_name, tensor
        num_bytes += tensor.nbytes
        if time.monotonic() - shown >= 5.0:
            shown = time.monotonic()
            print(f"{name}: {count} tensors, {num_bytes / 1e9:.1f} GB, {shown - begin:.0f} s", flush=True)


def inflate(
    geometry: Geometry,
    out: Path,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    num_prompts: int = 32,
    max_new: int = 16,
) -> dict[str, Any]:
    """Writes the three folders below `out`, which must not exist or be empty; returns what was done, as recorded."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: holds files already; remove them or choose another --out")
    device = torch.device(device)
    begin = time.monotonic()
    configs = {name: json.loads((path / "config.json").read_text()) for name, path in SHIPPED.items()}
    weights = {name: load_file(path / "model.safetensors") for name, path in SHIPPED.items()}
    small = configs["target"]
    for kind in DRAFTS:
        folders.check_draft(kind, configs[kind], small)
    check_geometry(geometry, small, configs["dflash2"]["dflash_config"]["conv_group_size"])
    for kind in DRAFTS:
        shown_taps(geometry, small_taps(configs[kind]))  # refuses before anything is written
    seen = largest_rms(device, num_prompts, max_new)
    tiling = Tiling(small["hidden_size"], geometry.hidden_size, small["rms_norm_eps"])
    bias = HeadBias.fit(tiling, seen)
    print(
        f"{tiling.num_tiles} tiles of {tiling.small} channels and {tiling.big - tiling.constant_channel} spare; "
        f"largest rms {', '.join(f'{name} {rms:.1f}' for name, rms in seen.items())}; head row {bias.row:.0f}; "
        f"{time.monotonic() - begin:.1f} s",
        flush=True,
    )
    inflation = Inflation(geometry, small, Widener(seed, dtype, device), bias)
    models = {}
    for name in SHIPPED:
        start = time.monotonic()
        if name == "target":
            config = folders.target_config(small, geometry, dtype)
            tensors = inflation.target(weights[name])
        else:
            config = folders.draft_config(configs[name], geometry, dtype)
            tensors = inflation.draft(name, weights[name], configs[name])
        num_parameters, num_bytes = folders.write_folder(out / name, config, reporting(tensors, name))
        for file in COPIED:
            if (SHIPPED[name] / file).exists():
                shutil.copy(SHIPPED[name] / file, out / name / file)
        seconds = round(time.monotonic() - start, 1)
        models[name] = {"parameters": num_parameters, "bytes": num_bytes, "seconds": seconds}
        print(f"{name}: {num_bytes / 1e9:.2f} GB in {seconds} s", flush=True)
    record = {
        "geometry": dataclasses.asdict(geometry),
        "seed": seed,
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "tiling": {"tiles": tiling.num_tiles, "rho": tiling.rho, "constant": tiling.constant},
        "largest_rms": seen,
        "head_row": bias.row,
        "gains": bias.gains,
        "models": models,
        "seconds": round(time.monotonic() - begin, 1),
    }
    (out / "inflation.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="qwen3-8b")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="another size")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, dflash2/ and dspark/")
    parser.add_argument("--seed", type=int, default=0, help="of the noise; a GPU's differs from a CPU's")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def with_overrides(geometry: Geometry, overrides: list[str]) -> Geometry:
    """`geometry` with fields replaced as `--set` says. ValueError names one that does not exist."""
    values: dict[str, Any] = {}
    for entry in overrides:
        name, _, value = entry.partition("=")
        if name not in Geometry.__dataclass_fields__:
            raise ValueError(f"--set {entry}: choose one of {', '.join(Geometry.__dataclass_fields__)}")
        parsed = json.loads(value)
        values[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return dataclasses.replace(geometry, **values)


def main() -> None:
    """Make the folders, print a table."""
    args = parse_args()
    try:
        geometry = with_overrides(GEOMETRIES[args.geometry], args.set)
        record = inflate(geometry, args.out, seed=args.seed, device=args.device, dtype=DTYPES[args.dtype])
    except ValueError as error:
        sys.exit(f"inflate_checkpoint: {error}")
    print(f"\n{'model':<10}{'parameters':>15}{'GB':>8}{'s':>8}")
    for name, model in record["models"].items():
        print(f"{name:<10}{model['parameters']:>15,}{model['bytes'] / 1e9:>8.2f}{model['seconds']:>8.1f}")
    print(
        f"{args.geometry} at {args.out}, {record['dtype']}, {record['device']}: {record['seconds']} s in all"
    )


if __name__ == "__main__":
    main()
