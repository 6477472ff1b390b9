"""Trimmed verification emits the target's exact distribution as long as no plan looks at a drawn token: chi-square."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.cost_table import SpsCostTable
from flashspark.speculative.estimator import AcceptanceEstimator
from flashspark.speculative.looks import LookRule
from flashspark.speculative.tiers import TierGrid, TierRule
from harness import Harness
from unit.test_exact_sampling import SETTINGS, draw, exact, folders, pvalue  # noqa: F401 - fixtures

WIDTH = 4
# A step costs 300 rows and its own: with 500 requests, drafts that survive badly are not worth their row.
TABLE = SpsCostTable(tuple(range(1, 2001)), tuple(1000.0 / (300 + n) for n in range(1, 2001)), 2000)


class Trimming:
    """Makes a harness plan, keeps it, and says afterwards how much was trimmed."""

    def __init__(self, mode: VerifyMode, pin: float | None = None, look_at_the_draw: bool = False) -> None:
        self._mode, self._pin, self._look = mode, pin, look_at_the_draw

    def __call__(self, harness: Harness) -> None:
        self.harness = harness
        grid = TierGrid(TierRule(WIDTH, 500, finest_tokens=8))
        rule = LookRule(poor_every=1)  # whatever little a look promises
        adaptive = harness.make_adaptive(
            self._mode, TABLE, grid, min_gain=0.0, draft_free=None, look_rule=rule
        )
        adaptive.planner.pin(self._pin)
        if isinstance(adaptive.source, AcceptanceEstimator):
            # Ready from the start, and with opinions: what is likely among the candidates is thought to be accepted.
            adaptive.source.num_refits = 1000
            adaptive.source.slope.fill_(1.0)
            adaptive.source.intercepts.fill_(-0.3)
        if self._look:
            drafter = harness._worker.drafter
            honest = drafter.propose

            def propose(*args, **kwargs):
                block = honest(*args, **kwargs)
                likeliest = block.candidate_ids.gather(2, block.candidate_probs.argmax(2, keepdim=True))
                is_likeliest = block.tokens == likeliest[..., 0]
                return replace(block, signal=torch.where(is_likeliest, 8.0, -8.0))

            drafter.propose = propose

    def share(self) -> float:
        """Steps that trimmed, of all that decoded."""
        decoded = [record for record in self.harness.scheduler.records if record.num_reqs]
        return sum(not record.plan.verify.full for record in decoded) / len(decoded)


@pytest.mark.parametrize(
    ("mode", "setting"),
    [
        (VerifyMode.COMPACT, "plain"),
        pytest.param(VerifyMode.CAP_ACCEPT, "plain", marks=pytest.mark.full),
        pytest.param(VerifyMode.COMPACT, "all", marks=pytest.mark.full),
        pytest.param(VerifyMode.COMPACT, "penalties", marks=pytest.mark.full),
    ],
)
def test_planned_trimming(folders, exact, mode, setting):  # noqa: F811
    trimming = Trimming(mode)
    counts = draw(folders, "dflash2", SETTINGS[setting], prepare=trimming)
    assert trimming.share() >= 0.2
    assert pvalue(counts, exact(SETTINGS[setting])) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_pinned(folders, exact, fraction):  # noqa: F811
    counts = draw(folders, "dflash2", SETTINGS["plain"], prepare=Trimming(VerifyMode.COMPACT, fraction))
    assert pvalue(counts, exact(SETTINGS["plain"])) > 1e-4


@pytest.mark.full
def test_negative_control_of_a_plan_that_looks_at_the_draw(folders, exact):  # noqa: F811
    """Verifying a draft because of *which* token was drawn biases the output towards likely tokens."""
    trimming = Trimming(VerifyMode.COMPACT, pin=0.12, look_at_the_draw=True)
    counts = draw(folders, "dflash2", SETTINGS["plain"], prepare=trimming)
    assert pvalue(counts, exact(SETTINGS["plain"])) < 1e-6
