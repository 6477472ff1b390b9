"""The relay under a fake event clock: copies end when the test says so, and plans never depend on when that is."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.speculative.adaptive import AdaptiveVerifier, VerifyMode
from flashspark.speculative.cost_table import SpsCostTable
from flashspark.speculative.objective import fresh_rows
from flashspark.speculative.planner import VerifyPlanner
from flashspark.speculative.planner_input import PlanInput, PlannerSettings
from flashspark.speculative.relay import ConfidenceRelay, ImmediateCopies, RowGenerations
from flashspark.speculative.tiers import TierGrid, TierRule

NUM_ROWS, GAMMA = 6, 3
CPU = torch.device("cpu")


class FakeCopy:
    def __init__(self, engine, source, target):
        self.engine, self.source, self.target = engine, source, target

    def wait_on_host(self):
        self.engine.finish(self)

    def wait_on_device(self):
        # Later device work runs at once in this test, so making it wait means finishing the copy now.
        if self.engine.honours_device_waits:
            self.engine.finish(self)


class FakeCopies:
    """Copies read their source when they end, not when they start, and until then their target holds garbage."""

    def __init__(self, honours_device_waits=True):
        self.honours_device_waits, self.in_flight = honours_device_waits, []

    def start(self, source, target):
        assert all(copy.target is not target for copy in self.in_flight), "a slot is written twice at once"
        target.fill_(float("nan"))
        self.in_flight.append(FakeCopy(self, source, target))
        return self.in_flight[-1]

    def finish(self, copy):
        while copy in self.in_flight:  # one stream: in order
            self.finish_oldest()

    def finish_oldest(self):
        if self.in_flight:
            copy = self.in_flight.pop(0)
            copy.target.copy_(copy.source)


def trace_of(seed, num_steps):
    """Per step: rows that leave and come back with a new owner, rows that decode, and their confidence."""
    rng = np.random.default_rng(seed)
    trace = []
    for _ in range(num_steps):
        recycled = [r for r in range(NUM_ROWS) if rng.random() < 0.15]
        members = sorted(rng.choice(NUM_ROWS, rng.integers(1, NUM_ROWS + 1), replace=False).tolist())
        trace.append((recycled, members, rng.random((len(members), GAMMA)).astype(np.float32)))
    return trace


def run(trace, copies, ends):
    """What each step resolves. `ends()` says how many copies to end between two actions."""
    relay, generations = ConfidenceRelay(NUM_ROWS, GAMMA, CPU, copies), RowGenerations(NUM_ROWS)
    for row in range(NUM_ROWS):
        generations.renew(row)
    resolved = []
    for recycled, members, confidence in trace:
        for row in recycled:
            generations.renew(row)
        for _ in range(ends()):
            copies.finish_oldest()
        resolved.append((relay.resolve(members), generations.of(members)))
        for _ in range(ends()):
            copies.finish_oldest()
        relay.publish(torch.tensor(members), members, torch.from_numpy(confidence), generations.of(members))
    return resolved


def expected(trace):
    """The same without a relay: whole snapshots, looked up two publications back."""
    values = np.ones((NUM_ROWS, GAMMA), dtype=np.float32)
    written, current = np.zeros(NUM_ROWS, dtype=np.int64), np.ones(NUM_ROWS, dtype=np.int64)
    snapshots, answers = [], []
    for recycled, members, confidence in trace:
        current[recycled] += 1
        answers.append(
            (snapshots[-2][0][members], snapshots[-2][1][members]) if len(snapshots) >= 2 else None
        )
        values[members], written[members] = confidence, current[members]
        snapshots.append((values.copy(), written.copy()))
    return answers


def assert_same(resolved, answers):
    for (got, _), want in zip(resolved, answers, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.confidence.tobytes() == want[0].tobytes() and got.confidence.dtype == np.float32
            assert got.generations.tolist() == want[1].tolist()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), num_steps=st.integers(1, 12), data=st.data())
def test_any_interleaving_of_copies_gives_the_publication_two_before(seed, num_steps, data):
    trace = trace_of(seed, num_steps)
    resolved = run(trace, FakeCopies(), lambda: data.draw(st.integers(0, 3)))
    assert_same(resolved, expected(trace))


def test_the_cpu_engine_gives_the_same():
    trace = trace_of(3, 20)
    copies = ImmediateCopies()
    assert_same(run(trace, copies, lambda: 0), expected(trace))


def test_the_clock_would_notice_a_relay_that_does_not_wait_before_it_writes():
    trace = trace_of(3, 20)
    resolved = run(trace, FakeCopies(honours_device_waits=False), lambda: 0)
    with pytest.raises(AssertionError):
        assert_same(resolved, expected(trace))


def test_too_few_publications_are_none_and_answers_are_the_readers_own():
    relay = ConfidenceRelay(NUM_ROWS, GAMMA, CPU)
    rows, ones = torch.tensor([2]), np.ones(1, dtype=np.int64)
    for step in range(2):
        assert relay.resolve([2]) is None
        relay.publish(rows, [2], torch.full((1, GAMMA), 0.1 * (step + 1)), ones)
    first = relay.resolve([2, 4])
    assert first.confidence.tolist() == [[pytest.approx(0.1)] * GAMMA, [1.0] * GAMMA]  # never written: ones
    assert first.generations.tolist() == [1, 0]
    first.confidence[:] = -1
    assert relay.resolve([2]).confidence.tolist() == [[pytest.approx(0.1)] * GAMMA]


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_a_recycled_row_is_never_fresh(seed, data):
    """Whenever it is handed out between publication and resolve, written since or not."""
    trace = trace_of(seed, 8)
    owners, writes = [0] * NUM_ROWS, []
    resolved = run(trace, FakeCopies(), lambda: data.draw(st.integers(0, 2)))
    last_written = []
    for recycled, members, _ in trace:
        for row in recycled:
            owners[row] += 1
        writes.append({**(writes[-1] if writes else {}), **{row: owners[row] for row in members}})
        last_written.append(list(owners))
    for step, ((got, current), (_, members, _)) in enumerate(zip(resolved, trace, strict=True)):
        if got is not None:
            fresh = fresh_rows(got.generations, current)
            for row, is_fresh in zip(members, fresh, strict=True):
                assert is_fresh == (writes[step - 2].get(row) == last_written[step][row])


def test_a_row_handed_out_but_not_yet_written_is_not_fresh():
    """Chunked prefill: others decode and publish while the new owner has no confidence yet."""
    relay, generations = ConfidenceRelay(NUM_ROWS, GAMMA, CPU), RowGenerations(NUM_ROWS)
    for row in (0, 1):
        generations.renew(row)
    relay.publish(torch.tensor([0, 1]), [0, 1], torch.full((2, GAMMA), 0.2), generations.of([0, 1]))
    generations.renew(1)
    for _ in range(3):
        relay.publish(torch.tensor([0]), [0], torch.full((1, GAMMA), 0.3), generations.of([0]))
    got = relay.resolve([0, 1])
    assert fresh_rows(got.generations, generations.of([0, 1])).tolist() == [True, False]


def plans(resolved):
    grid = TierGrid(TierRule(width=GAMMA + 1, max_num_reqs=NUM_ROWS, finest_tokens=2))
    table = SpsCostTable(tuple(range(1, 25)), tuple(100.0 / (1 + 0.1 * t) for t in range(1, 25)), 24)
    planner = VerifyPlanner(PlannerSettings(gamma=GAMMA), table, grid)
    decisions = []
    for relayed, current in resolved:
        n = len(current)
        batch = PlanInput(
            relayed, current, np.full(n, GAMMA + 1), np.zeros(n, dtype=bool), np.zeros(n, dtype=np.int64)
        )
        plan = planner.plan(batch)
        decisions.append((plan.verify.budget, plan.verify.tier))
    return decisions


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_ranks_with_different_clocks_plan_alike_and_so_do_overlap_and_none(seed, data):
    trace = trace_of(seed, 10)
    on_time = plans(run(trace, ImmediateCopies(), lambda: 0))  # no overlap: a copy is there at once
    late = plans(run(trace, FakeCopies(), lambda: 0))  # overlap at its worst: only waiting ends a copy
    random = plans(run(trace, FakeCopies(), lambda: data.draw(st.integers(0, 3))))
    assert on_time == late == random
    assert [budget is None for budget, _ in on_time] == [True, True] + [False] * 8


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), every=st.sampled_from([0, 4]))
def test_what_the_verifier_keeps_between_steps_is_what_a_relay_asked_anew_says(seed, every):
    rng = np.random.default_rng(seed)
    source = SimpleNamespace(gamma=GAMMA, is_ready=True, assign=lambda *args, **kwargs: None)
    asked = []
    planner = SimpleNamespace(
        settings=PlannerSettings(gamma=GAMMA, min_drafts_every=every),
        looks=lambda num_reqs, num_rows: True,
        plan=lambda batch: asked.append(batch) or SimpleNamespace(draft=True),
    )
    verifier = AdaptiveVerifier(VerifyMode.COMPACT, planner, source, NUM_ROWS, CPU)
    relay, generations = ConfidenceRelay(NUM_ROWS, GAMMA, CPU), RowGenerations(NUM_ROWS)
    rows, caps = [0, 1, 2], [4, 4, 4]
    for _ in range(60):
        if rng.random() < 0.1:
            rows = rng.permutation(NUM_ROWS)[: len(rows)].tolist()
        if rng.random() < 0.1:
            caps = rng.integers(2, GAMMA + 2, len(rows)).tolist()
        if rng.random() < 0.1:
            row = int(rng.choice(rows))
            verifier.assign(row, None, speculates=True)
            generations.renew(row)
        source.is_ready = rng.random() < 0.9
        keeps, waited = (rng.random(3) < 0.03).tolist(), rng.integers(0, 5, 3).tolist()
        verifier.plan(list(rows), list(caps), keeps, waited)
        expected, got = relay.resolve(rows) if source.is_ready else None, asked[-1]
        assert got.generations.tolist() == generations.of(rows).tolist() and got.caps.tolist() == caps
        assert (got.relayed is None) == (expected is None)
        if expected is not None:
            assert got.relayed.confidence.tolist() == expected.confidence.tolist()
            assert got.relayed.generations.tolist() == expected.generations.tolist()
        assert (None if got.keeps_block is None else got.keeps_block.tolist()) == (
            keeps if any(keeps) else None
        )
        assert (got.num_steps_without_draft is None) == (every == 0 or max(waited) < 4)
        if rng.random() < 0.4:
            confidence = torch.from_numpy(rng.random((3, GAMMA), dtype=np.float32))
            verifier.relay(torch.tensor(rows), list(rows), confidence)
            relay.publish(torch.tensor(rows), rows, confidence, generations.of(rows))
    source.is_ready = True
    for _ in range(2):
        verifier.plan(rows, caps, [False] * 3, [0] * 3)
    assert asked[-1] is asked[-2]


@pytest.mark.gpu
def test_streams_give_the_same():
    device = torch.device("cuda")
    trace = trace_of(5, 30)
    relay, generations = ConfidenceRelay(NUM_ROWS, GAMMA, device), RowGenerations(NUM_ROWS)
    for row in range(NUM_ROWS):
        generations.renew(row)
    resolved = []
    for recycled, members, confidence in trace:
        for row in recycled:
            generations.renew(row)
        resolved.append((relay.resolve(members), generations.of(members)))
        rows = torch.tensor(members, device=device)
        relay.publish(rows, members, torch.from_numpy(confidence).to(device), generations.of(members))
    assert_same(resolved, expected(trace))
