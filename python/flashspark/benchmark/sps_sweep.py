"""The sweep over cells: load the server with one batch, watch its records, take the batch away again."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

from .live_server import LiveServer, ProfileError, ServerFacts
from .sps_rounds import (
    NUM_WARM_UP_STEPS,
    Cell,
    ProfileFiles,
    Round,
    SteadySteps,
    check_steady,
    make_round,
    select_steady,
)

PIN = "dspark_force_budget_frac"
CLEAR = "dspark_clear_info_records"
WARM_UP_BATCH = 8
SLACK_TOKENS = 64
SHORTEST_STEP_SECONDS = 0.02  # how many tokens a request needs to last through the round
LOAD_END_SECONDS = 60.0
_CLEANUP_TRIES = 5


@dataclass(frozen=True)
class SweepSettings:
    """How long to look at each cell, and with what load."""

    input_len: int = 16
    temperature: float = 1.0
    min_steady_steps: int = 32
    min_steady_seconds: float = 10.0
    round_timeout_s: float = 300.0
    ramp_token_slack: int = 0
    poll_seconds: float = 2.0
    seed: int = 42

    @property
    def max_new_tokens(self) -> int:
        """Tokens that outlast a round, at one per step."""
        steps = max(self.min_steady_steps, -int(-self.min_steady_seconds // SHORTEST_STEP_SECONDS))
        return NUM_WARM_UP_STEPS + steps + SLACK_TOKENS + self.ramp_token_slack


def default_batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then ever coarser, with `largest` itself."""
    sizes = [
        1,
        2,
        4,
        *range(8, 64, 8),
        *range(64, 128, 16),
        *range(128, 256, 32),
        *range(256, largest + 1, 64),
    ]
    return sorted({*(size for size in sizes if size <= largest), largest})


def plan_cells(
    facts: ServerFacts,
    settings: SweepSettings,
    batch_sizes: Sequence[int],
    fracs: Sequence[float] | None,
    repeats: int,
) -> tuple[list[Cell], list[str]]:
    """The cells that fit the server, and a line on each batch size that does not or is missing.

    Raises:
        ProfileError: none fits, or a size is beyond what the server has fixed shapes for.
    """
    tokens = settings.input_len + settings.max_new_tokens
    if facts.context_length is not None and tokens > facts.context_length:
        raise ProfileError(
            f"a request takes {tokens} tokens, the context length is {facts.context_length}: lower "
            "--min-steady-seconds, --min-steady-steps or --input-len"
        )
    if max(batch_sizes) > facts.max_batch_size:
        raise ProfileError(
            f"batch {max(batch_sizes)} is beyond the server's largest fixed shape, {facts.max_batch_size}: lower "
            "--batch-size, or restart the server with a larger --max-running-requests"
        )
    fitting, skipped = [], []
    for size in sorted(set(batch_sizes)):
        if facts.running_cap is not None and size > facts.running_cap:
            skipped.append(f"batch {size} skipped: the server runs {facts.running_cap} requests at once")
        elif facts.token_capacity is not None and size * tokens > facts.token_capacity:
            needs = f"needs {size * tokens} tokens, the pool has {facts.token_capacity}"
            skipped.append(f"batch {size} skipped: it {needs} (--max-total-tokens, or shorter rounds)")
        else:
            fitting.append(size)
    if not fitting:
        raise ProfileError("no batch size fits the server:\n" + "\n".join(skipped))
    shapes: dict[tuple[int, int], Cell] = {}
    for size in fitting:
        for frac in [None] if fracs is None else sorted(set(fracs)):
            cell = Cell(0, size, frac)
            shapes.setdefault(
                (size, cell.num_tokens(facts.width)), cell
            )  # two fractions may ask for the same rows
    if facts.running_cap is not None and fitting[-1] < facts.running_cap:
        skipped.append(
            f"warning: the server runs up to {facts.running_cap} requests, the sweep ends at {fitting[-1]}; a table "
            "prices larger batches like its last"
        )
    cells = [Cell(repeat, c.batch_size, c.frac) for repeat in range(repeats) for c in shapes.values()]
    return cells, skipped


