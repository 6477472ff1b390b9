"""The token tiers a verify step may be padded to: one rule makes them, and everything else asks the grid.

A tier belongs to a request bucket R and runs T packed rows; the pair (R, T) is the key of a captured graph, and on
CPU of nothing but a price. What may be captured, what a step may ask for and what the planner prices all come from
the same `TierGrid`, so they cannot drift apart (SGLang derived the tier in three places and had to undo it).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TierKey:
    """What a verify step is shaped like: request slots R and packed rows T, with R ≤ T ≤ R·W."""

    num_slots: int
    num_tokens: int


@dataclass(frozen=True)
class TierRule:
    """How far apart buckets and tiers lie: `finest` apart while small, later at most a fraction of their size.

    Neighbours around x are max(finest, 2^⌊log2(x / relative)⌋) apart, so padding is never more than 1/relative of
    what runs, or `finest - 1`. Full blocks of every batch are tiers too, up to `every_full_block_up_to` requests;
    beyond it only those of the bucket sizes.
    """

    width: int  # W, rows of a full block
    max_num_reqs: int
    finest_reqs: int = 1
    finest_tokens: int = 1
    relative: int = 16
    relative_reqs: int | None = None  # of buckets; None: as of rows
    every_full_block_up_to: int = 64

    def __post_init__(self) -> None:
        for name in ("width", "max_num_reqs", "finest_reqs", "finest_tokens", "relative"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def spaced(first: int, last: int, finest: int, relative: int) -> list[int]:
    """Rising integers from `first` to `last`, both included, spaced as `TierRule` says and aligned to the spacing."""
    values, value = [first], first
    while value < last:
        step = max(finest, 1 << max((value // relative).bit_length() - 1, 0))
        value = min((value // step + 1) * step, last)
        values.append(value)
    return values


@dataclass(frozen=True)
class BucketTiers:
    """The tiers of one request bucket, and for each token count which of them runs it."""

    num_slots: int
    num_tokens: NDArray[np.int64]  # [tiers], rising from R or more to R·W
    tier_of_tokens: NDArray[np.int64]  # [R·W + 1], index into num_tokens of the smallest tier that holds them

    def round_up(self, num_tokens: int) -> int:
        """The rows that really run for `num_tokens` rows; more than the bucket's full block is an error."""
        rounded = self.rounded
        if not 0 <= num_tokens < len(rounded):
            raise ValueError(
                f"{num_tokens} tokens do not fit {self.num_slots} slots: at most {self.max_tokens}"
            )
        return rounded[num_tokens]

    def key(self, num_tokens: int) -> TierKey:
        """The shape that runs `num_tokens` rows."""
        return self._keys[self.tier_of_tokens.item(num_tokens)]

    @cached_property
    def _keys(self) -> list[TierKey]:
        """By tier."""
        return [TierKey(self.num_slots, num_tokens) for num_tokens in self.num_tokens.tolist()]

    @cached_property
    def plain_key(self) -> TierKey:
        """The shape of a draft-free step, one row per slot."""
        return TierKey(self.num_slots, self.num_slots)

    @cached_property
    def rounded(self) -> list[int]:
        """By token count: the rows that really run, as Python has them at hand."""
        rounded: list[int] = self.num_tokens[self.tier_of_tokens].tolist()
        return rounded

    @property
    def max_tokens(self) -> int:
        """The full block of a full bucket, R·W."""
        return int(self.num_tokens[-1])


