"""Grammars in processes of their own: they say what they would say here, and end alone where they take too much."""

from __future__ import annotations

import json
import random
import time

import psutil
import pytest
import torch

import flashspark.scheduler.grammar_process as grammar_process
from flashspark.ipc import GrammarSpec
from flashspark.scheduler.grammar import GrammarError, TooManyGrammars, XGrammarCompiler
from flashspark.scheduler.grammar_process import IsolatedCompiler
from flashspark.speculative.grammar import GrammarState, Standing
from flashspark.text.tokenizer import TextTokenizer
from tiny_models import VOCAB_SIZE, write_tokenizer
from unit.test_grammar import GRAMMARS, allowed, spec_of

pytest.importorskip("xgrammar")

AMBIGUOUS = GrammarSpec("regex", "(((a{1,100}){1,100}){1,100}){1,100}", "f")
WIDE = GrammarSpec(
    "json_schema",
    json.dumps({"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(1000)}}),
    "f",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def isolated(folder):
    return IsolatedCompiler(folder, VOCAB_SIZE, 60.0)


def token_of(folder, text: str) -> int:
    (token,) = TextTokenizer.load(folder).encode(text)
    return token


def places(state: GrammarState, drafts: list[int]) -> list[torch.Tensor]:
    return [mask.clone() for mask in state.walk(drafts)]


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_as_in_this_process(folder, isolated, name):
    """Block after block of drafts that mostly match, some of them committed."""
    here = XGrammarCompiler(TextTokenizer.load(folder), VOCAB_SIZE)
    states = [GrammarState(compiler(spec_of(name))(), VOCAB_SIZE, (0,)) for compiler in (here, isolated)]
    draw = random.Random(name)
    for _ in range(12):
        drafts: list[int] = []
        mask = places(states[0], [])[0]
        for _ in range(4):
            options = sorted(allowed(mask) - {0}) or [5]
            drafts.append(draw.choice(options) if draw.random() < 0.8 else draw.randrange(VOCAB_SIZE))
            walked = places(states[0], drafts)
            mask = walked[-1]
        blocks = [places(state, drafts) for state in states]
        assert len(blocks[0]) == len(blocks[1]) and all(map(torch.equal, *blocks))
        kept = draw.randrange(len(blocks[0]))
        following = sorted(allowed(blocks[0][kept]) - {0})
        for token in [*drafts[:kept], draw.choice(following or [5])]:
            assert states[0].push(token) == states[1].push(token)
            assert states[0].standing is states[1].standing
        if states[0].standing is not Standing.OPEN:
            return


def test_one_that_takes_too_long_fails_and_no_other(folder, isolated):
    a = token_of(folder, "a")
    bad, good = (
        GrammarState(isolated(spec)(), VOCAB_SIZE, ())
        for spec in (AMBIGUOUS, GrammarSpec("regex", "a+", "f"))
    )
    for _ in range(2000):
        assert good.push(a) and good.standing is Standing.OPEN
        assert bad.push(a)
        if bad.standing is not Standing.OPEN:
            break
    assert bad.standing is Standing.FAILED
    assert bad.walk([a]) == [] and good.walk([a, a])[2].any()
    # The same again begins again.
    assert GrammarState(isolated(AMBIGUOUS)(), VOCAB_SIZE, ()).standing is Standing.OPEN


@pytest.mark.parametrize(("name", "value"), [("timeout_s", 0.05), ("memory_bytes", 1 << 20)])
def test_compiling_has_limits_of_time_and_memory(isolated, monkeypatch, name, value):
    with monkeypatch.context() as patch:
        patch.setattr(isolated, name, value)
        with pytest.raises(GrammarError, match=r"takes too much .*memory to compile; use a simpler one"):
            isolated(WIDE)
    assert isolated(GrammarSpec("regex", "a", "f"))().look().mask.any()


def test_a_bad_grammar_says_why(isolated):
    with pytest.raises(GrammarError, match="Regex parsing error at position"):
        isolated(GrammarSpec("regex", "(", "f"))


def test_processes_are_shared_counted_and_end(isolated, monkeypatch):
    forking = psutil.Process(isolated._forking[0].pid)

    def wait_for_children(number: int) -> None:
        deadline = time.monotonic() + 60
        while len(forking.children()) != number and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(forking.children()) == number

    isolated._latest.clear()
    wait_for_children(0)
    monkeypatch.setattr(grammar_process, "_MAX_PROCESSES", 2)
    monkeypatch.setattr(grammar_process, "_MAX_IDLE", 1)
    first, second, again = (isolated(GrammarSpec("regex", text, "f"))() for text in "abb")
    wait_for_children(2)
    with pytest.raises(TooManyGrammars, match="2 grammars are in use already"):
        isolated(GrammarSpec("regex", "c", "f"))
    del first, second
    third = isolated(GrammarSpec("regex", "c", "f"))()
    wait_for_children(2)
    assert again.look().mask.any() and third.look().mask.any()


def test_a_forking_process_that_is_gone_is_started_again(isolated):
    matcher = isolated(GrammarSpec("regex", "a", "f"))()
    isolated._forking[0].kill()
    assert isolated(GrammarSpec("regex", "b", "f"))().look().mask.any()
    assert matcher.look().mask.any()


def test_one_that_is_gone_is_compiled_again(isolated):
    spec = GrammarSpec("regex", "gone", "f")
    matcher = isolated(spec)()
    for child in psutil.Process(isolated._forking[0].pid).children():
        child.kill()
    with pytest.raises(RuntimeError, match="too much time or memory"):
        matcher.look()
    assert isolated(spec)().look().mask.any()
