"""What goes wrong for one request ends that request alone, and requests that take too long end with a reason."""

from __future__ import annotations

import logging

import pytest

from flashspark.ipc import FinishReason
from flashspark.scheduler.deadlines import Deadlines
from flashspark.scheduler.process import read_deadlines
from flashspark.speculative.adaptive import VerifyMode
from harness import Harness, Job, Result, to_message
from tiny_models import write_dflash2, write_target

POISON = 13  # a request of this many tokens is the one that fails
PROMPTS = [[70, 71, 72], [80] * 20, [90, 91, 92, 93, 94]]


class Bug(Exception):
    """Something nobody has thought of."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    return target, write_dflash2(folder / "draft", target)


def engine(pair, mode: VerifyMode, **args) -> Harness:
    harness = Harness(*pair, max_running_requests=4, **args)
    if mode is not VerifyMode.STATIC:
        harness.make_adaptive(mode)
    return harness


def jobs(poison: dict | None) -> list[Job]:
    good = [Job(prompt, 12, sampling={"temperature": 1.0, "seed": i}) for i, prompt in enumerate(PROMPTS)]
    return good if poison is None else [good[0], Job([75, 76], POISON, **poison), *good[1:]]


def spoil(monkeypatch, owner: object, name: str, is_poisoned) -> None:
    """From now on `owner.name` fails for the poisoned request."""
    work = getattr(owner, name)

    def failing(*arguments, **options):
        if is_poisoned(*arguments):
            raise Bug("told to fail")
        return work(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


def row_of_poison(harness: Harness) -> int | None:
    """The row of the poisoned request while it has one."""
    rows = [
        r.row for r in harness.scheduler.residency.residents if r.message.sampling.max_new_tokens == POISON
    ]
    return rows[0] if rows else None


def plant(monkeypatch, harness: Harness, where: str) -> None:
    scheduler, worker = harness.scheduler, harness._worker
    match where:
        case "arrival":
            spoil(monkeypatch, scheduler, "_make_request", lambda m: m.sampling.max_new_tokens == POISON)
        case "row":
            spoil(
                monkeypatch,
                worker.sampling,
                "_make_adjustment",
                lambda params, *_: params.logit_bias == {9: 1.0},
            )
        case "step":
            spoil(
                monkeypatch,
                worker.sampling,
                "begin_step",
                lambda rows, row_list, *_: row_of_poison(harness) in row_list,
            )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", VerifyMode)
@pytest.mark.parametrize("where", ["arrival", "row", "step", "end"])
def test_a_bug_in_one_requests_sampling_fails_alone(pair, monkeypatch, caplog, mode, where, overlap):
    expected = [result.tokens for result in engine(pair, mode).run(jobs(None))]
    harness = engine(pair, mode, enable_overlap_schedule=overlap)
    if where == "end":
        make = harness.scheduler._make_request

        def make_blind(message):
            request = make(message)
            if message.sampling.max_new_tokens == POISON:
                spoil(monkeypatch, request.stop_checker, "push", lambda token: len(request.tokens) > 4)
            return request

        monkeypatch.setattr(harness.scheduler, "_make_request", make_blind)
    else:
        plant(monkeypatch, harness, where)
    with caplog.at_level(logging.ERROR):
        first, poisoned, *others = harness.run(jobs({"sampling": {"logit_bias": {9: 1.0}}}))
    assert [first.tokens, *(result.tokens for result in others)] == expected
    assert poisoned.finish == FinishReason(
        "abort", message="internal error (Bug); the log says more", status_code=500
    )
    assert "request 'job1' failed" in caplog.text
    assert harness.scheduler.state()["finished"] == len(PROMPTS)


@pytest.mark.parametrize("num_good_steps", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_for_everybody_ends_the_engine(pair, monkeypatch, overlap, num_good_steps):
    harness, left = engine(pair, VerifyMode.STATIC, enable_overlap_schedule=overlap), [num_good_steps]

    def is_over(*_) -> bool:
        left[0] -= 1
        return left[0] < 0

    spoil(monkeypatch, harness._worker.sampling, "begin_step", is_over)
    with pytest.raises(Bug):
        harness.run(jobs(None))


def test_a_bug_in_admission_itself_is_the_engines(pair, monkeypatch):
    harness = engine(pair, VerifyMode.STATIC)
    spoil(monkeypatch, harness.scheduler.residency.allocator, "allocate", lambda *_: True)
    with pytest.raises(Bug):
        harness.run(jobs(None))


def test_requests_that_take_too_long_end_with_503(pair):
    harness = Harness(*pair, max_running_requests=1)
    scheduler = harness.scheduler
    harness.results = {name: Result() for name in "abc"}
    for name in harness.results:
        scheduler.add(to_message(name, Job(PROMPTS[0], 200)))
    scheduler.step()
    (running,) = scheduler.residency.residents
    assert running.queue_seconds is not None
    now_s = running.arrived_s + running.queue_seconds
    scheduler.expire(Deadlines(), now_s + 1e9)
    scheduler.expire(Deadlines(waiting_s=10, running_s=20), now_s + 9)
    assert all(result.finish is None for result in harness.results.values())
    scheduler.expire(Deadlines(waiting_s=10, running_s=20), now_s + 15)
    ends = [result.finish for result in harness.results.values()]
    assert ends[0] is None
    waited = "the server ended this request: it may wait for a row 10 s"
    assert ends[1] == ends[2] == FinishReason("abort", message=waited, status_code=503)
    scheduler.expire(Deadlines(waiting_s=10, running_s=5), now_s + 15)
    assert "may run 5 s" in harness.results["a"].finish.message
    harness.assert_everything_is_free()
    assert scheduler.state()["aborted"] == 3


def test_deadlines_come_from_the_environment(monkeypatch):
    assert read_deadlines() == Deadlines(None, None)
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "1.5")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "0")
    assert read_deadlines() == Deadlines(1.5, 0.0)