class TierGrid:
    """All buckets and tiers of one rule. Immutable; owns its arrays."""

    def __init__(self, rule: TierRule) -> None:
        self.rule = rule
        self.buckets = spaced(1, rule.max_num_reqs, rule.finest_reqs, rule.relative_reqs or rule.relative)
        self._tiers = []
        below = 0
        for bucket in self.buckets:
            self._tiers.append(_bucket_tiers(rule, below, bucket))
            below = bucket
        self._bucket_index = np.searchsorted(self.buckets, np.arange(rule.max_num_reqs + 1)).tolist()

    def tiers(self, num_reqs: int) -> BucketTiers | None:
        """The tiers a batch may run on; None past the grid, where a step runs eagerly and unpadded."""
        if not 0 < num_reqs < len(self._bucket_index):
            return None
        return self._tiers[self._bucket_index[num_reqs]]

    def key(self, num_reqs: int, num_tokens: int) -> TierKey | None:
        """The shape that runs `num_tokens` rows of `num_reqs` requests; None past the grid: run it eagerly."""
        tiers = self.tiers(num_reqs)
        if tiers is None or num_tokens > tiers.max_tokens:
            return None
        return tiers.key(num_tokens)

    def plain_key(self, num_reqs: int) -> TierKey | None:
        """The shape of a draft-free step, one row per slot; None past the grid."""
        tiers = self.tiers(num_reqs)
        return None if tiers is None else tiers.plain_key

    def plain_keys(self) -> list[TierKey]:
        """Every key that `plain_key` can answer; some may be among `reachable_keys` too."""
        return [TierKey(bucket, bucket) for bucket in self.buckets]

    def reachable_keys(self) -> list[TierKey]:
        """Every key that `key` can answer for n requests and n … n·W rows: what to capture, no more and no less."""
        keys = []
        below = 0
        for tiers in self._tiers:
            # n … n·W of the bucket's batches overlap, so together they are every count from the smallest batch on.
            reached = np.unique(tiers.tier_of_tokens[below + 1 :])
            keys += [TierKey(tiers.num_slots, int(tiers.num_tokens[i])) for i in reached]
            below = tiers.num_slots
        return keys

    def row_counts(self) -> NDArray[np.int64]:
        """Every row count that some tier runs, rising: the cells of a `CostCorrection`."""
        return np.unique(np.concatenate([tiers.num_tokens for tiers in self._tiers]))

    def full_block_is_a_tier(self, num_reqs: int) -> bool:
        """Whether n full blocks fill a tier exactly: then the uniform block is the packed layout already."""
        tiers = self.tiers(num_reqs)
        num_tokens = num_reqs * self.rule.width
        return tiers is not None and tiers.round_up(num_tokens) == num_tokens


def capture_lens(key: TierKey, width: int) -> list[int]:
    """Verify lengths to capture a graph with: T rows spread over the slots evenly, longer ones first."""
    if not key.num_slots <= key.num_tokens <= key.num_slots * width:
        raise ValueError(f"{key} is no tier of width {width}")
    short, num_longer = divmod(key.num_tokens, key.num_slots)
    return [short + 1] * num_longer + [short] * (key.num_slots - num_longer)


def filled_budget(budget: int, num_free_tokens: int, max_budget: int, tier_tokens: int) -> int:
    """The budget that uses a tier up: rows that are paid for as padding verify real drafts instead.

    Args:
        num_free_tokens: rows the requests get for free, the sum of their floors.
        max_budget: drafts above the floors that fit the requests' caps.
    """
    return max(budget, min(tier_tokens - num_free_tokens, max_budget))


def _bucket_tiers(rule: TierRule, below: int, bucket: int) -> BucketTiers:
    """Tiers of the bucket that serves batches of below + 1 … bucket requests."""
    full = bucket * rule.width
    first = min(-(-bucket // rule.finest_tokens) * rule.finest_tokens, full)
    tokens = set(spaced(first, full, rule.finest_tokens, rule.relative))
    batches = range(below + 1, min(bucket, rule.every_full_block_up_to) + 1)
    tokens |= {n * rule.width for n in batches if n * rule.width >= bucket}
    num_tokens = np.array(sorted(tokens), dtype=np.int64)
    tier_of_tokens = np.searchsorted(num_tokens, np.arange(full + 1))
    for array in (num_tokens, tier_of_tokens):
        array.flags.writeable = False
    return BucketTiers(bucket, num_tokens, tier_of_tokens)
