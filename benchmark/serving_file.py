"""The points of a serving table, and the file that they are kept in from one run of `gpu_serving.py` to the next."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engines import Engine
from servers import provenance
from serving_report import name_of


@dataclass(frozen=True)
class Point:
    """A workload at one load."""

    prompts: str
    temperature: float
    concurrency: int

    @property
    def workload(self) -> tuple[str, float]:
        """Prompts and temperature."""
        return self.prompts, self.temperature

    def __str__(self) -> str:
        return name_of(vars(self))


def workload_of(text: str) -> tuple[str, float]:
    """`W1:0`: prompts and temperature."""
    name, _, temperature = text.partition(":")
    return name, float(temperature)


def described(info: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of an engine's description."""
    names = (
        *("max_running_requests", "max_total_num_tokens", "dtype", "device", "attention_backend"),
        *("speculative_cost_table_json", "speculative_num_draft_tokens"),
    )
    return {name: info[name] for name in names if name in info}


class Results:
    """The file of a table: measured points, in order, and what they were measured with."""

    _RUN = ("out", "resume", "breakdown", "budget_seconds", "concurrency", "max_running_requests", "commit")

    def __init__(self, options: argparse.Namespace) -> None:
        source = provenance()
        source["commit"] = options.commit or source["commit"]
        source["machine"] |= _accelerator()
        settings = {name: value for name, value in vars(options).items() if name not in self._RUN}
        self.path: Path = options.out
        self.content: dict[str, Any] = {**source, "settings": settings, "points": [], "engines": []}
        if options.resume and self.path.exists():
            old = json.loads(self.path.read_text())
            for name in ("commit", "settings"):
                if old[name] != json.loads(json.dumps(self.content[name])):
                    raise SystemExit(
                        f"--resume: {self.path} was measured with another {name}: {old[name]}, now "
                        f"{self.content[name]}; give another --out, or leave out --resume"
                    )
            self.content = old

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All that is measured."""
        rows: list[dict[str, Any]] = self.content["points"]
        return rows

    def lacks(self, point: Point) -> bool:
        """Whether `point` has still to be measured."""
        return all(
            Point(row["prompts"], row["temperature"], row["concurrency"]) != point for row in self.rows
        )

    def describe(self, engine: Engine, seconds: float) -> None:
        """Adds the engine that the next points are measured with."""
        self.content["engines"].append(
            {"command": self.content["command"], "start_seconds": seconds, **described(engine.info)}
        )

    def add(self, row: Mapping[str, Any], seconds: float) -> None:
        """A point is through: into the file with it."""
        engine = len(self.content["engines"]) - 1
        rows = [*self.rows, {**_rounded(row), "seconds": round(seconds, 1), "engine": engine}]
        self.content["points"] = sorted(
            rows, key=lambda row: (row["prompts"], row["temperature"], row["concurrency"])
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def _accelerator() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"torch": torch.__version__}
    return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
