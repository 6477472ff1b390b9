"""Greedy losslessness on the shipped pair: 64 prompts of every kind, 256 tokens each, one output.

Every landing runs a short form of 64 tokens; the full suite has the rest.
"""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from flashspark.demo import DEMO_MODELS, DEMO_PROMPTS
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.cost_table import SpsCostTable
from flashspark.speculative.tiers import TierGrid, TierRule
from flashspark.text.tokenizer import TextTokenizer
from harness import Harness, Job, Result, count_excused

NUM_TOKENS, SHORT, WIDTH = 256, 64, 8
pytestmark = pytest.mark.timeout(1500)
PROSE = [
    "The quick brown fox jumps over the lazy dog, and then",
    "Dear reader, this letter was written on a train between two cities that no longer exist.",
    "It is a truth universally ignored that tests which assert nothing",
    "Once upon a time there was a compiler",
    "To install the package, first make a virtual environment. Then",
    "Changes in this release:\n\n- ",
    "Q: What is a hash table?\nA:",
    "SELECT name, COUNT(*) FROM users GROUP BY",
    "# Getting started\n\nThis guide explains",
    "Zażółć gęślą jaźń. Ünïcödé tëxt, 日本語, and emoji 🙂",
    "1 2 3 4 5 6 7 8 9",
    "Lorem ipsum dolor sit amet",
]
EMPTY_ISH = ["\n", " ", "a", "}", "\n\n\n", "#", "    ", '"""', "0", "return", "\t", "."]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Code, prose, empty-ish and long; the file's own prompts by id."""
    held_out = json.loads(DEMO_PROMPTS.read_text())
    tokenizer = TextTokenizer.load(DEMO_MODELS["demo"])
    texts = [tokenizer.encode(text) for text in PROSE + EMPTY_ISH]
    code = [prompt["token_ids"] for prompt in held_out[:32]]
    long = [list(chain(*(p["token_ids"] for p in held_out[i : i + 12])))[:700] for i in range(32, 40)]
    assert min(map(len, long)) > 400
    together = texts + code + long
    assert len(together) == 64
    return together


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> dict[str, Path | None]:
    """The shipped draft, and the DFlash v1 draft that it is without convolutions and selector."""
    shipped, v1 = DEMO_MODELS["demo-dflash2"], tmp_path_factory.mktemp("v1")
    config = json.loads((shipped / "config.json").read_text()) | {"architectures": ["DFlashDraftModel"]}
    sub = config["dflash_config"]
    config["dflash_config"] = {k: v for k, v in sub.items() if not k.startswith(("conv_", "selector_"))}
    (v1 / "config.json").write_text(json.dumps(config))
    tensors = load_file(shipped / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if "_conv." not in k and "candidate_selector" not in k}
    save_file(kept, v1 / "model.safetensors", metadata={"format": "pt"})
    dspark = DEMO_MODELS["demo-dspark"]
    return {
        "plain": None,
        "dflash2": shipped,
        "dspark": dspark,
        "dflash": v1,
        "oracle": shipped,
        "anti-oracle": shipped,
    }


