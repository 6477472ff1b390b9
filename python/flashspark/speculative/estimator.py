"""The online acceptance estimator: confidence for drafts that come without a trained head."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from flashspark.kernels import estimator as kernel

from .confidence import NUM_CLASSES, SETTLE_INTERVAL, Calibration, PredictionLog, Summary
from .sampling import RowSampling

logger = logging.getLogger(__name__)

PRIOR_SLOPE, PRIOR_INTERCEPT = 0.0, 1.5  # 0.8176 everywhere: ranks nothing, yet gives a usable budget
REFIT_INTERVAL = 100  # steps
# One Newton step from the prior gets half way. The first interval is therefore fit in tenths: with one refit per
# interval, 32 greedy requests were predicted 18 % too short during the second hundred steps.
EARLY_REFITS = 10
WARMUP_REFITS = EARLY_REFITS + 1  # 200 steps


class AcceptanceEstimator:
    """A logistic model of acceptance, refit every `REFIT_INTERVAL` steps on the steps since the last refit.

    The first interval has `EARLY_REFITS` refits, and full blocks are verified until `WARMUP_REFITS` are done. So has
    the first interval of a class that comes later, and whatever a draft-free time's probes see is learned at once.

    The signal is `logit(q_max)` of the row each draft was drawn from (`selector_walk_with_feature`,
    `logit_of_largest`). See `flashspark.kernels.estimator` for the model. Owns its coefficients and sums, which
    are allocated once and updated in place on the caller's stream.
    """

    def __init__(
        self,
        max_reqs: int,
        gamma: int,
        device: torch.device,
        per_class: bool = True,
        refit_interval: int = REFIT_INTERVAL,
        warmup_refits: int = WARMUP_REFITS,
    ) -> None:
        """`per_class`: greedy and sampled requests have coefficients of their own.

        Measured on the shipped pair, half of each (`benchmark/estimator_quality.py`): shared coefficients expect 9 %
        too few accepted drafts of the greedy requests and 12 % too many of the sampled, their own miss by 1 %.
        """
        num_classes = NUM_CLASSES if per_class else 1
        self.gamma = gamma
        self._refit_interval, self._warmup_refits = refit_interval, warmup_refits
        self.slope = torch.full((num_classes,), PRIOR_SLOPE, device=device)
        self.intercepts = torch.full((num_classes, gamma), PRIOR_INTERCEPT, device=device)
        self._moments = torch.zeros(
            num_classes, kernel.NUM_MOMENTS, gamma, dtype=torch.float64, device=device
        )
        self._num_observations = torch.zeros(num_classes, gamma, dtype=torch.float64, device=device)
        self._log = PredictionLog(max_reqs, gamma, device)
        self._calibration = Calibration(gamma, device)
        # Steps that taught, and refits on schedule; from host state, never from the device.
        self.num_steps = self.num_refits = 0
        self._num_class_steps = [0] * NUM_CLASSES

    @property
    def is_ready(self) -> bool:
        """See `ConfidenceSource`: after the first few refits, counted on the host."""
        return self.num_refits >= self._warmup_refits

    def assign(self, row: int, params: RowSampling, is_visible: bool = True) -> None:
        """See `ConfidenceSource`."""
        self._log.assign(row, params, is_visible)

    def release(self, row: int) -> None:
        """See `ConfidenceSource`."""
        self._log.release(row)

    @property
    def row_estimator(self) -> kernel.RowEstimator:
        """See `ConfidenceSource`. The same tensors as long as it lives."""
        return kernel.RowEstimator(self._log.kinds, self.slope, self.intercepts, self._log.values)

    def predict(self, rows: Tensor, signal: Tensor) -> Tensor:
        """See `ConfidenceSource`; `signal` is the feature."""
        return kernel.predict_rows(signal, rows, *self.row_estimator)

    def observe(
        self, rows: Tensor, row_list: Sequence[int], num_accepted: Tensor, verify_lens: Tensor
    ) -> None:
        """See `ConfidenceSource`. Steps of which nothing can be learned do not count."""
        taught = self._log.close(rows, row_list, num_accepted, verify_lens)
        if not taught:
            return
        self.num_steps += 1
        for member in taught:
            self._num_class_steps[member] += 1
        is_due = self._is_due(self.num_steps)
        is_due_early = any(
            self._num_class_steps[member] < self._refit_interval
            and self._is_due(self._num_class_steps[member])
            for member in taught
        )
        if is_due or is_due_early or self.num_steps % SETTLE_INTERVAL == 0:
            self.settle()
        if is_due or is_due_early:
            self._refit(counts=is_due)

    def _is_due(self, num_steps: int) -> bool:
        is_early = num_steps < self._refit_interval
        interval = max(1, self._refit_interval // EARLY_REFITS) if is_early else self._refit_interval
        return num_steps % interval == 0

    def settle(self) -> None:
        """See `ConfidenceSource`."""
        outcomes = self._log.drain()
        if outcomes is None:
            return
        kernel.observe(
            self._moments,
            outcomes.signal,
            outcomes.prediction,
            outcomes.classes,
            outcomes.num_accepted,
            outcomes.verify_lens,
            outcomes.teaches,
        )
        self._calibration.add(outcomes)

    def catch_up(self) -> None:
        """See `ConfidenceSource`."""
        self.settle()
        self._refit(counts=False)

    def summary(self) -> Summary:
        """See `ConfidenceSource`. Lists have one entry per class: all requests, or greedy and sampled."""
        seen = self._num_observations + self._moments[:, -1]
        return {
            "is_ready": self.is_ready,
            "steps": self.num_steps,
            "refits": self.num_refits,
            "slope": self.slope.tolist(),
            "intercepts": self.intercepts.tolist(),
            "observations": seen.tolist(),
            "checksum": self.checksum(),
            **self._calibration.summary(),
        }

    def checksum(self) -> int:
        """Of the coefficients' bits: equal on ranks that agree. Waits for the device."""
        bits = torch.cat((self.slope, self.intercepts.flatten())).view(torch.int32).to(torch.int64)
        return int((bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum())

    def _refit(self, counts: bool) -> None:
        was_ready = self.is_ready
        self._num_observations += self._moments[:, -1]
        kernel.refit(self.slope, self.intercepts, self._moments)
        self.num_refits += counts
        if self.is_ready and not was_ready:
            logger.info(
                "Acceptance estimator: warm after %d refits in %d steps, verification may be trimmed from now on",
                self.num_refits,
                self.num_steps,
            )
