"""The overlapped step loop against its synchronous twin: the same tokens, plans and numbers, and nothing read early."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashspark.args import ServerArgs
from flashspark.args.server_args import ArgumentError
from flashspark.ipc import LogprobParams
from flashspark.speculative import step_results
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.looks import LookRule
from flashspark.speculative.step_results import StepReader
from flashspark.speculative.types import Accepted
from harness import AS_ON_GPU, NEAR_TIE, Harness, Job, Result, first_difference, near_tie_gap, to_message
from unit.test_lossless_adaptive import LINEAR, drafts, grid  # noqa: F401 - fixture
from unit.test_lossless_tiny import WIDTH, folders, plain, prompts  # noqa: F401 - fixtures
from unit.test_step_graphs import in_pieces

DRAFTS = [None, "dflash2"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_step_fails(caplog):
    """One that does is tried again, which would hide it."""
    yield
    assert not [r for r in caplog.get_records("call") if "a step failed" in r.getMessage()]


def engine(folders, draft="dflash2", overlap=True, mode=VerifyMode.STATIC, **args) -> Harness:  # noqa: F811
    args |= {"enable_overlap_schedule": overlap, "disable_overlap_schedule": not overlap}
    harness = Harness(folders["target"], folders[draft], **args)
    if mode is not VerifyMode.STATIC:
        harness.make_adaptive(mode, LINEAR, grid(48), min_gain=0.0, draft_free=None).source.num_refits = 100
    return harness


def twins(folders, *arguments, **options) -> list[Harness]:  # noqa: F811
    """The reference first."""
    return [engine(folders, *arguments, overlap=overlap, **options) for overlap in (False, True)]


def seen(result: Result) -> tuple:
    """What a client is told, in steps as they came."""
    return result.tokens, result.steps, result.finish, result.stats, result.origins


def logprobs_of(result: Result) -> list[float]:
    return [value for message in result.logprobs for value in message.values]


def assert_alike(jobs: list[Job], expected: list[Result], got: list[Result]) -> None:
    """All that clients see, of requests that nobody aborts; of those, one beginning."""
    for job, reference, result in zip(jobs, expected, got, strict=True):
        if job.abort is None:
            assert seen(result) == seen(reference)
            # The batch may be another one at the time, and float sums depend on how many rows there are.
            assert logprobs_of(result) == pytest.approx(logprobs_of(reference), abs=1e-5)
        else:
            shorter = min(len(result.tokens), len(reference.tokens))
            assert result.tokens[:shorter] == reference.tokens[:shorter]


def overlapped(harness: Harness) -> int:
    return harness.scheduler.totals["overlapped_steps"]


def mixed(length: int = 30) -> list[Job]:
    """Greedy and drawn, with and without penalties, drafts, stops and seeds; arrivals and two aborts."""
    asked = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 20, "top_p": 0.9},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3},
        {"stop_token_ids": tuple(range(4, 60))},
        {"temperature": 1.0, "seed": 4, "stop_token_ids": tuple(range(4, 100)), "min_new_tokens": 5},
        {"logit_bias": {77: 4.0}},
    ]
    jobs = [
        Job(prompts(12)[i % 12], length - i, arrive=i // 3, sampling=asked[i % len(asked)]) for i in range(16)
    ]
    jobs[3].abort, jobs[8].abort = 4, 9
    jobs[10].speculation = jobs[13].speculation = "off"
    jobs[14].max_verify_len = 2
    return jobs


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("draft", DRAFTS)
def test_twins_say_the_same(folders, draft, cache):  # noqa: F811
    reference, overlapping = twins(folders, draft, disable_radix_cache=not cache)
    jobs = mixed()
    assert_alike(jobs, reference.run(jobs), overlapping.run(jobs))
    assert overlapped(reference) == 0 and overlapped(overlapping) > 10
    names = ("finished", "aborted")
    assert [reference.scheduler.totals[n] for n in names] == [overlapping.scheduler.totals[n] for n in names]
    dropped = sum(record.num_dropped_reqs for record in overlapping.scheduler.records)
    assert dropped >= 3  # those that a stop or an abort ended while a step was in flight
    assert all(record.num_dropped_reqs == 0 for record in reference.scheduler.records)


@pytest.mark.parametrize("mode", [VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT], ids=lambda mode: mode.value)
def test_seeded_and_greedy_requests_under_plans(folders, mode):  # noqa: F811
    """What is trimmed may differ where requests end; what comes out may not."""
    reference, overlapping = twins(folders, mode=mode)
    jobs = [job for job in mixed() if job.abort is None]
    expected, got = reference.run(jobs), overlapping.run(jobs)
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert [r.finish for r in got] == [r.finish for r in expected]
    assert overlapped(overlapping) > 10
    assert sum(r.plan is not None and not r.plan.verify.full for r in overlapping.scheduler.records) > 5


def test_retraction_waits_for_the_step_in_flight(folders):  # noqa: F811
    """In a pool that is too small for all, drawn outputs go on with the same draws after every retraction."""
    reference, overlapping = twins(folders, max_total_tokens=160)
    jobs = [Job(p, 40, sampling={"temperature": 1.0, "seed": i}) for i, p in enumerate(prompts(9))]
    jobs += [Job(p, 30, sampling={"frequency_penalty": 0.5}) for p in prompts(4)]
    expected, got = reference.run(jobs), overlapping.run(jobs)
    assert [seen(r)[:3] for r in got] == [seen(r)[:3] for r in expected]
    assert sum(r.num_retractions for r in got) > 1
    assert overlapped(overlapping) > 10
    assert overlapping.scheduler.residency.num_retractions == sum(r.num_retractions for r in got)


def watch_slots(harness: Harness) -> Counter[str]:
    """Counts from now on where verify steps write: to their requests' own pages, as held at the launch, to scratch, but
    what is past the requests' ends alone, or elsewhere."""
    where: Counter[str] = Counter()
    worker, runner = harness._worker, harness._worker.runner
    decode, verify, state = worker.decode, runner.verify, runner.request_rows
    owners: list[tuple[int, list[int]]] = []

    def watched_decode(batch):
        owners[:] = [(row, harness.request_in_row(row).pages) for row in batch.row_list]
        return decode(batch)

    def watched_verify(input_ids, queries, *out):
        indptr, lens, limits = (
            values.tolist() for values in (queries.qo_indptr, state.context_lens, state.max_lens)
        )
        for i, (row, pages) in enumerate(owners):
            for j, slot in enumerate(queries.slots[indptr[i] : indptr[i + 1]].tolist()):
                page, is_past = slot // state.page_size, lens[row] + j + 1 >= limits[row]
                place = "own" if page in pages else "scratch" if page == 0 and is_past else "elsewhere"
                where[place] += 1
        return verify(input_ids, queries, *out)

    worker.decode, runner.verify = watched_decode, watched_verify
    return where


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("room", [0, 5])
def test_nothing_is_written_behind_a_requests_pages(folders, drafts, page_size, room):  # noqa: F811
    """Requests that fill the context, and the pool, to the last token, and short ones in the rows that these had.

    The draft knows what follows, so that steps are launched with caps far beyond what is left.
    """
    context = 64
    arguments = {
        "context_length": context,
        "max_total_tokens": (-(-(context - 1) // page_size) + room) * page_size,
        "page_size": page_size,
        "max_running_requests": 2,
        "disable_cuda_graph": True,  # `watch_slots` sees no replay
    }
    reference, overlapping = (
        engine({**folders, "dspark": drafts["dspark"]}, "dspark", overlap, **arguments)
        for overlap in (False, True)
    )
    where = watch_slots(overlapping)
    long = [prompt for prompt in prompts(12) if len(prompt) > 33]
    short = [prompt for prompt in prompts(12) if len(prompt) < 13]
    lengths = [
        (p, n) for pair in zip(long, short, strict=False) for p, n in zip(pair, (context, 17), strict=True)
    ]
    jobs = [
        Job(p, n - len(p), sampling={"temperature": i % 5 // 3, "seed": i})
        for i, (p, n) in enumerate(lengths)
    ]
    expected, got = reference.run(jobs), overlapping.run(jobs)
    assert [seen(r)[:3] for r in got] == [seen(r)[:3] for r in expected]
    assert [len(job.prompt) + len(r.tokens) for job, r in zip(jobs, got, strict=True)] == [context, 17] * 4
    assert where["own"] > 200 and where["scratch"] > 0 and where["elsewhere"] == 0


@pytest.mark.parametrize("draft", DRAFTS)
def test_max_new_tokens_at_its_edges(folders, draft):  # noqa: F811
    reference, overlapping = twins(folders, draft)
    lengths = [1, 2, 3, WIDTH - 1, WIDTH, WIDTH + 1, 2 * WIDTH, 2 * WIDTH + 1, 3 * WIDTH - 1]
    jobs = [
        Job(p, n, arrive=i, sampling={"temperature": float(i % 2), "seed": i}, token_origin=True)
        for i, (p, n) in enumerate(zip(prompts(9), lengths, strict=True))
    ]
    got = overlapping.run(jobs)
    assert_alike(jobs, reference.run(jobs), got)
    assert [len(result.tokens) for result in got] == lengths


def plans_of(harness: Harness, jobs: list[Job]) -> list[tuple]:
    """What decides shapes, and what the plans were made of, while everybody has a full block to go."""
    harness.run(jobs)
    plans = [record.plan for record in harness.scheduler.records if record.num_reqs]
    num_full = next(i for i, plan in enumerate(plans) if len(plan.caps) < len(jobs) or min(plan.caps) < WIDTH)
    return [
        (plan.verify, plan.draft, plan.floors.tolist(), plan.caps.tolist(), plan.record.stages)
        for plan in plans[:num_full]
    ]


@pytest.mark.parametrize("mode", [VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT], ids=lambda mode: mode.value)
def test_plans_are_identical_while_nobody_comes_or_goes(folders, mode):  # noqa: F811
    jobs = [Job(p, 60, sampling={"temperature": i % 2 / 2}) for i, p in enumerate(prompts(8))]
    plans = []
    for harness in twins(folders):
        looks = LookRule(idle_every=1, kept_every=1, poor_every=1)
        adaptive = harness.make_adaptive(
            mode, LINEAR, grid(48), min_gain=0.0, draft_free=None, look_rule=looks, min_drafts_every=2
        )
        adaptive.source.num_refits = 100
        plans.append(plans_of(harness, jobs))
    same = min(map(len, plans))
    assert plans[0][:same] == plans[1][:same] and same > 10
    assert sum(not verify.full for verify, *_ in plans[0]) > 5
    stages = Counter(stage.reason for *_, stages in plans[0] for stage in stages)
    assert stages["raised"] > 0  # the fairness floor, which looks at outcomes


# What must be collected first


def test_log_probabilities_are_collected_at_once(folders):  # noqa: F811
    reference, overlapping = twins(folders)
    jobs = [Job(p, 20, arrive=i) for i, p in enumerate(prompts(4))]
    jobs[2].logprobs = LogprobParams(start=2, num_top=2)
    assert_alike(jobs, reference.run(jobs), overlapping.run(jobs))
    records = [record for record in overlapping.scheduler.records if record.num_reqs]
    together = [record.is_overlapped for record in records if record.num_reqs >= 3]
    assert together and not any(together[1:-3])
    assert overlapped(overlapping) > 0  # before and after it was there


def test_pausing_an_idle_looking_server_and_flushing_it_collect_the_rest(folders):  # noqa: F811
    """A client that has heard the end may count on an idle server, whatever is in flight."""
    harness = engine(folders)
    scheduler = harness.scheduler
    stop = harness.run([Job(prompts(3)[2], 12)])[0].tokens[4]
    for act in (
        lambda: scheduler.flush_cache() or pytest.fail("busy"),
        lambda: scheduler.set_internal_state({"speculation": True}) is None or pytest.fail("busy"),
        scheduler.settle,
        scheduler.close,
    ):
        harness.results = {"r": Result()}
        scheduler.add(to_message("r", Job(prompts(3)[2], 12, sampling={"stop_token_ids": (stop,)})))
        while harness.results["r"].finish is None:
            scheduler.step()
        assert scheduler.has_work  # one more step of the request was launched
        act()
        assert not scheduler.has_work
        harness.assert_everything_is_free()


def test_everybody_is_retracted_with_all_tokens(folders):  # noqa: F811
    reference, harness = twins(folders)
    job = Job(prompts(3)[2], 30, sampling={"temperature": 1.0, "seed": 5})
    expected = reference.run([job])[0]
    scheduler, harness.results = harness.scheduler, {"r": Result()}
    scheduler.add(to_message("r", job))
    for _ in range(4):
        scheduler.step()
    in_flight = scheduler._decoding.in_flight
    assert in_flight is not None
    scheduler.retract_all()
    assert scheduler._decoding.in_flight is None
    while scheduler.has_work:
        scheduler.step()
    assert harness.results["r"].tokens == expected.tokens
    assert harness.results["r"].num_retractions == 1


# Copies that are late


class LateCopies:
    """A copy is made when it is waited for, and not before; its target holds nonsense until then."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.num_started = 0

    def start(self, source, target):
        target.fill_(-(10**9))
        number, self.num_started = self.num_started, self.num_started + 1
        self.events.append(("start", number))

        def wait() -> None:
            self.events.append(("wait", number))
            target.copy_(source)

        return SimpleNamespace(wait_on_host=wait, wait_on_device=wait)


def test_nothing_is_read_before_it_is_waited_for(folders):  # noqa: F811
    reference, overlapping = twins(folders)
    copies = LateCopies()
    overlapping.scheduler._decoding.reader = StepReader(CPU, copies)
    jobs = mixed()
    assert_alike(jobs, reference.run(jobs), overlapping.run(jobs))
    last = copies.num_started - 1
    assert last > 20
    # Step n + 1 is launched before step n is waited for.
    pairs = list(zip(copies.events, copies.events[1:], strict=False))
    early = [a == ("start", b[1] + 1) and b[0] == "wait" for a, b in pairs]
    assert sum(early) == overlapped(overlapping) > 20
    assert [n for what, n in copies.events if what == "wait"] == list(range(last + 1))


def test_results_are_what_was_accepted_and_a_copy_of_it():
    accepted = Accepted(
        tokens=torch.tensor([[5, 6, 7], [8, 0, 0]]),
        num_tokens=torch.tensor([2, 1]),
        verify_lens=torch.tensor([3, 1]),
        num_rows_run=4,
        is_finite=torch.tensor([True, False]),
        num_matched=torch.tensor([1, 2]),
        drafts=torch.tensor([[5, 9], [10, 11]]),
        confidence=torch.tensor([[0.25, float("nan")], [1e-30, 1.0]]),
    )
    copies = LateCopies()
    reader = StepReader(CPU, copies)
    pending = reader.start(accepted, reader.clock(), with_drafts=True)
    brief = reader.start(accepted, reader.clock())
    accepted.tokens.zero_()  # as a replay of a captured step would
    assert copies.events == [("start", 0), ("start", 1)]
    results = pending.wait()
    assert results.tokens == [[5, 6], [8]] and results.verify_lens == [3, 1]
    assert results.is_finite == [True, False] and results.num_matched == [1, 2]
    assert results.drafts == [[5, 9], [10, 11]]
    assert torch.equal(results.confidence.nan_to_num(7.0), accepted.confidence.nan_to_num(7.0))
    assert (brief.wait().tokens, brief.wait().drafts, brief.wait().confidence) == ([[5, 6], [8]], [], None)


def test_a_step_takes_its_own_time_whoever_is_late(folders, monkeypatch):  # noqa: F811
    """By a clock that only this test moves: ten seconds for a step, a thousand for whatever the host does meanwhile."""
    harness = engine(folders, mode=VerifyMode.COMPACT)
    harness.scheduler._decoding.reader = StepReader(CPU)
    now = [0.0]
    monkeypatch.setattr(step_results, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    decode, send = harness._worker.decode, harness.scheduler._send
    told = []

    def slow_decode(batch):
        now[0] += 10
        return decode(batch)

    def slow_send(output):
        now[0] += 1000
        send(output)

    harness._worker.decode, harness.scheduler._send = slow_decode, slow_send
    observe = harness._worker.adaptive.observe_step
    harness._worker.adaptive.observe_step = lambda plan, seconds: (
        told.append(seconds),
        observe(plan, seconds),
    )
    harness.run([Job(p, 20, arrive=i) for i, p in enumerate(prompts(3))])
    records = [record for record in harness.scheduler.records if record.num_reqs]
    assert told == [10.0] * len(records)
    assert {record.decode_ms for record in records} == {10_000.0}


def test_prefill_is_told_of_with_the_step_it_comes_before(folders):  # noqa: F811
    reference, overlapping = twins(folders)
    jobs = [Job(p, 20, arrive=2 * i) for i, p in enumerate(prompts(6))]
    totals = []
    for harness in (reference, overlapping):
        harness.run(jobs)
        totals.append(sum(record.num_prefill_tokens for record in harness.scheduler.records))
    assert totals == [sum(len(job.prompt) - 1 for job in jobs)] * 2


# Steps in pieces of fixed shape


@pytest.mark.parametrize("mode", [VerifyMode.STATIC, VerifyMode.COMPACT], ids=lambda mode: mode.value)
def test_pieces_that_are_run_again_before_their_results_are_read(folders, mode):  # noqa: F811
    """As on a GPU: every step writes where the one before left its results, and copies are late."""
    jobs = [job for job in mixed() if job.abort is None]
    jobs += [Job(p, 17 - len(p), arrive=9) for p in prompts(12) if len(p) < 13]
    expected = engine(folders, overlap=False).run(jobs)
    overlapping = engine(folders, mode=mode, max_running_requests=6, disable_cuda_graph=True)
    in_pieces(overlapping)
    overlapping.scheduler._decoding.reader = StepReader(CPU, LateCopies())
    where = watch_slots(overlapping)
    got = overlapping.run(jobs)
    assert [(r.tokens, r.finish) for r in got] == [(r.tokens, r.finish) for r in expected]
    assert overlapped(overlapping) > 20 and where["elsewhere"] == 0


# Storms


def storm_jobs(data) -> list[Job]:
    """Requests whose output is decided: greedy, or with a seed."""
    integers, some = st.integers, st.sampled_from

    def sampling() -> dict:
        options = data.draw(
            some([{}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.2, "logit_bias": {70: 2.0}}])
        )
        if data.draw(st.booleans()):
            options = options | {"temperature": 1.0, "seed": data.draw(integers(0, 99))}
            options |= data.draw(some([{}, {"top_k": 8}, {"top_p": 0.8}]))
        if data.draw(integers(0, 3)) == 0:
            options = options | {"stop_token_ids": tuple(range(4, data.draw(integers(5, 90))))}
            options |= {"min_new_tokens": data.draw(integers(0, 6))}
        return options

    return [
        Job(
            prompts(12)[data.draw(integers(0, 11))],
            max_new_tokens=data.draw(integers(1, 30)),
            arrive=data.draw(integers(0, 25)),
            abort=data.draw(st.none() | integers(5, 40)),
            speculation=data.draw(some(["static", "off"])),
            max_verify_len=data.draw(st.none() | integers(1, WIDTH)),
            sampling=sampling(),
            logprobs=data.draw(some([None] * 7 + [LogprobParams(start=0, num_top=1)])),
        )
        for _ in range(data.draw(integers(1, 12)))
    ]


def assert_alike_but_for_ties(plain: Harness, jobs: list[Job], expected, got) -> None:  # noqa: F811
    """Tokens alone, since retractions happen at other times; a near-tie ends the comparison of its request."""
    for job, reference, result in zip(jobs, expected, got, strict=True):
        at = first_difference(reference.tokens, result.tokens)
        if job.abort is not None and at == min(len(reference.tokens), len(result.tokens)):
            continue
        if at is None:
            assert result.finish == reference.finish or job.abort is not None
        else:
            assert set(job.sampling) <= {"stop_token_ids", "min_new_tokens"}, (
                "near-ties are of plain greedy text"
            )
            assert near_tie_gap(plain, [*job.prompt, *result.tokens[:at]]) < NEAR_TIE


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_storm(folders, plain, data):  # noqa: F811
    check_storm(folders, plain, data)


@pytest.mark.full
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_of_many_storms(folders, plain, data):  # noqa: F811
    check_storm(folders, plain, data)


def check_storm(folders, plain, data) -> None:  # noqa: F811
    options = {
        "disable_cuda_graph": True,  # `watch_slots` sees no replay
        "max_total_tokens": data.draw(st.integers(6, 30)) * 16,
        "max_running_requests": data.draw(st.integers(1, 8)),
        "page_size": data.draw(st.sampled_from([1, 4, 16])),
        "chunked_prefill_size": data.draw(st.sampled_from([16, 2048])),
        "disable_radix_cache": data.draw(st.booleans()),
    }
    draft, mode = data.draw(st.sampled_from(DRAFTS)), data.draw(st.sampled_from(VerifyMode))
    reference, overlapping = twins(folders, draft, mode=mode if draft else VerifyMode.STATIC, **options)
    if data.draw(st.booleans()):
        in_pieces(overlapping)
    where, jobs = watch_slots(overlapping), storm_jobs(data)
    assert_alike_but_for_ties(plain[0], jobs, reference.run(jobs), overlapping.run(jobs))
    assert where["elsewhere"] == 0


def test_one_twin_is_chosen(folders):  # noqa: F811
    default = Harness(folders["target"])
    assert default.ready.info["overlap_schedule"] is AS_ON_GPU
    for overlap in (False, True):
        assert engine(folders, overlap=overlap).ready.info["overlap_schedule"] is overlap
    with pytest.raises(ArgumentError, match="--enable-overlap-schedule: contradicts"):
        ServerArgs(model_path="demo", enable_overlap_schedule=True, disable_overlap_schedule=True)
