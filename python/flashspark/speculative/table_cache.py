"""Measured tables on disk, each under the fingerprint of everything that step times depend on."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flashspark import envs

from .cost_table import PlainStepCosts, SpsAdditiveCostTable

logger = logging.getLogger(__name__)

Fingerprint = dict[str, str | int]
FORMAT = 1  # of the file and of the way it is measured


class StoredTables(msgspec.Struct, frozen=True):
    """What a cache file holds."""

    format: int
    fingerprint: Fingerprint
    table: SpsAdditiveCostTable
    plain: PlainStepCosts | None
    worst_error: float  # relative, of the fit
    measured_seconds: float  # how long measuring took


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/flashspark/cost-tables`; ~/.cache where the variable is unset or relative."""
    base = Path(envs.XDG_CACHE_HOME.get())
    return (base if base.is_absolute() else Path.home() / ".cache") / "flashspark" / "cost-tables"


class TableCache:
    """One folder of tables. Never fails: what cannot be read is measured again, what cannot be written is lost."""

    def __init__(self, folder: Path, fingerprint: Fingerprint, models: tuple[str, ...]) -> None:
        """`models` names the entries of the fingerprint that say what is served, for the messages."""
        self._folder, self._fingerprint = folder, fingerprint
        self._family = _digest({name: fingerprint[name] for name in models})
        self.path = folder / f"{self._family}-{_digest(fingerprint)}.json"

    def load(self) -> StoredTables | None:
        """The table that was measured under exactly this fingerprint; None, and a line why, if there is none."""
        if not self.path.exists():
            self._explain_absence()
            return None
        stored, problem = _read(self.path)
        if stored is not None:
            problem = _difference(stored.fingerprint, self._fingerprint)
        if problem is not None:
            logger.warning("cached cost table %s is not used, it %s; measuring again", self.path, problem)
            return None
        return stored

    def store(self, tables: StoredTables) -> None:
        """Writes the file in one go, so that a second server never reads half of it."""
        text = msgspec.json.format(msgspec.json.encode(tables))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self._folder, prefix=self.path.stem, suffix=".part")
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(text)
                os.replace(name, self.path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            logger.warning("the cost table is not cached, the next start measures again: %s", error)

    def _explain_absence(self) -> None:
        try:
            others = sorted(
                self._folder.glob(f"{self._family}-*.json"), key=lambda path: path.stat().st_mtime
            )
        except OSError:
            others = []
        if others:
            stored, problem = _read(others[-1])
            if stored is not None:
                problem = _difference(stored.fingerprint, self._fingerprint) or "has another file's name"
            logger.info("the newest cached cost table of these models is not used, it %s", problem)


def _digest(values: Mapping[str, str | int]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(values.items()))).hexdigest()[:12]


def _read(path: Path) -> tuple[StoredTables | None, str | None]:
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=StoredTables)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        return None, f"cannot be read ({error})"
    if stored.format != FORMAT:
        return None, f"has format {stored.format}, not {FORMAT}"
    return stored, None


def _difference(stored: Fingerprint, wanted: Fingerprint) -> str | None:
    names = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    if not names:
        return None
    changes = [f"{name} {stored.get(name, 'nothing')}, now {wanted.get(name, 'nothing')}" for name in names]
    return f"was measured for {'; '.join(changes)}"
