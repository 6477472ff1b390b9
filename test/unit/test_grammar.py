"""Structured output in the engine: what is emitted matches its grammar and is what plain decoding would emit."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashspark.ipc import GrammarSpec
from flashspark.kernels.token_mask import apply_token_masks
from flashspark.scheduler.grammar import (
    GrammarError,
    GrammarQueue,
    XGrammarCompiler,
    XGrammarMatcher,
    unavailable_reason,
)
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.grammar import GrammarState, Look, Standing
from flashspark.text.detokenizer import _BYTE_OF_CHAR
from flashspark.text.tokenizer import TextTokenizer
from harness import NEAR_TIE, Harness, Job, ScriptedDrafter, first_difference, next_logits
from tiny_models import IM_END_ID, SPECIALS, VOCAB_SIZE, write_dspark
from unit.test_lossless_dspark import followers, learn_by_heart
from unit.test_lossless_tiny import WIDTH, folders, prompts  # noqa: F401 - fixtures

STOPS = (0, IM_END_ID)
_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["draft", "target"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["id", "kind", "tags"],
}
TAG_FORMAT = {"type": "json_schema", "json_schema": SCHEMA}
# What each grammar is called here, and whether a text matches it.
GRAMMARS = {
    "digits": (("regex", "[a-c]{2,9}x[0-9]{3}"), lambda text: re.fullmatch("[a-c]{2,9}x[0-9]{3}", text)),
    "words": (("regex", "(yes|no|maybe)( (yes|no)){2,4}!"), lambda text: re.fullmatch(
        "(yes|no|maybe)( (yes|no)){2,4}!", text
    )),
    "schema": (("json_schema", json.dumps(SCHEMA)), lambda text: is_valid(json.loads(text))),
    "ebnf": (
        ("ebnf", 'root ::= "<" item ("," item){2} ">"\nitem ::= [a-f] [a-f]'),
        lambda text: re.fullmatch("<[a-f]{2}(,[a-f]{2}){2}>", text),
    ),
    "tag": (
        ("structural_tag", json.dumps({"type": "structural_tag", "format": TAG_FORMAT})),
        lambda text: is_valid(json.loads(text)),
    ),
    "accents": (("regex", "(é|ü|漢){3,5}."), lambda text: re.fullmatch("(é|ü|漢){3,5}.", text, re.DOTALL)),
    "values": (
        ("json_schema", '{"enum": [17, "17", null, [1,2]]}'),
        lambda text: json.loads(text) in [17, "17", None, [1, 2]],
    ),
}  # fmt: skip


def is_valid(value: dict) -> bool:
    """Of `SCHEMA`."""
    return (
        set(value) == {"id", "kind", "tags"}
        and type(value["id"]) is int
        and 0 <= value["id"] <= 999
        and value["kind"] in {"draft", "target"}
        and 1 <= len(value["tags"]) <= 3
        and all(type(tag) is bool for tag in value["tags"])
    )


def spec_of(name: str) -> GrammarSpec:
    return GrammarSpec(*GRAMMARS[name][0], "field")


def job_of(spec: GrammarSpec | str, index: int = 0, length: int = 200, **sampling) -> Job:
    """A request whose prompt no other index has. `length` is enough for every grammar here, blanks included."""
    spec = spec_of(spec) if isinstance(spec, str) else spec
    if spec.kind in {"json_schema", "structural_tag"}:  # a random model would fill every gap with blanks
        blanks = [len(SPECIALS) + place for place in byte_places(b"\t\n\r ")]
        sampling["logit_bias"] = dict.fromkeys(blanks, -30.0)
    return Job(prompts(30)[index], length, sampling={"ignore_eos": False, "grammar": spec} | sampling)


@pytest.fixture(scope="module")
def tokenizer(folders):  # noqa: F811
    return TextTokenizer.load(folders["target"])


@pytest.fixture(scope="module")
def compile_(tokenizer):
    return XGrammarCompiler(tokenizer, VOCAB_SIZE)


def fresh(compile_, spec: GrammarSpec) -> GrammarState:
    return GrammarState(compile_(spec)(), VOCAB_SIZE, STOPS)


def allowed(mask: torch.Tensor) -> set[int]:
    kept = apply_token_masks(torch.zeros(1, VOCAB_SIZE), torch.tensor([0]), mask[None])[0]
    return {i for i, value in enumerate(kept.tolist()) if value == 0}


# One grammar's place


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_walk_and_commit_is_the_plain_one(compile_, data):
    """Whatever is drafted and however much of it is kept, masks are those of a matcher that saw the output alone."""
    spec = spec_of(data.draw(st.sampled_from(list(GRAMMARS))))
    state, output = fresh(compile_, spec), []
    for _ in range(data.draw(st.integers(1, 8))):
        drafts = draw_drafts(data, compile_, spec, output)
        masks = state.walk(drafts)
        assert 1 <= len(masks) <= len(drafts) + 1
        for i, mask in enumerate(masks):
            plain = fresh(compile_, spec)
            assert all(plain.push(token) for token in [*output, *drafts[:i]])
            assert torch.equal(mask, plain.walk([])[0])
        if len(masks) <= len(drafts):  # stopped early: the next draft is refused, or nothing can follow
            plain = fresh(compile_, spec)
            assert all(plain.push(token) for token in [*output, *drafts[: len(masks) - 1]])
            refused = not plain.push(drafts[len(masks) - 1])
            assert refused or plain.standing is Standing.ENDED
        kept = data.draw(st.integers(0, len(masks) - 1))
        last = masks[kept]
        following = sorted(allowed(last) - set(STOPS))
        for token in [*drafts[:kept], data.draw(st.sampled_from(following))]:
            assert state.push(token)
            output.append(token)
        if state.standing is not Standing.OPEN:
            return


def draw_drafts(data, compile_, spec: GrammarSpec, output: list[int]) -> list[int]:
    """Mostly tokens that the grammar takes, sometimes any, stop ids among them."""
    state, drafts = fresh(compile_, spec), []
    assert all(state.push(token) for token in output)
    for _ in range(data.draw(st.integers(0, 6))):
        options = list(range(VOCAB_SIZE))
        if state.standing is Standing.OPEN and data.draw(st.integers(0, 5)) > 0:
            options = sorted(allowed(state.walk([])[0]))
        drafts.append(data.draw(st.sampled_from(options)))
        if state.standing is Standing.OPEN:
            state.push(drafts[-1])
    return drafts


def test_stop_ids_follow_a_match_only(compile_):
    state = fresh(compile_, GrammarSpec("regex", "ab+", "f"))
    a, b = (len(SPECIALS) + place for place in byte_places(b"ab"))
    assert allowed(state.walk([])[0]) == {a}
    assert state.push(a)
    assert allowed(state.walk([])[0]) == {b}
    assert not state.push(a)
    assert state.push(b)
    assert (allowed(state.walk([])[0]), state.standing) == ({b, *STOPS}, Standing.OPEN)
    none = GrammarState(compile_(GrammarSpec("regex", "ab+", "f"))(), VOCAB_SIZE, ())
    assert none.push(a) and none.push(b)
    assert allowed(none.walk([])[0]) == {b}
    ended = fresh(compile_, GrammarSpec("regex", "ab", "f"))
    assert [len(ended.walk(drafts)) for drafts in ([], [a], [a, b], [a, b, 0], [b, a])] == [1, 2, 2, 2, 1]
    assert ended.push(a) and ended.push(b)
    assert ended.standing is Standing.ENDED
    assert fresh(compile_, GrammarSpec("ebnf", 'root ::= ""', "f")).standing is Standing.ENDED


def byte_places(text: bytes) -> list[int]:
    """Where bytes stand in the tiny tokenizer's alphabet."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(_CHAR_OF_BYTE[byte]) for byte in text]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_token_masks(data):
    size = data.draw(st.integers(1, 100))
    bits = data.draw(st.lists(st.lists(st.booleans(), min_size=size, max_size=size), min_size=1, max_size=4))
    num_rows = data.draw(st.integers(len(bits), 6))
    places = data.draw(st.permutations(range(num_rows)))[: len(bits)]
    words = [[0] * (-(-size // 32)) for _ in bits]
    for row, flags in zip(words, bits, strict=True):
        for i, flag in enumerate(flags):
            row[i // 32] |= flag << (i % 32)
    signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in words]
    logits = torch.randn(num_rows, size)
    wanted = logits.clone()
    for place, flags in zip(places, bits, strict=True):
        wanted[place][~torch.tensor(flags)] = float("-inf")
    masks = torch.tensor(signed, dtype=torch.int32)
    assert torch.equal(apply_token_masks(logits, torch.tensor(places), masks), wanted)


# Whole engines

JOBS = [
    *((name, {}) for name in GRAMMARS),
    ("schema", {"repetition_penalty": 1.3, "presence_penalty": 0.5}),
    ("words", {"frequency_penalty": 1.0, "logit_bias": {5: 2.0}, "min_new_tokens": 8}),
]


def all_jobs() -> list[Job]:
    """Every grammar, some with penalties, and requests without any between them."""
    constrained = [job_of(name, i, **extra) for i, (name, extra) in enumerate(JOBS)]
    return constrained + [Job(p, 80) for p in prompts(30)[20:22]]


@pytest.fixture(scope="module")
def plain(folders):  # noqa: F811
    """A server without a draft, and what it says to each job alone."""
    harness = Harness(folders["target"])
    return harness, [harness.run([job])[0].tokens for job in all_jobs()]


@pytest.fixture(scope="module")
def drafts(folders, plain, tmp_path_factory):  # noqa: F811
    """A random DFlash2, and a DSpark whose head knows much of the plain outputs by heart."""
    folder = write_dspark(tmp_path_factory.mktemp("dspark"), folders["target"], markov_rank=VOCAB_SIZE)
    learn_by_heart(folder / "model.safetensors", "vanilla", followers(plain[1]))
    return {None: None, "dflash2": folders["dflash2"], "dspark": folder}


def assert_same(plain, jobs, results, compile_) -> None:
    """Greedy outputs are the plain ones. Where two differ, the best two logits that are allowed are nearly equal."""
    harness, expected = plain
    for job, wanted, result in zip(jobs, expected, results, strict=True):
        at = first_difference(wanted, result.tokens)
        if at is None:
            continue
        logits = next_logits(harness, [*job.prompt, *wanted[:at]])
        if "grammar" in job.sampling:
            state = fresh(compile_, job.sampling["grammar"])
            assert all(state.push(token) for token in wanted[:at])
            apply_token_masks(logits[None], torch.tensor([0]), state.walk([]))
        best = logits.topk(2).values
        assert best[0] - best[1] < NEAR_TIE, (at, wanted, result.tokens)


def assert_matches(job: Job, result, tokenizer) -> None:
    name = next(name for name in GRAMMARS if spec_of(name) == job.sampling["grammar"])
    assert result.finish.type == "stop", result.finish
    assert result.finish.matched is None  # none of these can go on after a match
    text = tokenizer.decode(result.tokens, skip_special_tokens=False)
    assert GRAMMARS[name][1](text), text


class SignalledDrafter(ScriptedDrafter):
    """A scripted draft with a signal, for adaptive verification: high where the token id is even."""

    has_signal = True

    def propose(self, *arguments, **options):
        block = super().propose(*arguments, **options)
        return replace(block, signal=0.2 + 0.7 * (block.tokens % 2 == 0).float())


def engine(folders, draft, mode: VerifyMode | None, **args) -> Harness:  # noqa: F811
    harness = Harness(folders["target"], draft, **args)
    if mode is not None:
        harness.make_adaptive(mode, min_gain=0.0, draft_free=None).source.num_refits = 100
    return harness


def script(harness: Harness, jobs: list[Job], outputs: list[list[int]], wrong_every: int | None) -> None:
    """Drafts that know the outputs, but for each `wrong_every`-th token; past the end they go on with id 0."""
    known = {}
    for job, tokens in zip(jobs, outputs, strict=True):
        drafts = list(tokens)
        for i in range(wrong_every - 1, len(drafts), wrong_every) if wrong_every else ():
            drafts[i] = (drafts[i] + 1) % VOCAB_SIZE
        known[tuple(job.prompt)] = drafts
    drafter = ScriptedDrafter if harness._worker.adaptive is None else SignalledDrafter
    harness._worker.drafter = drafter(harness, WIDTH - 1, known, 0)


MODES = [None, VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value if mode else "static")
@pytest.mark.parametrize("draft", ["dflash2", "dspark"])
def test_greedy_output_is_the_plain_one_and_matches(folders, drafts, plain, tokenizer, compile_, draft, mode):  # noqa: F811
    jobs = all_jobs()
    harness = engine(folders, drafts[draft], mode)
    if mode is not None:
        harness._worker.adaptive.planner.pin(0.5)
    results = harness.run(jobs)
    assert_same(plain, jobs, results, compile_)
    for job, result in zip(jobs, results, strict=True):
        if "grammar" in job.sampling:
            assert_matches(job, result, tokenizer)
    if draft == "dspark":
        assert sum(result.stats.num_accepted for result in results[: len(JOBS)]) > 20
    decoded = [record for record in harness.scheduler.records if record.num_reqs]
    assert max(record.num_grammar_reqs for record in decoded) == len(JOBS)
    assert {record.num_grammar_reqs > 0 for record in decoded} == {True, False}


@pytest.mark.parametrize("wrong_every", [None, 2, 5])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value if mode else "static")
def test_blocks_that_reach_past_the_end(folders, plain, compile_, mode, wrong_every):  # noqa: F811
    """Drafts know the output and go on after its end: it ends there all the same."""
    jobs = all_jobs()
    harness = engine(folders, folders["dflash2"], mode)
    script(harness, jobs, plain[1], wrong_every)
    if mode is not None:
        harness._worker.adaptive.planner.pin(0.6)
    results = harness.run(jobs)
    assert_same(plain, jobs, results, compile_)
    for job, result, tokens in zip(jobs, results, plain[1], strict=True):
        assert result.finish.type == ("stop" if "grammar" in job.sampling else "length")
        if wrong_every is None and mode is None:  # full blocks, but for the last
            assert result.stats.num_verify_steps == -(-len(tokens) // WIDTH)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_at_every_place_of_a_block(folders, temperature):  # noqa: F811
    """`x` n times: forced at any temperature, and over after the n-th, whatever is drafted."""
    x = len(SPECIALS) + byte_places(b"x")[0]
    jobs = [
        job_of(GrammarSpec("regex", f"x{{{n}}}", "f"), n, temperature=temperature, ignore_eos=n % 2 == 0)
        for n in range(1, 15)
    ]
    for future in ([x] * 40, [x, x, 0, x] * 10):
        harness = Harness(folders["target"], folders["dflash2"])
        harness.script_drafts(WIDTH - 1, {tuple(job.prompt): future for job in jobs})
        for n, result in enumerate(harness.run(jobs), start=1):
            assert (result.tokens, result.finish.type, result.finish.matched) == ([x] * n, "stop", None)
            if future == [x] * 40:
                assert result.stats.num_verify_steps == -(-n // WIDTH)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value if mode else "static")
def test_retraction_keeps_the_place_in_the_grammar(folders, drafts, plain, compile_, mode):  # noqa: F811
    jobs = all_jobs()[::-1]  # the last to come is the first to give way
    harness = engine(folders, drafts["dspark"], mode, max_total_tokens=320)
    results = harness.run(jobs)
    assert sum(result.num_retractions for result in results[-len(JOBS) :]) > 0
    assert_same((plain[0], plain[1][::-1]), jobs, results, compile_)


ANY_SCHEDULE = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=4, **ANY_SCHEDULE)
@given(data=st.data())
def test_any_schedule(folders, drafts, plain, tokenizer, compile_, data):  # noqa: F811
    check_schedule(folders, drafts, plain, tokenizer, compile_, data)


@pytest.mark.full
@settings(max_examples=60, **ANY_SCHEDULE)
@given(data=st.data())
def test_any_of_many_schedules(folders, drafts, plain, tokenizer, compile_, data):  # noqa: F811
    check_schedule(folders, drafts, plain, tokenizer, compile_, data)


def check_schedule(folders, drafts, plain, tokenizer, compile_, data) -> None:  # noqa: F811
    """Staggered arrivals, aborts at any moment, small pools, few rows, any draft, any mode."""
    draft = data.draw(st.sampled_from([None, "dflash2", "dspark"]))
    mode = data.draw(st.sampled_from(MODES)) if draft else None
    harness = engine(
        folders,
        drafts[draft],
        mode,
        max_total_tokens=data.draw(st.integers(20, 60)) * 16,
        max_running_requests=data.draw(st.integers(1, 8)),
    )
    jobs = all_jobs()
    for job in jobs:
        job.arrive = data.draw(st.integers(0, 20))
        abort = data.draw(st.none() | st.integers(0, 30))
        job.abort = None if abort is None else max(abort, job.arrive)
    results = harness.run(jobs)
    ended = [i for i, result in enumerate(results) if result.finish.type != "abort"]
    kept = (plain[0], [plain[1][i] for i in ended])
    assert_same(kept, [jobs[i] for i in ended], [results[i] for i in ended], compile_)
    for i in ended:
        if "grammar" in jobs[i].sampling:
            assert_matches(jobs[i], results[i], tokenizer)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value if mode else "static")
def test_drawn_output_matches(folders, drafts, tokenizer, mode):  # noqa: F811
    jobs = [
        job_of(name, i, temperature=1.2, top_p=0.9 if i % 3 == 0 else 1.0, length=400)
        for i, name in enumerate(list(GRAMMARS) * 3)
    ]
    for job, result in zip(jobs, engine(folders, drafts["dspark"], mode).run(jobs), strict=True):
        assert_matches(job, result, tokenizer)


def test_choices_of_one_seed_differ_and_match(folders, drafts, tokenizer):  # noqa: F811
    jobs = [job_of("digits", 3, temperature=1.5, seed=7) for _ in range(6)]
    for i, job in enumerate(jobs):
        job.choice_index = i
    results = Harness(folders["target"], drafts["dspark"]).run(jobs)
    for job, result in zip(jobs, results, strict=True):
        assert_matches(job, result, tokenizer)
    assert len({tuple(result.tokens) for result in results}) > 1


# What else may end a request


def test_stops_and_lengths_go_on_counting(folders, tokenizer):  # noqa: F811
    harness = Harness(folders["target"], folders["dflash2"])
    a = len(SPECIALS) + byte_places(b"a")[0]
    only_a = GrammarSpec("regex", "a+", "f")
    six = GrammarSpec("regex", "a{6}", "f")
    results = harness.run(
        [
            job_of(only_a, 0, 25, ignore_eos=True),
            job_of(only_a, 1, 25, min_new_tokens=10),
            job_of(six, 2, 6),  # the length and the grammar end at once
            job_of(six, 3, 5),
            job_of(six, 4, stop=("aaa",)),
            job_of(six, 5, stop_token_ids=(a,)),
            job_of(six, 6, min_new_tokens=50),
            job_of(GrammarSpec("ebnf", 'root ::= ""', "f"), 7),
        ]
    )
    assert [(len(r.tokens), r.finish.type, r.finish.matched) for r in results[2:]] == [
        (6, "stop", None),
        (5, "length", None),
        (3, "stop", "aaa"),
        (1, "stop", a),
        (6, "stop", None),  # the grammar leaves nothing to emit, whatever the minimum
        (0, "stop", None),
    ]
    assert (len(results[0].tokens), results[0].finish.type) == (25, "length")
    assert len(results[1].tokens) > 10 or results[1].finish.type == "stop"
    assert all(token == a for token in results[1].tokens[:10])
    assert len(results[1].tokens) >= 10


BAD = {
    "regex": ("regex", "(ab", "parenthesis"),
    "lookahead": ("regex", "(?=a)b", "Lookahead"),
    "ebnf": ("ebnf", 'root ::= "a" other', "other"),
    "no root": ("ebnf", 'start ::= "a"', "root"),
    "type": ("json_schema", '{"type": "objekt"}', "objekt"),
    "reference": ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
    "nothing": ("json_schema", "false", "false"),
    "deep": ("regex", "(" * 50_000 + "a" + ")" * 50_000, "Nest"),
    "tag": ("structural_tag", '{"type": "structural_tag", "format": {"type": "other"}}', "other"),
    "structure": ("structural_tag", '{"structures": [{"begin": "a"}], "triggers": ["a"]}', ""),
}


def test_bad_grammars_are_refused_alone(folders, plain, compile_):  # noqa: F811
    harness = Harness(folders["target"], folders["dflash2"])
    jobs = all_jobs()
    bad = [job_of(GrammarSpec(kind, text, f"field{i}"), i) for i, (kind, text, _) in enumerate(BAD.values())]
    results = harness.run([*bad, *jobs])
    assert_same(plain, jobs, results[len(bad) :], compile_)
    for i, (result, (_, _, word)) in enumerate(zip(results, BAD.values(), strict=False)):
        assert (result.finish.type, result.finish.status_code, result.tokens) == ("abort", 400, [])
        assert result.finish.param == f"field{i}"
        assert result.finish.message.startswith(f"field{i}: ")
        assert word in result.finish.message
        assert "/cpp/" not in result.finish.message
    assert harness.scheduler.totals["aborted"] == len(bad)


def test_a_grammar_that_the_vocabulary_cannot_write(folders):  # noqa: F811
    """Stuck at once, or after some tokens, the request ends with the reason."""

    class Stuck:
        """Takes one token, ever."""

        taken = 0

        def accept_token(self, token_id):
            self.taken += 1
            return True

        def rollback(self, num_tokens):
            self.taken -= num_tokens

        def is_completed(self):
            return False

        def fill_next_token_bitmask(self, bitmask):
            bitmask.fill_(0 if self.taken else -1)

    harness = Harness(folders["target"], folders["dflash2"])
    harness.scheduler._grammars = GrammarQueue(
        lambda spec: lambda: XGrammarMatcher(Stuck(), VOCAB_SIZE), VOCAB_SIZE
    )
    result, mate = harness.run([job_of("words"), Job(prompts(30)[9], 12)])
    assert (result.finish.type, result.finish.status_code, len(result.tokens)) == ("abort", 400, 1)
    assert "no token of the model's vocabulary" in result.finish.message
    assert len(mate.tokens) == 12
    Stuck.taken = 1
    (result,) = harness.run([job_of("words")])
    assert (result.finish.status_code, result.tokens) == (400, [])


@pytest.mark.parametrize("fails", ["advance", "rollback"])
def test_a_matcher_that_fails_ends_its_request_alone(folders, plain, compile_, fails):  # noqa: F811
    """At its fifth call, whichever that is."""
    spec = GrammarSpec("regex", "[!-~]{30}", "f")  # takes most wrong drafts too, so that they are rolled back

    class Failing:
        def __init__(self) -> None:
            self._matcher, self._num_calls = compile_(spec)(), 0

        def __getattr__(self, name):
            if name == fails:
                self._num_calls += 1
                if self._num_calls >= 5:
                    raise RuntimeError("too deep")
            return getattr(self._matcher, name)

    harness = Harness(folders["target"], folders["dflash2"])
    jobs = [job_of(spec, 1), *all_jobs()[-2:]]
    (alone,) = plain[0].run(jobs[:1])
    harness.scheduler._grammars = GrammarQueue(lambda spec: Failing, VOCAB_SIZE)
    script(harness, jobs, [alone.tokens, *plain[1][-2:]], wrong_every=2)
    failed, *results = harness.run(jobs)
    assert (failed.finish.type, failed.finish.status_code) == ("abort", 400)
    assert "too complex" in failed.finish.message
    assert len(failed.tokens) < 30 and alone.finish.type == "stop"
    assert_same((plain[0], plain[1][-2:]), jobs[1:], results, compile_)


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_matcher_that_fails_at_once_ends_its_request_alone(folders, num_good):  # noqa: F811
    """In the thread that compiles it, or in the step loop."""
    made = []

    class Broken:
        def look(self):
            made.append(self)
            if len(made) > num_good:
                raise RuntimeError("gone")
            return Look(torch.full((-(-VOCAB_SIZE // 32),), -1, dtype=torch.int32), False)

    harness = Harness(folders["target"])
    harness.scheduler._grammars = GrammarQueue(lambda spec: Broken, VOCAB_SIZE)
    result, mate = harness.run([job_of("words"), Job(prompts(30)[9], 12)])
    assert (result.finish.status_code, len(mate.tokens)) == (400, 12)
    assert result.finish.message == "field: cannot be followed (gone); use a simpler one"


# While a grammar is being compiled


class SlowCompiler:
    """Compiles nothing before it is told to."""

    def __init__(self, compile_) -> None:
        self._compile, self.go, self.calls = compile_, threading.Event(), []

    def __call__(self, spec):
        self.calls.append(spec)
        assert self.go.wait(60)
        return self._compile(spec)


def slow_engine(folders, compile_, **options) -> tuple[Harness, SlowCompiler]:  # noqa: F811
    harness, slow = Harness(folders["target"], folders["dflash2"]), SlowCompiler(compile_)
    harness.scheduler._grammars = GrammarQueue(slow, VOCAB_SIZE, **options)
    return harness, slow


def test_others_go_on_while_a_grammar_is_compiled(folders, plain, compile_):  # noqa: F811
    harness, slow = slow_engine(folders, compile_)
    jobs = all_jobs()
    free = [job for job in jobs if "grammar" not in job.sampling]
    waiting = [job_of("words", 1, **JOBS[1][1]), job_of("words", 1), jobs[0]]
    done = [0]
    step = harness.scheduler.step

    def watched() -> None:
        step()
        if not slow.go.is_set() and len(harness.scheduler._requests) == len(waiting):
            done[0] += 1
            assert harness.scheduler.state()["num_grammar_queue_reqs"] == len(waiting)
            assert harness.scheduler.has_work
            slow.go.set()

    harness.scheduler.step = watched
    results = harness.run([*waiting, *free])
    assert done == [1]  # the others had ended while all three waited
    expected = [plain[1][1], plain[1][1], plain[1][0], *plain[1][len(JOBS) :]]
    assert_same((plain[0], expected), [*waiting, *free], results, compile_)
    assert sorted(slow.calls, key=str) == sorted({spec_of("words"), spec_of("digits")}, key=str)


def test_abort_while_a_grammar_is_compiled(folders, compile_):  # noqa: F811
    harness, slow = slow_engine(folders, compile_)
    job = job_of("words")
    job.abort = 3
    (result,) = harness.run([job])
    assert (result.finish.type, result.finish.message, result.tokens) == ("abort", "aborted by the test", [])
    slow.go.set()
    (again,) = harness.run([job_of("words")])
    assert again.finish.type == "stop"


def test_a_grammar_that_takes_too_long(folders, compile_):  # noqa: F811
    harness, slow = slow_engine(folders, compile_, timeout_s=0.05)
    late, mate = harness.run([job_of("words"), Job(prompts(30)[9], 12)])
    assert (late.finish.type, late.finish.status_code) == ("abort", 400)
    assert late.finish.message == "field: takes longer than 0.05 s to compile; use a simpler one"
    assert len(mate.tokens) == 12
    slow.go.set()


def test_a_compiler_that_breaks(folders):  # noqa: F811
    def broken(spec):
        raise OSError("no space left")

    harness = Harness(folders["target"])
    harness.scheduler._grammars = GrammarQueue(broken, VOCAB_SIZE)
    result, mate = harness.run([job_of("words"), Job(prompts(30)[9], 12)])
    assert (result.finish.status_code, len(mate.tokens)) == (500, 12)
    assert "no space left" in result.finish.message


def test_servers_without_structured_output_say_so(folders, tokenizer, monkeypatch):  # noqa: F811
    (result,) = Harness(folders["target"], grammar_backend="none").run([job_of("words")])
    assert (result.finish.status_code, result.finish.param) == (400, "field")
    assert "--grammar-backend none" in result.finish.message
    assert unavailable_reason(None, tokenizer) is None
    assert "--skip-tokenizer-init" in unavailable_reason("xgrammar", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "flashspark[grammar]" in unavailable_reason(None, tokenizer)


def test_compiler_errors_are_for_people(compile_):
    with pytest.raises(GrammarError) as error_info:
        compile_(GrammarSpec("regex", "(", "f"))
    assert str(error_info.value).startswith("Regex parsing error at position")


# What the draft cannot see teaches nobody


def test_constrained_requests_do_not_train_the_estimator(folders):  # noqa: F811
    harness = engine(folders, folders["dflash2"], VerifyMode.COMPACT)
    constrained = [job for job in all_jobs() if "grammar" in job.sampling]
    harness.run(constrained)
    source = harness._worker.adaptive.source
    source.settle()
    assert sum(map(sum, source.summary()["observations"])) == 0
    harness.run([Job(p, 30) for p in prompts(30)[20:24]])
    source.settle()
    assert sum(map(sum, source.summary()["observations"])) > 0


def test_the_queue_is_a_metric(folders):  # noqa: F811
    samples = {sample.name: sample.value for sample in Harness(folders["target"]).scheduler.metrics().samples}
    assert samples["num_grammar_queue_reqs"] == 0
