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


def _acceptance(measured: dict[str, Any], bare: str) -> dict[str, Any]:
    """What both drafts' cards say about acceptance; `bare` names the runs without the head that walks the block."""
    figures: dict[str, Any] = {}
    for name, run in (("0", measured["temperature_0"]), ("1", measured["temperature_1"])):
        figures[f"len{name}"], figures[f"err{name}"] = run["acceptance_length"], run["standard_error"]
        figures[f"loop{name}"] = run["acceptance_length_without_loops"]
        figures[f"bare{name}"] = measured[f"temperature_{name}_{bare}"]["acceptance_length"]
        figures[f"fin{name}"] = " / ".join(str(run["finish"][f]) for f in ("stop", "length", "loop"))
        figures[f"steps{name}"] = run["verify_steps"]
        figures[f"unc{name}"] = " | ".join(f"{v:.3f}" for v in run["unconditional"])
        figures[f"con{name}"] = " | ".join(f"{v:.3f}" for v in run["conditional"])
    return figures


def _training(record: dict[str, Any], name: str) -> dict[str, Any]:
    training = record[name]
    return {
        "generated": training["generated"]["tokens"] / 1e6,
        "steps": training["steps"],
        "blocks": training["blocks"] / 1e6,
        "seconds": training["seconds"],
        "machine": record["machine"],
    }


def draft_card(folder: Path, measured: dict[str, Any], record: dict[str, Any]) -> str:
    """README.md of the DFlash2 draft."""
    config = json.loads((folder / "config.json").read_text())
    special = config["dflash_config"]
    return (
        (_TEMPLATES / "dflash2.md")
        .read_text()
        .format(
            parameters=_number_of_parameters(folder / "model.safetensors"),
            layers=config["num_hidden_layers"],
            taps=", ".join(map(str, special["target_layer_ids"])),
            rank=special["selector_rank"],
            top_k=special["selector_top_k"],
            **_training(record, "draft_B_shipped"),
            **_acceptance(measured, "no_selector"),
            **_provenance(measured),
        )
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def dspark_card(folder: Path, measured: dict[str, Any], record: dict[str, Any]) -> str:
    """README.md of the DSpark draft."""
    config = json.loads((folder / "config.json").read_text())
    sts = json.loads((folder / "sts.json").read_text())
    figures: dict[str, Any] = {}
    for name in ("0", "1"):
        head = measured[f"temperature_{name}"]["confidence"]
        rows = [
            ("bef", [*head["ece_before"], _mean(head["ece_before"])]),
            ("aft", [*head["ece_after"], _mean(head["ece_after"])]),
            ("auc", [*head["auc_by_position"], head["auc"]]),
        ]
        for key, values in rows:
            figures[f"{key}{name}"] = " | ".join(f"{v:.3f}" for v in values)
        figures[f"obs{name}"] = head["observed"]
        figures[f"exb{name}"], figures[f"exa{name}"] = head["expected_before"], head["expected_after"]
    return (
        (_TEMPLATES / "dspark.md")
        .read_text()
        .format(
            parameters=_number_of_parameters(folder / "model.safetensors"),
            gamma=config["block_size"],
            layers=config["num_hidden_layers"],
            taps=", ".join(map(str, config["target_layer_ids"])),
            rank=config["markov_rank"],
            sts=" | ".join(f"{t:.3f}" for t in sts["temperatures"]),
            sts_samples=sts["num_samples"],
            sts_dataset=sts["dataset"].partition(",")[0],
            note=f"{measured['note']} " if "note" in measured else "",
            **figures,
            **_training(record, "dspark_shipped"),
            **_acceptance(measured, "no_markov"),
            **_provenance(measured),
        )
    )


def write_cards(shipped: Path, results: Path, sources_file: Path) -> None:
    """Fill the cards from benchmark/results and the record of sources."""
    measured = json.loads((results / "demo_acceptance.json").read_text())
    record = json.loads((results / "demo_training.json").read_text())
    sources = json.loads(sources_file.read_text())
    (shipped / "target" / "README.md").write_text(target_card(shipped / "target", measured, record, sources))
    (shipped / "dflash2" / "README.md").write_text(draft_card(shipped / "dflash2", measured, record))
    spark = json.loads((results / "demo_dspark.json").read_text())
    (shipped / "dspark" / "README.md").write_text(dspark_card(shipped / "dspark", spark, record))
