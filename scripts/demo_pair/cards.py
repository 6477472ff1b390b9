"""Model cards of the shipped pair, filled from recorded figures only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TEMPLATES = Path(__file__).resolve().parent / "card_templates"


def _number_of_parameters(weights: Path) -> float:
    from safetensors import safe_open

    total = 0
    with safe_open(weights, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (a handle, not a dictionary)
            size = 1
            for extent in tensors.get_slice(name).get_shape():
                size *= extent
            total += size
    return total / 1e6


def _provenance(measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": measured["command"],
        "commit": measured["commit"][:12],
        "eval_machine": measured["machine"],
        "torch": measured["torch"],
        "python": measured["python"],
        "max_new": measured["max_new"],
    }


def target_card(
    folder: Path, measured: dict[str, Any], record: dict[str, Any], sources: list[dict[str, Any]]
) -> str:
    """README.md of the target."""
    bits, training = measured["bits_per_byte"], record["target"]
    return (
        (_TEMPLATES / "target.md")
        .read_text()
        .format(
            parameters=_number_of_parameters(folder / "model.safetensors"),
            layers=json.loads((folder / "config.json").read_text())["num_hidden_layers"],
            num_sources=len(sources),
            megabytes=sum(s["bytes_used"] for s in sources) / 1e6,
            steps=training["steps"],
            tokens=training["tokens"] / 1e6,
            seconds=training["seconds"],
            machine=record["machine"],
            corpus_bpb=bits["corpus"]["bits_per_byte"],
            corpus_tokens=bits["corpus"]["tokens"],
            library_bpb=bits["standard_library"]["bits_per_byte"],
            library_tokens=bits["standard_library"]["tokens"],
            **_provenance(measured),
        )
    )


def draft_card(folder: Path, measured: dict[str, Any], record: dict[str, Any]) -> str:
    """README.md of the DFlash2 draft."""
    config = json.loads((folder / "config.json").read_text())
    special, training = config["dflash_config"], record["draft_B_shipped"]
    figures: dict[str, Any] = {}
    for name, run in (("0", measured["temperature_0"]), ("1", measured["temperature_1"])):
        figures[f"len{name}"], figures[f"err{name}"] = run["acceptance_length"], run["standard_error"]
        figures[f"loop{name}"] = run["acceptance_length_without_loops"]
        figures[f"bare{name}"] = measured[f"temperature_{name}_no_selector"]["acceptance_length"]
        figures[f"fin{name}"] = " / ".join(str(run["finish"][f]) for f in ("stop", "length", "loop"))
        figures[f"steps{name}"] = run["verify_steps"]
        figures[f"unc{name}"] = " | ".join(f"{v:.3f}" for v in run["unconditional"])
        figures[f"con{name}"] = " | ".join(f"{v:.3f}" for v in run["conditional"])
    return (
        (_TEMPLATES / "dflash2.md")
        .read_text()
        .format(
            parameters=_number_of_parameters(folder / "model.safetensors"),
            layers=config["num_hidden_layers"],
            taps=", ".join(map(str, special["target_layer_ids"])),
            rank=special["selector_rank"],
            top_k=special["selector_top_k"],
            generated=training["generated"]["tokens"] / 1e6,
            steps=training["steps"],
            blocks=training["blocks"] / 1e6,
            seconds=training["seconds"],
            machine=record["machine"],
            **figures,
            **_provenance(measured),
        )
    )


def write_cards(shipped: Path, results: Path, sources_file: Path) -> None:
    """Fill both cards from benchmark/results and the record of sources."""
    measured = json.loads((results / "demo_acceptance.json").read_text())
    record = json.loads((results / "demo_training.json").read_text())
    sources = json.loads(sources_file.read_text())
    (shipped / "target" / "README.md").write_text(target_card(shipped / "target", measured, record, sources))
    (shipped / "dflash2" / "README.md").write_text(draft_card(shipped / "dflash2", measured, record))