class Plain:
    """The target without a draft, batched: what everything else is compared with."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.harness = Harness("demo", max_running_requests=32)
        self._prompts, self._tokens = prompts, [[] for _ in prompts]

    def tokens(self, length: int) -> list[list[int]]:
        """Its first `length` tokens for every prompt, computed once."""
        if len(self._tokens[0]) < length:
            self._tokens = [r.tokens for r in self.harness.run([Job(p, length) for p in self._prompts])]
        return [tokens[:length] for tokens in self._tokens]


@pytest.fixture(scope="module")
def plain(prompts) -> Plain:
    return Plain(prompts)


def make(kind: str, drafts, prompts, plain: Plain, length: int, **args) -> Harness:
    """A server with that draft."""
    harness = Harness("demo", drafts[kind], **args)
    if "oracle" in kind:
        continuation = dict(zip(map(tuple, prompts), plain.tokens(length), strict=True))
        harness.script_drafts(WIDTH - 1, continuation, shift=0 if kind == "oracle" else 1)
    return harness


def check(plain: Plain, jobs: list[Job], results: list[Result]) -> None:
    """Equal under the near-tie rule: at most 1 excuse per 10,000 tokens."""
    expected = plain.tokens(jobs[0].max_new_tokens)
    ended = [i for i, r in enumerate(results) if r.finish.type != "abort"]
    got = [results[i].tokens for i in ended]
    excused = count_excused(plain.harness, [jobs[i] for i in ended], [expected[i] for i in ended], got)
    num_tokens = sum(map(len, got))
    print(f"{excused} near-ties excused in {num_tokens} tokens")
    assert excused * 10_000 <= max(num_tokens, 10_000)
    for i in [i for i in range(len(results)) if i not in ended]:  # aborted: a prefix of the right output
        assert results[i].tokens == expected[i][: len(results[i].tokens)]


def check_acceptance(kind: str, results: list[Result]) -> None:
    """What each draft is known to reach."""
    steps = sum(r.stats.num_verify_steps for r in results)
    tokens = sum(len(r.tokens) for r in results)
    if kind == "oracle":
        assert all(set(nonzero(r.stats.accept_histogram)) == {WIDTH - 1} for r in results)
        assert tokens == steps * WIDTH
    elif kind == "anti-oracle":
        assert tokens == steps
    elif kind == "dflash2":
        assert tokens / steps > 1.5


def nonzero(histogram: list[int]) -> list[int]:
    """Indices that were counted."""
    return [i for i, count in enumerate(histogram) if count]


def staggered(prompts: list[list[int]], length: int) -> list[Job]:
    """Arrivals spread out, every eighth request aborted while it decodes."""
    rng = random.Random(5)
    jobs = [Job(p, length, arrive=rng.randrange(length // 2)) for p in prompts]
    for job in jobs[::8]:  # early ones, so that they decode when they are aborted
        job.arrive, job.abort = 0, rng.randrange(4, 12)
    return jobs


def check_staggered(harness: Harness, jobs: list[Job]) -> None:
    """Retractions, aborts and batches of many sizes did occur."""
    state = harness.scheduler.state()
    assert state["num_retractions"] > 0
    assert state["aborted_mid_block"] > 0
    assert state["finished"] + state["aborted"] == len(jobs)
    seen = {record.num_reqs for record in harness.scheduler.records}
    assert 1 in seen and len(seen) >= 10


SLOW = pytest.mark.full


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("dflash2", SHORT),
        ("oracle", SHORT),
        ("dflash", SHORT),
        pytest.param("dflash2", NUM_TOKENS, marks=SLOW),
        pytest.param("oracle", NUM_TOKENS, marks=SLOW),
        pytest.param("dflash", NUM_TOKENS, marks=SLOW),
        pytest.param("anti-oracle", NUM_TOKENS, marks=SLOW),
    ],
)
def test_batched(kind, length, drafts, prompts, plain):
    harness = make(kind, drafts, prompts, plain, length, max_running_requests=32)
    jobs = [Job(p, length) for p in prompts]
    results = harness.run(jobs)
    check(plain, jobs, results)
    check_acceptance(kind, results)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "dflash2", "dflash", "oracle", "anti-oracle"])
def test_alone(kind, drafts, prompts, plain):
    harness = make(kind, drafts, prompts, plain, NUM_TOKENS)
    jobs = [Job(p, NUM_TOKENS) for p in prompts]
    results = [harness.run([job])[0] for job in jobs]
    check(plain, jobs, results)
    check_acceptance(kind, results)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("dflash2", SHORT),
        pytest.param("dflash2", NUM_TOKENS, marks=SLOW),
        pytest.param("dflash", NUM_TOKENS, marks=SLOW),
    ],
)
def test_staggered_with_aborts_and_a_small_pool(kind, length, drafts, prompts, plain):
    """Arrivals spread out, every eighth request aborted while it decodes, a pool that forces retraction."""
    pool = 2048 if length == SHORT else 4096
    harness = make(kind, drafts, prompts, plain, length, max_running_requests=32, max_total_tokens=pool)
    jobs = staggered(prompts, length)
    results = harness.run(jobs)
    check(plain, jobs, results)
    check_staggered(harness, jobs)


# A step costs 8 rows and its own: trimming pays as soon as survival is low.
COSTS = SpsCostTable(tuple(range(1, 257)), tuple(1000.0 / (8 + n) for n in range(1, 257)), 256)


def run_adaptive(kind, mode, fraction, jobs: list[Job], drafts, pool: int) -> tuple[Harness, list[Result]]:
    """Plays the jobs with budgets pinned to `fraction`, or planned; an estimator may trim from the start."""
    harness = Harness("demo", drafts[kind], max_running_requests=32, max_total_tokens=pool)
    grid = TierGrid(TierRule(WIDTH, 32, finest_tokens=4))
    adaptive = harness.make_adaptive(mode, COSTS, grid, draft_free=None)
    adaptive.planner.pin(fraction)
    adaptive.source.num_refits = 100
    return harness, harness.run(jobs)


def check_trimming(harness: Harness) -> None:
    """Trimming was no exception, and drafts were accepted all the same."""
    records = [record for record in harness.scheduler.records if record.num_reqs]
    trimmed = [record for record in records if not record.plan.verify.full]
    assert len(trimmed) >= 0.2 * len(records)
    num_blocks = sum(record.num_reqs for record in records)
    mean_length = sum(record.num_verify_tokens for record in records) / num_blocks
    accepted = sum(record.num_output_tokens for record in records) / num_blocks
    print(
        f"{len(trimmed)} of {len(records)} steps trimmed, mean length {mean_length:.2f}, kept {accepted:.2f}"
    )
    assert 1.5 < accepted < mean_length < WIDTH


ADAPTIVE_MODES = pytest.mark.parametrize(
    "mode", [VerifyMode.CAP_ACCEPT, VerifyMode.COMPACT], ids=lambda mode: mode.value
)


@ADAPTIVE_MODES
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_planned(kind, mode, drafts, prompts, plain):
    jobs = [Job(p, SHORT, arrive=i) for i, p in enumerate(prompts[:16])]
    harness, results = run_adaptive(kind, mode, None, jobs, drafts, pool=4096)
    check(plain, jobs, results)
    check_trimming(harness)


@pytest.mark.full
@ADAPTIVE_MODES
@pytest.mark.parametrize("fraction", [None, 0.05, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_adaptive_with_arrivals_aborts_and_a_small_pool(kind, mode, fraction, drafts, prompts, plain):
    length = NUM_TOKENS if fraction is None else SHORT
    jobs = staggered(prompts, length)
    pool = 2048 if length == SHORT else 4096
    harness, results = run_adaptive(kind, mode, fraction, jobs, drafts, pool)
    check(plain, jobs, results)
    check_staggered(harness, jobs)
    if fraction is None:
        check_trimming(harness)
