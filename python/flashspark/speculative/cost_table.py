"""What a step costs: tables of step times by shape, in SGLang's two JSON formats, and their slow correction.

A table answers one question, the seconds of a step with n requests and M packed rows. The planner asks it for every
budget at once, for the rows that *really run*: a step is padded up to a tier, so the tier is what is priced. SGLang
looks up the largest probe below M instead, which sells the rows of the next tier for the price of this one.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from .tiers import BucketTiers

logger = logging.getLogger(__name__)

RISE_WORTH_A_WARNING = 1.10  # more rows that run this much faster are a measuring error


class LookupRule(Enum):
    """Which probe prices a row count between two probes of a 1-D table."""

    FLOOR = "floor"  # the largest probe ≤ M, SGLang's rule
    PAD_UP = "pad-up"  # the smallest probe ≥ M: what runs if the probes are the tiers


class CostTable(Protocol):
    """Seconds of a step by its shape."""

    def step_seconds(
        self, num_reqs: int, num_tokens: NDArray[np.int64], rule: LookupRule = LookupRule.PAD_UP
    ) -> NDArray[np.float64]:
        """Seconds of steps with `num_reqs` requests and each of `num_tokens` packed rows."""

    @property
    def is_uninitialized(self) -> bool:
        """Whether the table says nothing about how cost depends on rows, so nothing can be trimmed by it."""


@dataclass(frozen=True)
class SpsCostTable:
    """The 1-D table: steps per second by packed rows (SGLang's `SpsCostTable`, same JSON bytes).

    `max_batch_tokens` is carried along and never used by the lookup, as in SGLang.
    """

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int

    def __post_init__(self) -> None:
        _check_axis(
            "sample_batch_tokens", self.sample_batch_tokens, "sample_steps_per_sec", self.sample_steps_per_sec
        )
        if self.sample_batch_tokens[0] < 1:
            raise ValueError(f"sample_batch_tokens must be at least 1, got {self.sample_batch_tokens[0]}")
        if min(self.sample_steps_per_sec) <= 0:
            raise ValueError(f"sample_steps_per_sec must be > 0, got {min(self.sample_steps_per_sec)}")
        if self.max_batch_tokens < self.sample_batch_tokens[-1]:
            raise ValueError(
                f"max_batch_tokens must be at least the last of sample_batch_tokens, "
                f"got {self.max_batch_tokens} < {self.sample_batch_tokens[-1]}"
            )
        _warn_of_rises("sample_steps_per_sec", self.sample_batch_tokens, self.sample_steps_per_sec)

    @classmethod
    def uninitialized(cls, max_batch_tokens: int) -> SpsCostTable:
        """The flat table that stands for "nothing measured"."""
        return cls((1,), (1.0,), max_batch_tokens)

    @property
    def is_uninitialized(self) -> bool:
        """A single probe is a flat table, whoever wrote it."""
        return len(self.sample_batch_tokens) <= 1

    def steps_per_sec(self, num_tokens: NDArray[np.int64], rule: LookupRule) -> NDArray[np.float64]:
        """Steps per second at each row count; the first and last probe hold outside the table."""
        if rule is LookupRule.FLOOR:
            index = np.maximum(self._probes.searchsorted(num_tokens, side="right") - 1, 0)
        else:
            index = np.minimum(self._probes.searchsorted(num_tokens, side="left"), len(self._probes) - 1)
        return self._rates[index]

    def step_seconds(
        self, num_reqs: int, num_tokens: NDArray[np.int64], rule: LookupRule = LookupRule.PAD_UP
    ) -> NDArray[np.float64]:
        """Seconds per step. The number of requests does not matter to this table."""
        return 1.0 / self.steps_per_sec(num_tokens, rule)

    def scaled(self, factor: float) -> SpsCostTable:
        """The table of a machine whose steps take `factor` times as long."""
        rates = tuple(rate / factor for rate in self.sample_steps_per_sec)
        return SpsCostTable(self.sample_batch_tokens, rates, self.max_batch_tokens)

    def to_json(self) -> str:
        """Byte for byte what SGLang writes."""
        return msgspec.json.encode(self).decode()

    @cached_property
    def _probes(self) -> NDArray[np.int64]:
        return np.array(self.sample_batch_tokens, dtype=np.int64)

    @cached_property
    def _rates(self) -> NDArray[np.float64]:
        return np.array(self.sample_steps_per_sec, dtype=np.float64)


@dataclass(frozen=True)
class SpsAdditiveCostTable:
    """The 2-D table: bias + alpha(requests) + theta(packed rows), in seconds (SGLang's, same JSON bytes).

    Both terms are linear between probes and constant outside them; an axis with one probe is a constant.
    """

    bias_seconds: float
    bs_probes: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[int, ...]
    theta_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("bs_probes", self.bs_probes, "alpha_seconds", self.alpha_seconds)
        _check_axis("m_probes", self.m_probes, "theta_seconds", self.theta_seconds)
        if not (math.isfinite(self.bias_seconds) and self.bias_seconds > 0):
            raise ValueError(f"bias_seconds must be > 0, got {self.bias_seconds}")
        least = self.bias_seconds + min(self.alpha_seconds)
        if least + min(self.theta_seconds) <= 0:
            raise ValueError(
                f"bias_seconds + alpha_seconds + theta_seconds must be > 0 everywhere, "
                f"got {least + min(self.theta_seconds)}"
            )
        rates = tuple(1.0 / (least + theta) for theta in self.theta_seconds)
        _warn_of_rises("theta_seconds, as steps per second,", self.m_probes, rates)

    @property
    def is_uninitialized(self) -> bool:
        """A 2-D table was measured by construction."""
        return False

    def step_seconds(
        self, num_reqs: int, num_tokens: NDArray[np.int64], rule: LookupRule = LookupRule.PAD_UP
    ) -> NDArray[np.float64]:
        """Seconds per step. There is no staircase in this form, so the rule does not matter."""
        requests, alpha, rows, theta = self._axes
        per_batch = self.bias_seconds + float(np.interp(num_reqs, requests, alpha))
        return per_batch + np.interp(num_tokens, rows, theta)

    def scaled(self, factor: float) -> SpsAdditiveCostTable:
        """The table of a machine whose steps take `factor` times as long."""
        return SpsAdditiveCostTable(
            self.bias_seconds * factor,
            self.bs_probes,
            tuple(alpha * factor for alpha in self.alpha_seconds),
            self.m_probes,
            tuple(theta * factor for theta in self.theta_seconds),
        )

    def to_json(self) -> str:
        """Byte for byte what SGLang writes."""
        return msgspec.json.encode(self).decode()

    @cached_property
    def _axes(self) -> tuple[NDArray[np.float64], ...]:
        axes = (self.bs_probes, self.alpha_seconds, self.m_probes, self.theta_seconds)
        return tuple(np.array(values, dtype=np.float64) for values in axes)


@dataclass(frozen=True)
class PlainStepCosts:
    """Seconds of a step without a draft, one row per request, by batch size; linear between probes.

    Neither JSON format has these: their times contain the draft. Without them no draft-free step is taken.
    """

    num_reqs_probes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("num_reqs_probes", self.num_reqs_probes, "seconds", self.seconds)
        if min(self.seconds) <= 0:
            raise ValueError(f"seconds must be > 0, got {min(self.seconds)}")

    def step_seconds(self, num_reqs: int) -> float:
        """Seconds of a draft-free step of `num_reqs` requests."""
        seconds = self._known.get(num_reqs)
        if seconds is None:
            seconds = self._known[num_reqs] = float(np.interp(num_reqs, self.num_reqs_probes, self.seconds))
        return seconds

    @cached_property
    def _known(self) -> dict[int, float]:
        """By batch size, of which there are few."""
        return {}


def parse_cost_table(text: str) -> SpsCostTable | SpsAdditiveCostTable:
    """Reads either format; the text `"bias_seconds"` tells them apart, unknown keys are passed over, as in SGLang.

    Raises:
        ValueError: names the key that is missing, of the wrong type, or against a rule.
    """
    if '"bias_seconds"' in text:
        return _decode(text, SpsAdditiveCostTable)
    return _decode(text, SpsCostTable)


def load_cost_table(path: str | Path) -> SpsCostTable | SpsAdditiveCostTable:
    """`parse_cost_table` of a file; the error names the file too."""
    try:
        return parse_cost_table(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cost table {path}: {error}") from error


class CostCorrection:
    """Measured step times pull a table's prices towards themselves, slowly and within bounds.

    log(measured / priced) is followed by a level that all shapes share plus a deviation per cell of row counts.
    The level cannot move an argmax (a constant factor never does), but it keeps a cell that was never visited from
    looking cheap only because the machine is slower today than on the day of the table. Deterministic in the
    sequence of `observe` calls: under tensor parallelism every rank passes rank 0's times. Owned by the planner.
    """

    def __init__(
        self,
        cell_tokens: NDArray[np.int64],
        *,
        enabled: bool = True,
        rate: float = 0.02,
        max_deviation: float = 2.0,
        max_level: float = 16.0,
        median_of: int = 1,
    ) -> None:
        """
        Args:
            cell_tokens: rising row counts; a cell reaches from above the one before up to each, like a tier.
            rate: share of the difference that one step may remove; the level learns twice as fast.
            max_deviation, max_level: factors that bound deviation and level, both ways.
            median_of: what is learned from is the median of a cell's latest so many times; those that it has not seen
                yet count as expected. From 3 on a single step moves nothing, which a high rate needs.
        """
        if not 0 < rate <= 0.25 or max_deviation < 1 or max_level < 1:
            raise ValueError(
                f"rate {rate}, max_deviation {max_deviation}, max_level {max_level} are out of range"
            )
        self.enabled, self.num_observations = enabled, 0
        self._cells = np.asarray(cell_tokens, dtype=np.int64)
        self._cell_list: list[int] = self._cells.tolist()
        self._rate = rate
        self._max_deviation, self._max_level = math.log(max_deviation), math.log(max_level)
        self._level = 0.0
        self._deviation = np.zeros(len(self._cells))
        self._latest = [deque[float](maxlen=median_of) for _ in self._cells]

    def observe(self, num_tokens: int, priced_seconds: float, measured_seconds: float) -> None:
        """Takes in one step: rows that ran, the table's own price (uncorrected), and what it took.

        A step that took unusually long (another process, a page fault) counts as at most `max_deviation` off.
        Times that are no times are passed over.
        """
        if not self.enabled or not (0 < priced_seconds < math.inf and 0 < measured_seconds < math.inf):
            return
        cell = self._cell(num_tokens)
        before = self._deviation.item(cell)
        expected, latest = self._level + before, self._latest[cell]
        latest.append(math.log(measured_seconds / priced_seconds))
        assert latest.maxlen is not None
        error = median((*latest, *[expected] * (latest.maxlen - len(latest)))) - expected
        error = min(max(error, -self._max_deviation), self._max_deviation)
        level = self._level + 2 * self._rate * error
        deviation = before + self._rate * error
        self._level = min(max(level, -self._max_level), self._max_level)
        self._deviation[cell] = min(max(deviation, -self._max_deviation), self._max_deviation)
        self.num_observations += 1

    def factors(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """What to multiply the table's seconds by at each row count; ones when switched off."""
        if not self.is_active:
            return np.ones(len(num_tokens))
        return self.factors_of(self.cells(num_tokens))

    def factor(self, num_tokens: int) -> float:
        """`factors` of one row count."""
        if not self.is_active:
            return 1.0
        return float(np.exp(self._level + self._deviation.item(self._cell(num_tokens))))

    @property
    def is_active(self) -> bool:
        """Whether it changes a price."""
        return self.enabled and self.num_observations > 0

    def cells(self, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The cells of these row counts; they never change."""
        return np.minimum(self._cells.searchsorted(num_tokens), len(self._cells) - 1)

    def factors_of(self, cells: NDArray[np.int64]) -> NDArray[np.float64]:
        """`factors` by cell, of a correction that is active."""
        factors: NDArray[np.float64] = np.exp(self._deviation.take(cells) + self._level)
        return factors

    def _cell(self, num_tokens: int) -> int:
        return min(bisect_left(self._cell_list, num_tokens), len(self._cell_list) - 1)


class BudgetPrices(msgspec.Struct, frozen=True):
    """What the step costs for every budget 0 … max_budget."""

    seconds: NDArray[np.float64]  # [max_budget + 1], corrected by measured times
    table_seconds: NDArray[np.float64]  # [max_budget + 1], the table's own


class BatchPrices:
    """What steps of so many requests cost, by the shape that runs. It moves only when the correction learns."""

    def __init__(
        self,
        table: CostTable,
        num_reqs: int,
        max_tokens: int,
        tiers: BucketTiers | None,
        rule: LookupRule,
        correction: CostCorrection | None,
    ) -> None:
        """`max_tokens`: most rows that are asked about. Without tiers each row count is a shape."""
        rows = np.arange(max_tokens + 1, dtype=np.int64) if tiers is None else tiers.num_tokens
        self._shape_of_tokens = None if tiers is None else tiers.tier_of_tokens
        self.table_seconds = table.step_seconds(num_reqs, rows, rule)  # [shapes], without correction
        self._correction = correction
        self._cells = None if correction is None else correction.cells(rows)
        self._corrected, self._num_observations = self.table_seconds, 0  # and how many those are of

    def seconds(self) -> NDArray[np.float64]:
        """[shapes], with the correction as it is at this step; the same array for as long as that is. Never written."""
        correction = self._correction
        if correction is None or self._cells is None or not correction.enabled:
            return self.table_seconds
        if correction.num_observations != self._num_observations:
            self._corrected = correction.factors_of(self._cells) * self.table_seconds
            self._num_observations = correction.num_observations
        return self._corrected

    def of_budgets(
        self, seconds: NDArray[np.float64], num_free_tokens: int, max_budget: int
    ) -> NDArray[np.float64]:
        """[max_budget + 1], out of `seconds` or `table_seconds`."""
        tokens = slice(num_free_tokens, num_free_tokens + max_budget + 1)
        shapes = self._shape_of_tokens
        return seconds[tokens] if shapes is None else seconds.take(shapes[tokens])

    def table_seconds_of(self, num_tokens: int) -> float:
        """Without correction, of so many rows."""
        shapes = self._shape_of_tokens
        return self.table_seconds.item(num_tokens if shapes is None else shapes.item(num_tokens))


def price_budgets(
    table: CostTable,
    num_reqs: int,
    num_free_tokens: int,
    max_budget: int,
    tiers: BucketTiers | None = None,
    rule: LookupRule = LookupRule.PAD_UP,
    correction: CostCorrection | None = None,
) -> BudgetPrices:
    """Prices the step for every budget 0 … max_budget.

    Budget B verifies num_free_tokens + B rows. With tiers, the tier that holds them is priced, since that is what
    runs; without (nothing is padded), the rows themselves.
    """
    prices = BatchPrices(table, num_reqs, num_free_tokens + max_budget, tiers, rule, correction)
    both = prices.seconds(), prices.table_seconds
    return BudgetPrices(*(prices.of_budgets(seconds, num_free_tokens, max_budget) for seconds in both))


Decoded = TypeVar("Decoded")


def _decode(text: str, table_type: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(text, type=table_type)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def _check_axis(key: str, probes: tuple[int, ...], values_key: str, values: tuple[float, ...]) -> None:
    if not probes:
        raise ValueError(f"{key} is empty")
    if any(left >= right for left, right in pairwise(probes)):
        raise ValueError(f"{key} must be strictly increasing, got {list(probes)}")
    if probes[0] < 0:
        raise ValueError(f"{key} must not be negative, got {probes[0]}")
    if len(probes) != len(values):
        raise ValueError(
            f"{values_key} must have one value for each of {key}, got {len(values)} for {len(probes)}"
        )
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"{values_key} must be finite, got {list(values)}")


def _warn_of_rises(key: str, probes: tuple[int, ...], rates: tuple[float, ...]) -> None:
    for i in range(1, len(rates)):
        if rates[i] > rates[i - 1] * RISE_WORTH_A_WARNING:
            logger.warning(
                "cost table: %s rises from %.4g at %d rows to %.4g at %d; more rows should not run faster, "
                "measure these probes again",
                key,
                rates[i - 1],
                probes[i - 1],
                rates[i],
                probes[i],
            )
