"""Where the planner's confidence comes from: one interface for the online estimator and a trained head.

A source turns a per-draft signal into `c[r, k]`, the probability that draft k is accepted given that those before it
were, and is told afterwards what was accepted. Signals are functions of the distribution a draft was drawn from,
never of the drawn token; otherwise trimming would bias what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashspark.kernels.estimator import RowEstimator

from .sampling import RowSampling

GREEDY, SAMPLED = 0, 1  # classes of requests
TEACHES = 2  # flag beside the class
NUM_CLASSES = 2
SETTLE_INTERVAL = 20  # steps whose outcomes are summed together
NUM_BINS = 15  # of survival, for its calibration

Summary = dict[str, int | bool | float | list[float] | list[list[float]]]


class ConfidenceSource(Protocol):
    """Confidence out, outcomes in. Rows are request rows; -1 marks the padding of a fixed-size batch."""

    gamma: int

    @property
    def is_ready(self) -> bool:
        """Whether its confidence may trim. False: verify full blocks. Host state only, equal on every rank."""
        ...

    @property
    def row_estimator(self) -> RowEstimator | None:
        """What a kernel that makes the signal needs to do the work of `predict` in passing; None: it cannot."""
        ...

    def assign(self, row: int, params: RowSampling, is_visible: bool = True) -> None:
        """A request takes `row`. `is_visible` false: the target's distribution is shaped by something that the
        draft does not see and `params` does not tell (a grammar, simulated acceptance), or nothing is drafted."""
        ...

    def release(self, row: int) -> None:
        """The request in `row` has left; what was predicted for it is never scored."""
        ...

    def predict(self, rows: Tensor, signal: Tensor) -> Tensor:
        """Confidence float32 [R, gamma] of the blocks just drafted for `rows` int64 [R]; remembered by row.

        Args:
            signal: float32 [R, gamma], batch order; what it is depends on the source.
        """
        ...

    def observe(
        self, rows: Tensor, row_list: Sequence[int], num_accepted: Tensor, verify_lens: Tensor
    ) -> None:
        """Outcomes of the latest predictions of `rows`, in any order. Nothing is read from the device.

        Args:
            num_accepted, verify_lens: int64 [R]; accepted drafts, and verified rows with the anchor.
        """
        ...

    def settle(self) -> None:
        """Counts the outcomes that still wait. `observe` does so by itself every few steps.

        Sums depend on when they were taken in their last bits: call it at the same step on every rank or nowhere.
        """
        ...

    def catch_up(self) -> None:
        """Learns from the outcomes that wait: more may be long in coming, and later plans go by what they taught."""
        ...

    def summary(self) -> Summary:
        """What metrics show, as of the last settling. Waits for the device: not for the hot path."""
        ...


def draft_sees(params: RowSampling) -> bool:
    """Whether the draft's distribution follows the target's settings, so that outcomes teach something general.

    The draft knows the temperature alone. Penalties, bias, suppressed stop ids and min-p change the target behind its
    back: one tenant's acceptance under them would poison everyone's coefficients (vllm-project/vllm#57533). Top-k and
    top-p stay in: models recommend them by default, so that most traffic would be lost without them.
    """
    return not params.adjusts_logits and (params.is_greedy or params.min_p <= 0.0)


class Outcomes(NamedTuple):
    """Blocks with what was predicted for them and what became of them. N blocks of some steps."""

    signal: Tensor  # float32 [N, gamma]
    prediction: Tensor  # float32 [N, gamma]; NaN where nothing was predicted
    classes: Tensor  # int64 [N], GREEDY or SAMPLED
    teaches: Tensor  # bool [N]
    num_accepted: Tensor  # int64 [N]
    verify_lens: Tensor  # int64 [N]


class PredictionLog:
    """What was predicted for each request row, until its outcome is known; and outcomes until somebody sums them.

    Outcomes are gathered per step and summed some steps later in one go: some 60 small operations per step would
    cost a fast CPU step 4 % of its time.
    """

    def __init__(self, max_reqs: int, gamma: int, device: torch.device) -> None:
        # Signal and prediction by row. The last row is where padding (row -1) reads and writes.
        self.values = torch.full((max_reqs + 1, 2, gamma), float("nan"), device=device)
        self._nothing = torch.full((gamma,), float("nan"), device=device)
        self.kinds = torch.zeros(max_reqs + 1, dtype=torch.int64, device=device)  # class | TEACHES
        self._teaching_rows: dict[int, int] = {}  # and their class
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def assign(self, row: int, params: RowSampling, is_visible: bool) -> None:
        """`row` has a new owner, who owes nothing for the old one's predictions."""
        self.release(row)
        teaches = is_visible and draft_sees(params)
        kind = GREEDY if params.is_greedy else SAMPLED
        self.kinds[row].fill_(kind | (TEACHES if teaches else 0))
        if teaches:
            self._teaching_rows[row] = kind

    def release(self, row: int) -> None:
        """`row` has no owner."""
        self.values[row].fill_(float("nan"))
        self.kinds[row].fill_(0)
        self._teaching_rows.pop(row, None)

    def put(self, rows: Tensor, signal: Tensor, prediction: Tensor) -> None:
        """Remembers this step's values: batch order in, request rows out."""
        self.values[rows] = torch.stack((signal, prediction), dim=1)

    def close(
        self, rows: Tensor, row_list: Sequence[int], num_accepted: Tensor, verify_lens: Tensor
    ) -> set[int]:
        """Takes the outcomes of `rows`' predictions, each of which counts once; returns the classes that they teach."""
        taught = {self._teaching_rows[row] for row in row_list if row in self._teaching_rows}
        if not taught:
            return taught
        outcome = torch.stack((num_accepted, verify_lens))
        self._waiting.append((self.values[rows], self.kinds[rows], outcome))
        self.values[rows, 1] = self._nothing
        return taught

    def drain(self) -> Outcomes | None:
        """What has come in since the last call, in order."""
        if not self._waiting:
            return None
        values, kinds, outcomes = zip(*self._waiting, strict=True)
        self._waiting = []
        value, kind, outcome = torch.cat(values), torch.cat(kinds), torch.cat(outcomes, dim=1)
        return Outcomes(value[:, 0], value[:, 1], kind & 1, kind >= TEACHES, outcome[0], outcome[1])


class Calibration:
    """Expected against observed accepted drafts, over the drafts that were verified: by position, and by survival.

    Survival is the running product of a block's confidence, the probability that all drafts up to a position are
    accepted; `NUM_BINS` equal intervals of it.
    """

    def __init__(self, gamma: int, device: torch.device) -> None:
        # Of each interval at each position: verified drafts, the sum of their survivals, how many were accepted.
        self._bins = torch.zeros(gamma * NUM_BINS, 3, dtype=torch.float64, device=device)
        self._num_blocks = torch.zeros((), dtype=torch.int64, device=device)
        self._first_bins = torch.arange(gamma, device=device) * NUM_BINS

    def add(self, outcomes: Outcomes) -> None:
        """Counts the blocks that teach, each draft once."""
        prediction = outcomes.prediction.double()
        counts = outcomes.teaches & prediction.isfinite().all(dim=1)
        position = torch.arange(prediction.shape[1], device=prediction.device)
        verified = (position < outcomes.verify_lens.unsqueeze(1) - 1) & counts.unsqueeze(1)
        survival = torch.where(verified, prediction.cumprod(dim=1), 0.0)
        accepted = verified & (position < outcomes.num_accepted.unsqueeze(1))
        bins = self._first_bins + (survival * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        values = torch.stack((verified.double(), survival, accepted.double()), dim=2)
        self._bins.index_add_(0, bins.flatten(), values.flatten(0, 1))
        self._num_blocks += counts.sum()

    def summary(self) -> Summary:
        """Totals since the start. Waits for the device."""
        counts, expected, accepted = self._bins.view(-1, NUM_BINS, 3).unbind(2)
        num_blocks = int(self._num_blocks)
        sums = float(expected.sum()), float(accepted.sum())
        errors = (expected - accepted).abs().sum(1) / counts.sum(1).clamp(min=1.0)
        return {
            "scored_blocks": num_blocks,
            "expected_accepted": sums[0],
            "actual_accepted": sums[1],
            "expected_minus_actual_per_block": (sums[0] - sums[1]) / max(1, num_blocks),
            "calibration_counts": counts.tolist(),
            "calibration_expected": expected.tolist(),
            "calibration_accepted": accepted.tolist(),
            "calibration_errors": errors.tolist(),  # expected calibration error of the survival, by position
        }


class HeadConfidence:
    """A trained confidence head: `sigmoid(raw / tau_k)`. The signal is the head's raw logit. Learns nothing."""

    is_ready = True
    row_estimator = None

    def __init__(self, max_reqs: int, temperatures: Sequence[float], device: torch.device) -> None:
        """`temperatures`: tau per position (STS), all 1 for an uncalibrated head."""
        if any(not 0.0 < value < float("inf") for value in temperatures):
            raise ValueError(
                f"calibration temperatures must be positive and finite, not {list(temperatures)}"
            )
        self.gamma = len(temperatures)
        self._temperatures = torch.tensor(list(temperatures), dtype=torch.float32, device=device)
        self._log = PredictionLog(max_reqs, self.gamma, device)
        self._calibration = Calibration(self.gamma, device)
        self.num_steps = 0  # that can be scored

    def assign(self, row: int, params: RowSampling, is_visible: bool = True) -> None:
        """See `ConfidenceSource`."""
        self._log.assign(row, params, is_visible)

    def release(self, row: int) -> None:
        """See `ConfidenceSource`."""
        self._log.release(row)

    def predict(self, rows: Tensor, signal: Tensor) -> Tensor:
        """See `ConfidenceSource`."""
        confidence = (signal / self._temperatures).sigmoid_()
        self._log.put(rows, signal, confidence)
        return confidence

    def observe(
        self, rows: Tensor, row_list: Sequence[int], num_accepted: Tensor, verify_lens: Tensor
    ) -> None:
        """See `ConfidenceSource`: kept for the metrics."""
        if self._log.close(rows, row_list, num_accepted, verify_lens):
            self.num_steps += 1
            if self.num_steps % SETTLE_INTERVAL == 0:
                self.settle()

    def settle(self) -> None:
        """See `ConfidenceSource`."""
        outcomes = self._log.drain()
        if outcomes is not None:
            self._count(outcomes)

    def catch_up(self) -> None:
        """See `ConfidenceSource`: there is nothing to learn."""

    def _count(self, outcomes: Outcomes) -> None:
        self._calibration.add(outcomes)

    def summary(self) -> Summary:
        """See `ConfidenceSource`."""
        return {"temperatures": self._temperatures.tolist(), **self._calibration.summary()}
