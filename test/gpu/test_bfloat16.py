"""The modes in bfloat16, over long outputs: full budgets give the same tokens; planned ones part at near-ties alone."""

from __future__ import annotations

import pytest

from gpu.setting import NEEDS_GPU, ON_GPU, assert_parts_at_near_ties, build, prompts, switch
from harness import Harness, Job

pytestmark = NEEDS_GPU
NUM_PROMPTS, NUM_TOKENS = (64, 512) if ON_GPU else (4, 24)
DTYPE = "bfloat16" if ON_GPU else "float32"


@pytest.fixture(scope="module")
def engine() -> Harness:
    return build(32, dtype=DTYPE, max_total_tokens=32 * 640)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return [Job(prompt, NUM_TOKENS) for prompt in prompts(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def static(engine, jobs) -> list[list[int]]:
    switch(engine, "static")
    return [result.tokens for result in engine.run(jobs)]


@pytest.mark.parametrize("mode", ["static", "cap-accept", "compact"])
def test_full_budgets_give_the_same_tokens(engine, jobs, static, mode):
    """In static mode: a second run does."""
    switch(engine, mode, 1.0)
    assert [result.tokens for result in engine.run(jobs)] == static


@pytest.mark.parametrize(("mode", "fraction"), [("plain", None), ("cap-accept", 0.3), ("compact", None)])
def test_other_shapes_part_at_near_ties(engine, jobs, static, mode, fraction):
    """The first difference of each prompt, with the gap of the two best logits there."""
    switch(engine, mode, fraction)
    got = [result.tokens for result in engine.run(jobs)]
    assert_parts_at_near_ties(engine, jobs, static, got, mode)