class Progress:
    """One line that is written over on a terminal, one line per cell elsewhere."""

    def __init__(self, num_cells: int, stream: TextIO = sys.stderr) -> None:
        self._num_cells, self._stream = num_cells, stream
        self._num_done = 0
        self.start()

    def start(self) -> None:
        """The first cell that counts begins: what was before it says nothing about how long the rest takes."""
        self._started = time.monotonic()

    def cell(self, cell: Cell, steady: SteadySteps | None) -> None:
        """The cell under way."""
        if self._stream.isatty():
            steps = f"{steady.num_aligned} steps" if steady else "loading"
            self._write(f"\r\x1b[K{self._bar()} {cell}: {steps}{self._eta()}")

    def done(self, cell: Cell, measured: Round) -> None:
        """A cell is measured."""
        self._num_done += 1
        start, end = ("\r\x1b[K", "") if self._stream.isatty() else ("", "\n")
        text = f"{cell}: {measured.num_rows} rows, {1e3 / measured.steps_per_sec:.2f} ms a step"
        self._write(f"{start}{self._bar()} {text}{self._eta()}{end}")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._write(("\r\x1b[K" if self._stream.isatty() else "") + text + "\n")

    def _bar(self) -> str:
        filled = 20 * self._num_done // max(self._num_cells, 1)
        return f"[{'#' * filled}{'.' * (20 - filled)}] {self._num_done}/{self._num_cells}"

    def _eta(self) -> str:
        if self._num_done == 0:
            return ""
        seconds = (time.monotonic() - self._started) / self._num_done * (self._num_cells - self._num_done)
        return f", {int(seconds) // 60}:{int(seconds) % 60:02d} to go"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Load(threading.Thread):
    """One batch in flight; its end, good or bad, is looked at by the sweep.

    Wait for `ended`, not with `join`: before Python 3.13 an interrupted join takes a running thread for a dead one.
    """

    def __init__(self, server: LiveServer, prompts: list[list[int]], settings: SweepSettings) -> None:
        super().__init__(daemon=True)
        self._server, self._prompts, self._settings = server, prompts, settings
        self.error: Exception | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._server.generate(self._prompts, self._settings.temperature, self._settings.max_new_tokens)
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()


