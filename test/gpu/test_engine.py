"""Decode steps on a GPU, captured: a CPU's output, and the same bits in every mode, in every run and without graphs."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch

from flashspark.engine.graph_runner import EagerRunner, GraphRunner
from flashspark.speculative.step_graphs import PieceKey, StepNumbers, reachable_pieces
from flashspark.speculative.tiers import capture_lens
from gpu.setting import NEEDS_GPU, NUM_PROMPTS, NUM_TOKENS, ON_GPU, build, mixed_jobs, prompts, switch
from harness import Harness, Job, count_excused
from unit.test_step_graphs import tensors

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def engine() -> Harness:
    return build()


@pytest.fixture(scope="module")
def on_cpu() -> tuple[Harness, list[Job], list[list[int]]]:
    """Plain decoding on the CPU, and what it says."""
    harness = Harness("demo", device="cpu", dtype="float32", max_running_requests=16)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts(NUM_PROMPTS)]
    return harness, jobs, [result.tokens for result in harness.run(jobs)]


@pytest.mark.parametrize(
    ("mode", "fraction"),
    [
        ("plain", None),
        ("static", None),
        *(("cap-accept", fraction) for fraction in (None, 0.25)),
        *(("compact", fraction) for fraction in (None, 0.05, 0.5, 1.0)),
    ],
)
def test_greedy_output_is_the_cpus(engine, on_cpu, mode, fraction):
    plain, jobs, expected = on_cpu
    switch(engine, mode, fraction)
    results = engine.run(jobs)
    got = [result.tokens for result in results]
    excused = count_excused(plain, jobs, expected, got)
    num_tokens = sum(map(len, got))
    print(f"{excused} near-ties excused in {num_tokens} tokens")
    assert num_tokens == NUM_PROMPTS * NUM_TOKENS
    assert excused * 10_000 <= max(num_tokens, 10_000)
    records = [record for record in engine.scheduler.records if record.num_reqs]
    trimmed = sum(record.plan is not None and not record.plan.verify.full for record in records)
    assert (trimmed > 0) == (mode in ("cap-accept", "compact") and fraction != 1.0)
    num_steps = sum(result.stats.num_verify_steps for result in results)
    assert (num_tokens > num_steps) == (mode != "plain")


@contextmanager
def logits_of_steps(harness: Harness):
    """Copies of what every verify piece left for rows that somebody looks at. Others may read the scratch page, to
    which several rows write at once: those past a cutoff, and the anchor of a request that reached its limit while the
    step was launched, which may lie behind its last page."""
    graphs, kept = harness._worker.graphs, []
    state, verify = harness._worker.runner.request_rows, graphs.verify

    def keeping(shape, width):
        rows = graphs.rows(shape.num_slots)
        goes_on = (state.context_lens[rows] + 1 < state.max_lens[rows]) & (rows != state.scratch_row)
        piece = verify(shape, width)
        block_rows = piece.layout.block_rows
        counts = torch.arange(block_rows.shape[1], device=block_rows.device) < piece.cutoff[:, None]
        kept.append(piece.logits[block_rows[counts & goes_on[:, None]]])
        return piece

    graphs.verify = keeping
    try:
        yield kept
    finally:
        del graphs.verify


def test_full_budgets_are_static_bit_by_bit(engine):
    """The same launches: equal logits of all steps of a batch that grows and shrinks, and so equal tokens."""
    jobs = [Job(p, 40 - 3 * i, arrive=2 * i) for i, p in enumerate(prompts(8))]
    runs = []
    for mode in ("static", "cap-accept", "compact"):
        switch(engine, mode, 1.0)
        with logits_of_steps(engine) as logits:
            results = engine.run(jobs)
        runs.append(([result.tokens for result in results], [result.steps for result in results], logits))
    static = runs[0]
    for tokens, steps, logits in runs[1:]:
        assert tokens == static[0]
        assert steps == static[1]
        assert len(logits) == len(static[2]) > 15
        for got, expected in zip(logits, static[2], strict=True):
            assert torch.equal(got, expected)


def walk(harness: Harness) -> dict:
    """A batch of changing size whose budget is pinned to something else in every step: outputs, logits and shapes."""
    runner, used, rng = harness._worker.graphs._step_runner, [], random.Random(3)
    fractions = [i / 16 for i in range(1, 17)]
    # Up, down, at random.
    schedule = [*fractions, *fractions[::-1], *(rng.choice(fractions) for _ in range(400))]
    step, run = harness.scheduler.step, runner.run

    def recording(key, body):
        used.append(key)
        return run(key, body)

    def pinned_step():
        harness._worker.adaptive.planner.pin(schedule[harness.scheduler.num_steps])
        step()

    runner.run, harness.scheduler.step = recording, pinned_step
    with logits_of_steps(harness) as logits:
        results = harness.run(mixed_jobs(12, NUM_TOKENS))
    del runner.run, harness.scheduler.step
    return {
        "tokens": [result.tokens for result in results],
        "steps": [result.steps for result in results],
        "plans": harness.scheduler.verification_state()["plan_hash"],
        "logits": logits,
        "used": used,
        "harness": harness,
    }


@pytest.fixture(scope="module")
def first_walk() -> dict:
    return walk(build(8))


def assert_same_walk(a: dict, b: dict) -> None:
    for name in ("tokens", "steps", "plans", "used"):
        assert a[name] == b[name], name
    assert len(a["logits"]) == len(b["logits"])
    differing = [
        i for i, pair in enumerate(zip(a["logits"], b["logits"], strict=True)) if not torch.equal(*pair)
    ]
    assert not differing, f"logits of steps {differing[:5]} of {len(a['logits'])} differ"


def test_two_runs_agree_exactly(first_walk):
    assert_same_walk(first_walk, walk(build(8)))


def test_graphs_change_nothing(first_walk):
    """Through the buckets and tiers up, down and at random; every piece that was asked for had been captured."""
    eager = walk(build(8, disable_cuda_graph=True))
    assert_same_walk(first_walk, eager)
    shapes = {key.shape for key in first_walk["used"] if key.kind == "verify"}
    assert len(shapes) >= 12, shapes
    if ON_GPU:
        runner = first_walk["harness"]._worker.graphs._step_runner
        assert isinstance(runner, GraphRunner) and set(first_walk["used"]) <= runner.keys
        assert isinstance(eager["harness"]._worker.graphs._step_runner, EagerRunner)


def decoding(harness: Harness, jobs: list[Job]) -> None:
    """Brings all `jobs` to where they decode; they are left running."""
    from harness import Result, to_message

    for i, job in enumerate(jobs):
        harness.results[f"r{i}"] = Result()
        harness.scheduler.add(to_message(f"r{i}", job))
    for _ in range(100):
        harness.scheduler.step()
        residents = harness.scheduler.residency.residents
        if len(residents) == len(jobs) and all(request.is_decodable for request in residents):
            return
    raise AssertionError("they do not all decode")


def finish(harness: Harness) -> None:
    """Ends what is running."""
    harness.scheduler.abort(list(harness.results), "enough")
    while harness.scheduler.has_work:
        harness.scheduler.step()
    harness.assert_everything_is_free()


@torch.inference_mode()
def test_the_whole_grid_up_down_and_at_random(engine):
    """Every captured shape over real contexts, full and with an absent slot, gives what its body gives when called."""
    switch(engine, "static")
    decoding(engine, [Job(p, 200) for p in prompts(16)])
    engine.scheduler.settle()
    graphs, rows = engine._worker.graphs, engine._worker.runner.request_rows
    captured = graphs._step_runner
    state = rows.context_lens.clone(), rows.anchors.clone()
    # A block before their ends, so that they have pages for another; what lies there is written over.
    starts = (state[0] - graphs.width).clamp(min=1)

    def run(key: PieceKey, num_absent: int, runner) -> list[torch.Tensor]:
        """Copies of all that the pieces of a step of this shape leave."""
        graphs._step_runner = runner
        rows.context_lens.copy_(starts)
        rows.anchors.copy_(state[1])
        lens = [1] * key.shape.num_slots if key.width == 1 else capture_lens(key.shape, key.width)
        lens = lens[: key.shape.num_slots - num_absent]
        graphs.load(StepNumbers(range(len(lens)), lens, lens, lens, 0), key.shape.num_slots)
        drafted = graphs.draft(key.shape.num_slots, False, False).tokens.clone() if key.width > 1 else None
        verified = graphs.verify(key.shape, key.width)
        accepted = graphs.accept(key.shape, key.width, verified)
        num_rows, num_reqs = sum(lens), len(lens)
        found = [
            verified.logits[:num_rows],
            verified.cutoff,
            rows.context_lens[:num_reqs],
            rows.anchors[:num_reqs],
        ]
        found += [accepted.tokens[:num_reqs], accepted.num_tokens[:num_reqs]]
        found += [] if drafted is None else [drafted[:num_reqs]]
        return [tensor.clone() for tensor in found]

    keys = [key for key in reachable_pieces(graphs.grid, graphs.width, (False,)) if key.kind == "verify"]
    keys.sort(key=lambda key: (key.shape.num_slots, key.shape.num_tokens, key.width))
    rng = random.Random(0)
    absent = {key: rng.randrange(2) if key.shape.num_slots > 1 else 0 for key in keys}
    expected = {key: run(key, absent[key], EagerRunner()) for key in keys}
    for order in (keys, keys[::-1], rng.sample(keys, len(keys))):
        for key in order:
            for got, wanted in zip(run(key, absent[key], captured), expected[key], strict=True):
                assert torch.equal(got, wanted), key
    graphs._step_runner = captured
    rows.context_lens.copy_(state[0])
    rows.anchors.copy_(state[1])
    assert len(keys) > 20 and len(tensors(tuple(expected[keys[0]]))) >= 6
    finish(engine)
    assert engine.scheduler.flush_cache()  # of pages that are no longer what their tokens say


@contextmanager
def no_waiting():
    """Whatever makes the host wait for the device is an error, but for events: the relay's, and the results'."""
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("mode", ["plain", "static", "cap-accept", "compact"])
def test_steps_wait_for_nothing_but_events(engine, mode, kind):
    """After a few steps to warm up, with all requests decoding."""
    sampling = {
        "greedy": {},
        "sampled": {"temperature": 0.9, "top_p": 0.9},
        "penalised": {"temperature": 0.9, "frequency_penalty": 0.3},
    }[kind]
    switch(engine, mode)
    decoding(engine, [Job(p, 400, sampling=sampling) for p in prompts(6)])
    for _ in range(8):
        engine.scheduler.step()
    before = engine.scheduler.totals["output_tokens"]
    with no_waiting():
        for _ in range(20):
            engine.scheduler.step()
    assert engine.scheduler.totals["output_tokens"] - before >= 6 * 19
    finish(engine)
