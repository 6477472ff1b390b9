"""The budget objective: how many drafts to verify for the most expected tokens per second. Pure functions.

    S[r,k]   = c[r,0] · … · c[r,k]           probability that the prefix through draft k is accepted
    tau(B)   = what the floors give + the B largest S left      expected tokens of the step
    theta(B) = tau(B) / seconds(B)           expected tokens per second
    B*       = argmax theta, the smallest if several

Cost is a staircase, so theta has many hills, and every budget is looked at (after DSpark's published algorithm, which
stops at the first descent instead, and SGLang's planner, which looks at all).
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

_NEVER, _SURELY = np.zeros((), dtype=np.float32), np.ones((), dtype=np.float32)


class Candidates(msgspec.Struct, frozen=True):
    """Drafts that a budget can buy, best first, and what the step gives without buying any."""

    survivals: NDArray[np.float32]  # [m], falling
    base_tokens: float  # expected tokens of the floors: every request's following token, and its paid drafts

    def expected_tokens(self) -> NDArray[np.float64]:
        """tau(B) for B = 0 … m, [m + 1]."""
        tau = np.zeros(len(self.survivals) + 1)
        tau[1:] = self.survivals
        return np.add.accumulate(tau) + self.base_tokens  # `out` would cost more than a new array


def fresh_rows(stored: NDArray[np.int64], current: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Rows whose confidence was written for their present owner; generation 0 was never handed out."""
    written = stored >= 1
    return written if stored is current else (stored == current) & written


def survivals(confidence: NDArray[np.float32], fresh: NDArray[np.bool_] | None) -> NDArray[np.float32]:
    """S, float32 [R, gamma]. Rows that are not fresh survive surely, so a new request verifies its full block;
    `fresh` None: all are.

    NaN counts as 0 and everything else is clamped into [0, 1]: without that S could rise along a request, and the
    drafts that rank highest would be no prefix.
    """
    # fmax takes the number beside a NaN.
    clean: NDArray[np.float32] = np.minimum(np.fmax(confidence, _NEVER), _SURELY)
    if fresh is not None:
        clean[~fresh] = 1.0
    return np.multiply.accumulate(clean, axis=1)


def optimism(survival: NDArray[np.float32], fresh: NDArray[np.bool_], caps: NDArray[np.int64]) -> float:
    """Expected tokens that rows which are not fresh are credited with for being certain, beyond what the fresh ones
    of the batch get on average. 0 where nobody is fresh: nothing is known then.

    Certainty is right for the budget, since it gets a new request's drafts verified. Whether to draft at all is
    another question: under a steady stream of arrivals somebody is always new.
    """
    num_fresh = int(np.count_nonzero(fresh))
    if num_fresh == 0 or num_fresh == len(fresh):
        return 0.0
    average = float(survival[fresh].sum(dtype=np.float64)) / num_fresh
    return max(float((caps[~fresh] - 1 - average).sum()), 0.0)


def as_average(survival: NDArray[np.float32], fresh: NDArray[np.bool_]) -> NDArray[np.float32]:
    """S, with the fresh rows' mean written over rows that are not fresh; these survive surely where nobody is fresh.

    For a batch that decodes without a draft: a probe that verified full blocks of everybody who came since the last
    one would be the dearest step there is.
    """
    known = survival[fresh]
    survival[~fresh] = np.add.reduce(known, axis=0, dtype=np.float64) / len(known) if len(known) else 1.0
    return survival


class Lengths(msgspec.Struct, frozen=True):
    """Rows that each request of a batch verifies at least and at most, and what follows from that alone.

    Shared by the steps it fits: never written.
    """

    floors: NDArray[np.int64]  # [R]
    caps: NDArray[np.int64]  # [R]
    num_free: int  # rows, the sum of the floors
    max_budget: int  # drafts above them
    for_sale: NDArray[np.bool_] | None  # [R, gamma], drafts between floor and cap; None: all
    paid: NDArray[np.bool_] | None  # [R, gamma], drafts below the floor; None: none

    @classmethod
    def of(cls, floors: NDArray[np.int64], caps: NDArray[np.int64], gamma: int) -> Lengths:
        """Draft k is block row k + 1, so the drafts for sale are k = floor - 1 … cap - 2."""
        before, num_reqs = _drafts_before_row(gamma), len(caps)
        num_free = int(np.add.reduce(floors))
        max_budget = int(np.add.reduce(caps)) - num_free
        paid = before.take(floors, axis=0) if num_free > num_reqs else None
        for_sale = None
        if max_budget < num_reqs * gamma:
            for_sale = before.take(caps, axis=0)
            if paid is not None:
                for_sale &= ~paid
        return cls(floors, caps, num_free, max_budget, for_sale, paid)


def candidates(
    survival: NDArray[np.float32], floors: NDArray[np.int64], caps: NDArray[np.int64], eps: float
) -> Candidates:
    """`ranked` of these lengths."""
    return ranked(survival.copy(), Lengths.of(floors, caps, survival.shape[1]), eps)


def ranked(survival: NDArray[np.float32], lengths: Lengths, eps: float) -> Candidates:
    """What is for sale: block rows from each request's floor up to its cap, as far as they survive at all.

    Those before are in the step anyway and count as its base; SGLang sells both those and the ones past the cap.
    `survival` is used up: its memory is sorted.
    """
    base = float(len(survival))
    if lengths.paid is not None:
        base += float(survival[lengths.paid].sum(dtype=np.float64))
    rising = survival.ravel() if lengths.for_sale is None else survival[lengths.for_sale]
    rising.sort()
    if len(rising) and not rising.item(0) >= eps:
        rising = rising[rising.searchsorted(np.float32(eps)) :]
    return Candidates(rising[::-1], base)


def best_budget(tau: NDArray[np.float64], seconds: NDArray[np.float64]) -> int:
    """argmax of tau / seconds over every budget 0 … len(tau) - 1; the first, so the smallest, if several."""
    return int((tau / seconds[: len(tau)]).argmax())


@lru_cache(maxsize=8)
def _drafts_before_row(gamma: int) -> NDArray[np.bool_]:
    """[gamma + 2, gamma]: whether draft k lies before block row L. Taking rows of it is cheaper than comparing."""
    return np.arange(gamma) < np.arange(gamma + 2)[:, None] - 1