class Sweep:
    """Measures cells one after the other. The server is left as it was found, however this ends."""

    def __init__(
        self,
        server: LiveServer,
        facts: ServerFacts,
        settings: SweepSettings,
        files: ProfileFiles,
        progress: Progress,
    ) -> None:
        self._server, self._facts, self._settings = server, facts, settings
        self._files, self._progress = files, progress
        self._random = random.Random(settings.seed)
        self._load: Load | None = None
        self._pinned = False

    def run(self, cells: Sequence[Cell]) -> list[Round]:
        """All cells, each written to the files as soon as it is measured. SIGTERM counts as Ctrl-C."""
        self._files.start()
        with _terminate_as_interrupt():
            try:
                warm_up = min(WARM_UP_BATCH, max(cell.batch_size for cell in cells))
                self._measure(Cell(0, warm_up, None if cells[0].frac is None else 1.0), min_seconds=0.0)
                self._progress.start()
                rounds = []
                for cell in cells:
                    steady, load_info = self._measure(cell, self._settings.min_steady_seconds)
                    measured = make_round(steady, cell, self._facts.width, load_info)
                    self._files.append(measured, cell, steady)
                    self._progress.done(cell, measured)
                    rounds.append(measured)
                return rounds
            finally:
                with _uninterrupted():
                    self._clean_up()

    def _measure(self, cell: Cell, min_seconds: float) -> tuple[SteadySteps, dict[str, Any]]:
        self._progress.cell(cell, None)
        if cell.frac is not None:
            self._pin(cell.frac)
        self._server.flush()
        self._server.set_state(CLEAR, True)  # keeps polls small; a server that cannot is polled in full
        after = max((r["forward_ct"] for rank in self._records() for r in rank), default=0)
        started = time.monotonic()
        self._load = Load(
            self._server, self._prompts(cell.batch_size * self._facts.num_ranks), self._settings
        )
        self._load.start()
        steady = self._watch(cell, after, started, min_seconds)
        self._end_load()
        for warning in check_steady(steady, cell, self._facts.width, self._settings.min_steady_steps):
            self._progress.note(f"warning: {warning}")
        load_info = {
            "input_len": self._settings.input_len,
            "max_new_tokens": self._settings.max_new_tokens,
            "temperature": self._settings.temperature,
            "seconds": round(time.monotonic() - started, 3),
        }
        return steady, load_info

    def _watch(self, cell: Cell, after: int, started: float, min_seconds: float) -> SteadySteps:
        """Polls until there are enough steps, the load has ended, or time is up."""
        settings, first_seen = self._settings, None
        assert self._load is not None
        while True:
            ended = self._load.ended.wait(settings.poll_seconds)
            if ended and self._load.error is not None:
                raise self._load.error
            steady = select_steady(self._records(), cell.batch_size, after)
            self._progress.cell(cell, steady)
            now = time.monotonic()
            if first_seen is None and steady.num_aligned:
                first_seen = now
            enough = steady.num_aligned >= NUM_WARM_UP_STEPS + settings.min_steady_steps
            long_enough = first_seen is not None and now - first_seen >= min_seconds
            if (enough and long_enough) or ended or now - started > settings.round_timeout_s:
                return steady

    def _records(self) -> list[list[dict[str, Any]]]:
        """Every rank's records. A poll that a long step kept waiting is made again."""
        for _ in range(10):
            states = self._server.info().get("internal_states") or []
            feeds = [state.get("dspark_info_record") for state in states]
            if feeds and all(feeds):
                return [feed["records"] for feed in feeds]
            time.sleep(self._settings.poll_seconds)
        raise ProfileError("/server_info shows no records any more: look at the server's log")

    def _prompts(self, num_prompts: int) -> list[list[int]]:
        """Random ids, away from the ends of the vocabulary where special tokens are."""
        margin = min(1000, self._facts.vocab_size // 4)
        ids = range(margin, self._facts.vocab_size - margin)
        return [self._random.choices(ids, k=self._settings.input_len) for _ in range(num_prompts)]

    def _pin(self, frac: float) -> None:
        self._pinned = True  # before the call: it may take effect even if its answer does not arrive
        if not self._server.set_state(PIN, frac):
            raise ProfileError(
                f"the server refuses to pin the fraction {frac:g}; its log says why (it must be idle, and in mode "
                "compact or cap-accept)"
            )

    def _end_load(self) -> None:
        if self._load is None:
            return
        if not self._load.ended.is_set():
            self._server.abort_all()
        if not self._load.ended.wait(LOAD_END_SECONDS):
            raise ProfileError(f"the load did not end within {LOAD_END_SECONDS:g} s of its abort")
        self._load = None

    def _clean_up(self) -> None:
        """Takes load and pin away. Says what to do by hand where the server does not answer."""
        if self._load is not None and not self._load.ended.is_set():
            try:
                self._server.abort_all()
            except ProfileError as error:
                self._progress.note(f"the load could not be aborted: {error}")
        if not self._pinned:
            return
        reason = "refused"
        for attempt in range(_CLEANUP_TRIES):
            try:
                if self._server.set_state(PIN, None):
                    self._pinned = False
                    return
            except (ProfileError, ValueError) as error:
                reason = str(error)
            time.sleep(0.2 * 2**attempt)
        body = f'{{"server_args":{{"{PIN}":null}}}}'
        self._progress.note(
            f"the budget is still pinned ({reason}); clear it before serving:\n  curl -X POST "
            f"{self._server.base_url}/set_internal_state -H 'Content-Type: application/json' -d '{body}'"
        )


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that cleaning up happens too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handler(signal.SIGTERM, interrupt):
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not stop the cleaning up, which is short."""
    with _handler(signal.SIGINT, signal.SIG_IGN), _handler(signal.SIGTERM, signal.SIG_IGN):
        yield


@contextmanager
def _handler(number: signal.Signals, handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
