"""What the planner's tests share: the worked example, and inputs and planners with everything else at rest."""

import numpy as np

from flashspark.speculative.cost_table import SpsCostTable
from flashspark.speculative.planner import STAGES, VerifyPlanner
from flashspark.speculative.planner_input import PlanInput, PlannerSettings
from flashspark.speculative.relay import RelayedConfidence
from flashspark.speculative.tiers import TierGrid, TierRule

CONFIDENCE = np.array([[0.9, 0.8, 0.5], [0.6, 0.5, 0.9], [0.9, 0.5, 0.8]], dtype=np.float32)
TABLE = SpsCostTable((1, 4, 8, 12), (100.0, 98.0, 90.0, 60.0), 12)
GRID = TierGrid(TierRule(width=4, max_num_reqs=3, finest_reqs=3, finest_tokens=4))


def full(n, value):
    return np.full(n, value, dtype=np.int64)


def plan_input(confidence, *, stale=(), caps=None, keeps_block=(), waited=None, relayed=True):
    n, gamma = confidence.shape
    generations = full(n, 3)
    stored = generations.copy()
    stored[list(stale)] = 2
    return PlanInput(
        relayed=RelayedConfidence(confidence, stored) if relayed else None,
        generations=generations,
        caps=full(n, gamma + 1) if caps is None else np.array(caps),
        keeps_block=np.isin(np.arange(n), keeps_block),
        num_steps_without_draft=full(n, 0) if waited is None else np.array(waited),
    )


def stage(plan, name):
    return plan.record.stages[STAGES.index(name)]


def planner_of(gamma=3, table=TABLE, grid=GRID, **changes):
    kept = {k: changes.pop(k) for k in ("plain_costs", "correction", "plain_correction") if k in changes}
    return VerifyPlanner(PlannerSettings(gamma=gamma, **changes), table, grid, **kept)
