"""Stages are what lies between marks, idle is what lies between steps."""

import torch

from flashspark.engine.stage_clock import StageClock


def play(marks):
    """A clock that saw (name, milliseconds) marks."""
    now = iter([ms / 1e3 for _, ms in marks])
    clock = StageClock(torch.device("cpu"), lambda: next(now))
    for name, _ in marks:
        clock.mark(name)
    return clock


def test_stages_idle_and_total():
    clock = play(
        [
            ("idle", 0),
            *(("draft", 2), ("verify", 5), ("accept", 11), ("idle", 12)),
            *(("verify", 12), ("accept", 16), ("idle", 19)),
        ]
    )
    first, second = clock.steps()
    assert {name: round(ms, 6) for name, ms in first.stages.items()} == {"draft": 3, "verify": 6, "accept": 1}
    assert [round(ms, 6) for ms in (first.idle, first.total, first.launch)] == [2, 12, 10]
    assert {name: round(ms, 6) for name, ms in second.stages.items()} == {"verify": 4, "accept": 3}
    assert [round(ms, 6) for ms in (second.idle, second.total, second.launch)] == [0, 7, 7]


def test_a_stage_that_comes_twice_is_summed():
    (step,) = play([("idle", 0), ("draft", 0), ("verify", 1), ("draft", 3), ("idle", 7)]).steps()
    assert {name: round(ms, 6) for name, ms in step.stages.items()} == {"draft": 5, "verify": 2}


def test_a_step_whose_beginning_was_not_seen_is_left_out():
    clock = play([("draft", 0), ("verify", 1), ("idle", 2)])
    assert clock.steps() == []
    clock.clear()
    assert clock.steps() == []
