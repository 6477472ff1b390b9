"""What a profile consists of: cells to measure, the steady steps of each, and the files they are kept in."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .live_server import ProfileError

NUM_WARM_UP_STEPS = 8
LEAST_MATCH_FRACTION = 0.5
GOOD_MATCH_FRACTION = 0.9


@dataclass(frozen=True)
class Cell:
    """One shape of step to hold for a while."""

    repeat: int
    batch_size: int  # requests per rank
    frac: float | None  # of all drafts that are verified; None: static, all

    def num_tokens(self, width: int) -> int:
        """Rows that the requests ask for, M."""
        gamma = width - 1
        budget = gamma * self.batch_size if self.frac is None else int(self.frac * self.batch_size * gamma)
        return self.batch_size + budget

    def __str__(self) -> str:
        frac = "" if self.frac is None else f", fraction {self.frac:g}"
        return f"batch {self.batch_size}{frac}"


@dataclass(frozen=True)
class SteadyStep:
    """A step of the full batch, as every rank saw it."""

    forward_ct: int
    num_verify_tokens: tuple[int, ...]
    step_cpu_ms: tuple[float, ...]


@dataclass(frozen=True)
class SteadySteps:
    """The steps of a cell that count."""

    num_aligned: int  # with warm-up, and with steps whose time is unknown
    match_fraction: float  # of the steps from the first to the last aligned one
    steps: tuple[SteadyStep, ...]  # after warm-up, timed

    @property
    def seconds(self) -> float:
        """Median over steps of the mean over ranks."""
        return statistics.median(statistics.fmean(step.step_cpu_ms) for step in self.steps) / 1e3


@dataclass(frozen=True)
class Round:
    """One measured cell: a line of the rounds file."""

    repeat: int
    batch_size: int  # over all ranks
    batch_size_per_rank: int
    frac: float | None
    batch_tokens: int  # rows asked for, per rank
    steps_per_sec: float
    num_steady_steps: int
    match_fraction: float
    per_rank_median_step_time: list[float]  # seconds
    load_info: dict[str, Any]
    num_tokens_run: int | None = None  # rows that really ran, padding included; None in another tool's files

    @property
    def num_rows(self) -> int:
        """The rows to charge the time to."""
        return self.batch_tokens if self.num_tokens_run is None else self.num_tokens_run


def select_steady(ranks: Sequence[Sequence[dict[str, Any]]], batch_size: int, after: int) -> SteadySteps:
    """Picks the steps since `after` in which every rank ran exactly `batch_size` requests."""
    by_step = [{int(r["forward_ct"]): r for r in records if r["forward_ct"] > after} for records in ranks]
    common = sorted(set.intersection(*(set(records) for records in by_step)))
    if not common:
        if not any(by_step):
            return SteadySteps(0, 0.0, ())
        raise ProfileError("the ranks' records have no step in common: are they of one server?")
    aligned = [
        step
        for step in common
        if all(records[step].get("num_running_reqs") == batch_size for records in by_step)
    ]
    if not aligned:
        return SteadySteps(0, 0.0, ())
    window = [step for step in common if aligned[0] <= step <= aligned[-1]]
    steps = [
        SteadyStep(
            forward_ct=step,
            num_verify_tokens=tuple(int(records[step]["num_verify_tokens"]) for records in by_step),
            step_cpu_ms=tuple(float(records[step]["step_cpu_ms"]) for records in by_step),
        )
        for step in aligned[NUM_WARM_UP_STEPS:]
        if all(records[step].get("step_cpu_ms") is not None for records in by_step)
    ]
    return SteadySteps(len(aligned), len(aligned) / len(window), tuple(steps))


def check_steady(steady: SteadySteps, cell: Cell, width: int, min_steps: int) -> list[str]:
    """Warnings about a cell's steps.

    Raises:
        ProfileError: they are not what was asked for.
    """
    needed = NUM_WARM_UP_STEPS + min_steps
    if steady.num_aligned < needed or not steady.steps:
        raise ProfileError(
            f"{cell}: {steady.num_aligned} steps with the whole batch, {needed} are needed; is the server idle "
            "otherwise, and does the batch fit its pool? Raise --round-timeout or --ramp-token-slack, or lower "
            "--min-steady-steps or the batch size"
        )
    if steady.match_fraction < LEAST_MATCH_FRACTION:
        raise ProfileError(
            f"{cell}: only {steady.match_fraction:.0%} of the steps ran the whole batch; is somebody else using the "
            "server, or is its pool too small for the batch?"
        )
    tiers = {tokens for step in steady.steps for tokens in step.num_verify_tokens}
    asked = cell.num_tokens(width)
    if min(tiers) < asked:
        raise ProfileError(
            f"{cell}: a step ran {min(tiers)} rows, {asked} were asked for"
            + (": the pin had no effect" if cell.frac is not None else "")
        )
    if cell.frac is not None and len(tiers) > 1:
        raise ProfileError(f"{cell}: steps ran on several tiers, {sorted(tiers)} rows: the pin had no effect")
    if steady.match_fraction < GOOD_MATCH_FRACTION:
        return [f"{cell}: {steady.match_fraction:.0%} of the steps ran the whole batch"]
    return []


def make_round(steady: SteadySteps, cell: Cell, width: int, load_info: dict[str, Any]) -> Round:
    """The line of a measured cell."""
    columns = list(zip(*(step.step_cpu_ms for step in steady.steps), strict=True))
    return Round(
        repeat=cell.repeat,
        batch_size=cell.batch_size * len(columns),
        batch_size_per_rank=cell.batch_size,
        frac=cell.frac,
        batch_tokens=cell.num_tokens(width),
        steps_per_sec=1.0 / steady.seconds,
        num_steady_steps=len(steady.steps),
        match_fraction=steady.match_fraction,
        per_rank_median_step_time=[statistics.median(column) / 1e3 for column in columns],
        load_info=load_info,
        num_tokens_run=max(max(step.num_verify_tokens) for step in steady.steps),
    )


@dataclass(frozen=True)
class ProfileFiles:
    """Where a profile lies, all beside the table."""

    table: Path

    def _beside(self, ending: str) -> Path:
        return self.table.with_name(self.table.name.removesuffix(".json") + ending)

    @property
    def rounds(self) -> Path:
        """One line per measured cell: what `fit` reads."""
        return self._beside(".rounds.jsonl")

    @property
    def records(self) -> Path:
        """One line per steady step."""
        return self._beside(".records.jsonl")

    @property
    def plot(self) -> Path:
        """The picture of the fit."""
        return self._beside(".plot.png")

    @property
    def manifest(self) -> Path:
        """What was measured, where and how."""
        return self.table.with_name(self.table.name + ".manifest.json")

    def start(self) -> None:
        """Empties the files of a run, so that a table never mixes two servers."""
        try:
            self.table.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.rounds, self.records):
                path.write_text("")
        except OSError as error:
            raise ProfileError(f"--out {self.table}: {error}") from error

    def append(self, measured: Round, cell: Cell, steady: SteadySteps) -> None:
        """Writes a cell at once: what is measured stays measured when the next one fails."""
        _append(self.rounds, [asdict(measured)])
        _append(self.records, [{**asdict(cell), **asdict(step)} for step in steady.steps])

    def load_rounds(self) -> list[Round]:
        """The rounds of a run.

        Raises:
            ProfileError: there are none, or the file is not one of rounds.
        """
        try:
            lines = [line for line in self.rounds.read_text(encoding="utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise ProfileError(f"{self.rounds}: {error}; `run` with the same --out writes it") from error
        known = {field.name for field in fields(Round)}
        rounds = []
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                rounds.append(Round(**{name: values[name] for name in known & values.keys()}))
            except (ValueError, TypeError, AttributeError) as error:
                raise ProfileError(f"{self.rounds}, line {number}: {error}") from error
        if not rounds:
            raise ProfileError(f"{self.rounds} has no cell: let `run` finish at least some")
        return rounds


def _append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
