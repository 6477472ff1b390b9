"""Grammars of requests that suppress what the grammar allows: the grammar's end, or a refusal, and never a failure."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashspark.ipc import GrammarSpec
from flashspark.speculative.grammar import GrammarState, Look, Standing
from harness import Harness, Job
from tiny_models import SPECIALS, VOCAB_SIZE
from unit.test_grammar import (
    MODES,
    STOPS,
    all_jobs,
    allowed,
    assert_same,
    byte_places,
    compile_,
    engine,
    job_of,
    plain,
    script,
    tokenizer,
)
from unit.test_lossless_tiny import folders

__all__ = ["compile_", "folders", "plain", "tokenizer"]  # fixtures


def tokens_of(text: str) -> list[int]:
    return [len(SPECIALS) + place for place in byte_places(text.encode())]


A, B, C, X = tokens_of("abcx")
PARTY = tokens_of("🎉")
SUPPRESSED = "f: only stop tokens go on from here, and min_new_tokens (min_tokens) suppresses them"


def state_of(compile_, regex: str, stops: list[int], minimum: int) -> GrammarState:
    return GrammarState(compile_(GrammarSpec("regex", regex, "f"))(), VOCAB_SIZE, stops, minimum)


def test_what_the_minimum_leaves(compile_):
    assert state_of(compile_, "ab", [A], 0).standing is Standing.OPEN
    assert state_of(compile_, "ab", [A], 1).standing is Standing.SUPPRESSED
    assert state_of(compile_, "(ab)?", [A], 1).standing is Standing.ENDED
    state = state_of(compile_, "[ab]c*", [B, C, 0], 2)
    # Below the minimum no stop id follows, wherever the grammar would take one.
    assert [allowed(mask) for mask in state.walk([])] == [{A}]
    assert state.push(A)
    assert state.standing is Standing.ENDED  # by `c` alone it could go on
    later = state_of(compile_, "[ab]c*", [B, C, 0], 1)
    assert [allowed(mask) for mask in later.walk([A])] == [{A}, {B, C, 0}]


def test_blocks_are_walked_up_to_where_nothing_is_left(compile_):
    state = state_of(compile_, "xab|xxc", [A], 3)
    assert [allowed(mask) for mask in state.walk([X, A, B])] == [{X}, {X}, {B}]  # its row refuses the draft
    stuck = state_of(compile_, "xxab", [A], 3)
    assert [allowed(mask) for mask in stuck.walk([X, X, A, B])] == [{X}, {X}]
    assert stuck.push(X) and stuck.standing is Standing.OPEN  # of the block that was walked
    assert stuck.push(X) and stuck.standing is Standing.SUPPRESSED
    fresh = state_of(compile_, "xxab", [A], 2)
    assert [allowed(mask) for mask in fresh.walk([X, X, A, B])] == [{X}, {X}, {A}, {B}]


def test_bits_past_the_vocabulary_are_no_tokens():
    class Padding:
        def look(self):
            mask = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32)
            mask[-1] = -1 << VOCAB_SIZE % 32
            return Look(mask, False)

    assert VOCAB_SIZE % 32
    assert GrammarState(Padding(), VOCAB_SIZE, ()).standing is Standing.STUCK
    assert GrammarState(Padding(), VOCAB_SIZE + 1, ()).standing is Standing.OPEN


# What a request says, how long it must be, and how it ends: the tokens, and the text of a refusal.
NOTHING_LEFT = {
    "at once": (("regex", "🎉"), PARTY[:1], 1, [], SUPPRESSED),
    "every token": (("regex", "a+"), [A], 5, [], SUPPRESSED),
    "later": (("regex", "xxxab"), [A], 9, [X, X, X], SUPPRESSED),
    "after a block": (("regex", "x{8}ab"), [A], 9, [X] * 8, SUPPRESSED),
    "ended at once": (("regex", "(🎉)?"), PARTY[:1], 1, [], None),
    "ended": (("regex", "xxx(ab)?"), [A], 9, [X, X, X], None),
    "ended and over": (("regex", "xxx"), [X + 1], 9, [X, X, X], None),
    "in its last token": (("regex", "xxxab"), [A], 4, [X, X, X], SUPPRESSED),
    "no more suppressed": (("regex", "xxxab"), [A], 3, [X, X, X, A], A),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value if mode else "static")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_without_a_token_left_ends_alone(folders, plain, compile_, mode, temperature):
    """Drafts know what the grammar wants, suppressed or not, so that each end is within a block too."""
    odd = [
        job_of(
            GrammarSpec(*grammar, "f"),
            10 + i,
            stop_token_ids=tuple(stops),
            min_new_tokens=minimum,
            ignore_eos=i % 2 == 0,
            temperature=temperature,
        )
        for i, (grammar, stops, minimum, *_) in enumerate(NOTHING_LEFT.values())
    ]
    mates = all_jobs()[-3:]
    futures = [[*PARTY], [A] * 9, [X, X, X, A, B], [X] * 8 + [A, B], [*PARTY]] + [[X, X, X, A, B]] * 4
    harness = engine(folders, folders["dflash2"], mode)
    script(harness, [*odd, *mates], [*futures, *plain[1][-3:]], None)
    if mode is not None:
        harness._worker.adaptive.planner.pin(0.6)
    *results, one, two, three = harness.run([*odd, *mates])
    for (*_, tokens, end), result in zip(NOTHING_LEFT.values(), results, strict=True):
        assert result.tokens == tokens
        if end == SUPPRESSED:
            finish = result.finish
            assert (finish.type, finish.status_code, finish.param) == ("abort", 400, "f")
            assert finish.message == SUPPRESSED
        else:
            assert (result.finish.type, result.finish.matched) == ("stop", end)
    assert_same((plain[0], plain[1][-3:]), mates, [one, two, three], compile_)
    if mode is None:  # two blocks of six
        assert results[3].stats.num_verify_steps == 2


REGEXES = ["a+", "[ab]{2,5}", "(ab|ba){1,4}c?", "x{2}(🎉|a)*", "(c|🎉)?b", "[^b]{3}", ".{0,6}", "x*"]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_suppressed_is_no_failure(folders, compile_, tokenizer, data):
    """Stop ids, a minimum, biases and penalties at their extremes: why each request ends is what a matcher that
    knows the output alone says."""
    jobs = [draw_job(data, i) for i in range(data.draw(st.integers(1, 4)))]
    harness = suppressing_engine(folders, data)
    drafts = [
        data.draw(st.lists(st.sampled_from([A, B, C, X, *PARTY, 0]), min_size=8, max_size=8)) for _ in jobs
    ]
    script(harness, jobs, drafts, None)
    for job, result in zip(jobs, harness.run(jobs), strict=True):
        check_end(job, result, compile_, tokenizer)


def draw_job(data, index: int) -> Job:
    alphabet = st.sampled_from([A, B, C, X, *PARTY])
    length = data.draw(st.integers(1, 8))
    return job_of(
        GrammarSpec("regex", data.draw(st.sampled_from(REGEXES)), "f"),
        index,
        length,
        temperature=data.draw(st.sampled_from([0.0, 1.0, 1e6])),
        top_p=data.draw(st.sampled_from([1.0, 1e-9])),
        stop_token_ids=tuple(data.draw(st.sets(alphabet, max_size=8))),
        min_new_tokens=data.draw(st.integers(0, length)),
        ignore_eos=data.draw(st.booleans()),
        logit_bias=dict.fromkeys(data.draw(st.sets(alphabet)), -10000.0),
        repetition_penalty=data.draw(st.sampled_from([1e-20, 1.0, 2.0])),
        frequency_penalty=data.draw(st.sampled_from([-2.0, 0.0, 2.0])),
    )


def suppressing_engine(folders, data) -> Harness:
    mode = data.draw(st.sampled_from(MODES))
    harness = engine(folders, folders["dflash2"], mode)
    if mode is not None:
        harness._worker.adaptive.planner.pin(data.draw(st.sampled_from([0.3, 0.6, 1.0])))
    return harness


def check_end(job: Job, result, compile_, tokenizer) -> None:
    sampling, tokens = job.sampling, result.tokens
    matcher = compile_(sampling["grammar"])()
    last, finish = tokens[-1:], result.finish
    stops = {*sampling["stop_token_ids"]} | (set() if sampling["ignore_eos"] else {*STOPS})
    if finish.type == "stop" and finish.matched is not None:
        assert last == [finish.matched] and finish.matched in stops
        assert len(tokens) > sampling["min_new_tokens"]
        return
    look = matcher.look()
    for token in tokens:
        assert token in allowed(look.mask)
        assert token not in stops
        (look,) = matcher.advance([token])
    left = allowed(look.mask)
    if len(tokens) < sampling["min_new_tokens"]:
        left -= stops
    if left:
        assert finish.type == "length" and len(tokens) == job.max_new_tokens
    elif look.is_completed:
        assert finish.type == "stop"
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert re.fullmatch(sampling["grammar"].text, text, re.DOTALL)
    else:
        assert (finish.type, finish.status_code, finish.message) == ("abort", 400, SUPPRESSED)


def test_the_place_in_the_output_survives_a_retraction(folders):
    """The minimum counts every token of the output, whoever computed its K/V."""
    jobs = [
        job_of(GrammarSpec("regex", "x{60}ab", "f"), i, stop_token_ids=(A,), min_new_tokens=61 - i % 2)
        for i in range(6)
    ]
    harness = Harness(folders["target"], folders["dflash2"], max_total_tokens=320)
    results = harness.run(jobs)
    assert sum(result.num_retractions for result in results) > 0
    for i, result in enumerate(results):
        ended = (result.finish.type, result.finish.matched, result.tokens)
        assert ended == (("stop", A, [X] * 60 + [A]) if i % 2 else ("abort", None, [X] * 60))
