"""The engines that the tests of this folder look at: the shipped pair in float32 on a GPU.

With FLASHSPARK_GPU_TESTS_ON_CPU=1 in the environment they run on a CPU too, fewer and shorter, with steps in the same
pieces but nothing captured: to try the tests themselves.
"""

from __future__ import annotations

import json

import pytest
import torch

from flashspark.demo import DEMO_PROMPTS
from flashspark.speculative.cost_table import SpsCostTable
from harness import Harness, Job, first_difference, near_tie_gap
from unit.test_step_graphs import in_pieces

ON_GPU = torch.cuda.is_available()
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.timeout(600)]
DEVICE = "cuda" if ON_GPU else "cpu"
NUM_PROMPTS, NUM_TOKENS = (16, 64) if ON_GPU else (4, 32)
# Logits of the pair in bfloat16 are off by 0.09 (root mean square) and 0.9 at most, whatever the shape of the step.
NEAR_TIE_BFLOAT16 = 0.5
# A step costs 8 rows and its own: trimming pays as soon as survival is low.
COSTS = SpsCostTable(tuple(range(1, 257)), tuple(1000.0 / (8 + n) for n in range(1, 257)), 256)


def prompts(count: int) -> list[list[int]]:
    """Held-out ones, of lengths from a few tokens on."""
    token_ids = [prompt["token_ids"] for prompt in json.loads(DEMO_PROMPTS.read_text())]
    return [ids[: 5 + 23 * i % 97] for i, ids in enumerate(token_ids[:count])]


def build(max_reqs: int = 16, **args) -> Harness:
    """An adaptive engine, which the live switches make any other; its estimator may trim from the start."""
    harness = Harness(
        "demo",
        "demo-dflash2",
        **{
            "device": DEVICE,
            "dtype": "float32",
            "disable_cuda_graph": False,
            "enable_overlap_schedule": True,
            "max_running_requests": max_reqs,
            "max_total_tokens": 8192,
            "ragged_verify_mode": "compact",
            "speculative_cost_table": "none",
            "enable_deterministic_inference": True,
        }
        | args,
    )
    adaptive = harness._worker.adaptive
    assert adaptive is not None
    adaptive.planner.table, adaptive.source.num_refits = COSTS, 100
    if not ON_GPU:
        in_pieces(harness, finest_reqs=1, finest_tokens=8, relative=8, relative_reqs=4)
    return harness


def switch(harness: Harness, mode: str, fraction: float | None = None) -> None:
    """`mode` as a server has it, or plain; budgets pinned to `fraction`, or planned."""
    settings = {"speculation": mode != "plain", "ragged_verify_mode": "static" if mode == "plain" else mode}
    if mode not in ("plain", "static"):
        settings["dspark_force_budget_frac"] = fraction
    assert harness.scheduler.set_internal_state(settings) is None
    assert harness.scheduler.flush_cache()


def mixed_jobs(count: int, num_tokens: int) -> list[Job]:
    """Greedy requests and sampled ones, which come and go so that batches grow, shrink and change."""
    sampled = [
        {},
        {"temperature": 1.0},
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "seed": 5},
    ]
    return [
        Job(prompt, num_tokens - 7 * i % 23, arrive=2 * i, sampling=sampled[i % 5])
        for i, prompt in enumerate(prompts(count))
    ]


def assert_parts_at_near_ties(
    engine: Harness, jobs: list[Job], expected: list[list[int]], got: list[list[int]], name: str
) -> None:
    """Where a prompt's output first differs, the two best logits are close. Prints the places, with their gaps."""
    parted = [(i, first_difference(a, b)) for i, (a, b) in enumerate(zip(expected, got, strict=True))]
    gaps = {
        (i, at): near_tie_gap(engine, [*jobs[i].prompt, *expected[i][:at]])
        for i, at in parted
        if at is not None
    }
    for (i, at), gap in gaps.items():
        print(f"prompt {i} parts at token {at}: gap {gap:.4f}")
    print(f"{name}: {len(gaps)} of {len(jobs)} prompts part somewhere")
    assert all(gap < NEAR_TIE_BFLOAT16 for gap in gaps.values())
