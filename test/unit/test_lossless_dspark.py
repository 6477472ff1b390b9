"""Greedy losslessness of DSPARK on tiny models: heads, row layouts, arrival patterns, pool sizes, one output.

A random draft is almost never right. These drafts' Markov heads know by heart what mostly follows a token in the
plain outputs, so that blocks are accepted whole, in part and not at all.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from harness import Harness, Job, count_excused
from tiny_models import VOCAB_SIZE, write_dspark, write_target

GAMMA = 5
LENGTH = 40
HEADS = ("vanilla", "gated", "rnn")
LAYOUTS = (True, False)  # sample_from_anchor
DRAFTS = [(head, layout) for head in HEADS for layout in LAYOUTS]


def prompts(count: int) -> list[list[int]]:
    """Lengths from one token to several pages, all different."""
    return [[(7 * i + 13 * j * j + j) % 250 + 4 for j in range(1 + (i * 11) % 60)] for i in range(count)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target", eos_token_id=None)


@pytest.fixture(scope="module")
def plain(target):
    """A server without a draft, and what it says to each prompt alone."""
    harness = Harness(target)
    return harness, [harness.run([Job(p, LENGTH)])[0].tokens for p in prompts(12)]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, target, plain):
    root = tmp_path_factory.mktemp("drafts")
    known = followers(plain[1])
    written = {}
    for head, layout in DRAFTS:
        keys = {"markov_rank": VOCAB_SIZE, "confidence": False}
        folder = write_dspark(root / f"{head}-{layout}", target, head=head, sample_from_anchor=layout, **keys)
        learn_by_heart(folder / "model.safetensors", head, known)
        written[head, layout] = folder
    return written


def followers(outputs: list[list[int]]) -> dict[int, int]:
    """What follows each token most often."""
    pairs = Counter(pair for tokens in outputs for pair in itertools.pairwise(tokens))
    return {first: second for (first, second), _ in sorted(pairs.items(), key=lambda item: item[1])}


def learn_by_heart(file, head: str, known: dict[int, int]) -> None:
    """Embeddings become unit vectors, and whatever the head makes of them stays close to that."""
    tensors = load_file(file)
    w = {name: tensors[f"markov_head.{name}"] for name in ("markov_w1.weight", "markov_w2.weight")}
    w["markov_w1.weight"].copy_(torch.eye(VOCAB_SIZE))
    w["markov_w2.weight"].zero_()
    for first, second in known.items():
        w["markov_w2.weight"][second, first] = 30.0
    if head == "gated":
        tensors["markov_head.gate_proj.bias"].fill_(9.0)
    if head == "rnn":
        output = tensors["markov_head.joint_proj.weight"][2 * VOCAB_SIZE :]
        output.zero_()[:, VOCAB_SIZE : 2 * VOCAB_SIZE] = 3 * torch.eye(VOCAB_SIZE)
        tensors["markov_head.joint_proj.bias"][2 * VOCAB_SIZE :] = 0
    save_file(tensors, file, metadata={"format": "pt"})


def assert_same(plain, jobs, results) -> None:
    harness, expected = plain
    of_prompt = dict(zip(map(tuple, prompts(12)), expected, strict=True))
    pairs = [(j, r) for j, r in zip(jobs, results, strict=True) if r.finish.type != "abort"]
    wanted = [of_prompt[tuple(j.prompt)][: j.max_new_tokens] for j, _ in pairs]
    assert count_excused(harness, [j for j, _ in pairs], wanted, [r.tokens for _, r in pairs]) == 0
    assert all(len(r.tokens) == j.max_new_tokens for j, r in pairs)


def accepted(results) -> Counter:
    """Steps by number of accepted drafts."""
    counts: Counter = Counter()
    for result in results:
        counts.update(dict(enumerate(result.stats.accept_histogram)))
    return counts


@pytest.mark.parametrize(("head", "layout"), DRAFTS)
def test_alone_together_and_chunked(target, plain, drafts, head, layout):
    jobs = [Job(p, LENGTH) for p in prompts(12)]
    harness = Harness(target, drafts[head, layout])
    alone = [harness.run([job])[0] for job in jobs[:4]]
    assert_same(plain, jobs[:4], alone)
    together = harness.run(jobs)
    assert_same(plain, jobs, together)
    counts = accepted(together)
    assert counts[0] > 0 and counts[GAMMA] > 0, counts
    assert sum(counts[c] for c in range(1, GAMMA)) > 0, counts
    assert [r.stats.num_verify_steps for r in alone] == [r.stats.num_verify_steps for r in together[:4]]
    chunked = Harness(target, drafts[head, layout], chunked_prefill_size=7).run(jobs)
    assert_same(plain, jobs, chunked)
    assert [r.stats.accept_histogram for r in chunked] == [r.stats.accept_histogram for r in together]


@pytest.mark.parametrize(("head", "layout"), DRAFTS)
def test_retraction_keeps_the_output(target, plain, drafts, head, layout):
    jobs = [Job(p, LENGTH) for p in prompts(12)]
    harness = Harness(target, drafts[head, layout], max_total_tokens=256)
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    assert harness.scheduler.residency.num_retractions == sum(r.num_retractions for r in results) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_block_sizes(target, plain, drafts, layout, gamma):
    jobs = [Job(p, LENGTH) for p in prompts(6)]
    results = Harness(target, drafts["vanilla", layout], speculative_dspark_block_size=gamma).run(jobs)
    assert_same(plain, jobs, results)
    assert max(c for c, steps in accepted(results).items() if steps) == gamma


@pytest.mark.parametrize("layout", LAYOUTS)
def test_speculation_off_and_sampled_mates_in_one_batch(target, plain, drafts, layout):
    """Greedy rows of a mixed batch: the dense form of q and requests without a draft change nothing for them."""
    jobs = [
        Job(p, LENGTH, speculation="off" if i % 3 == 1 else "static", sampling={"temperature": float(i % 2)})
        for i, p in enumerate(prompts(12))
    ]
    results = Harness(target, drafts["rnn", layout]).run(jobs)
    greedy = [i for i in range(12) if i % 2 == 0]
    assert_same(plain, [jobs[i] for i in greedy], [results[i] for i in greedy])
    assert all(len(r.tokens) == LENGTH for r in results)
    for job, result in zip(jobs, results, strict=True):
        assert (result.stats.num_drafted == 0) == (job.speculation == "off")


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(target, plain, drafts, data):
    """Staggered arrivals, aborts at any moment, small pools, small chunks, few rows, any head and layout."""
    harness = Harness(
        target,
        drafts[data.draw(st.sampled_from(DRAFTS))],
        max_total_tokens=data.draw(st.integers(8, 40)) * 16,
        max_running_requests=data.draw(st.integers(1, 8)),
        chunked_prefill_size=data.draw(st.integers(1, 80)),
        speculative_dspark_block_size=data.draw(st.integers(1, GAMMA)),
    )
    jobs = [
        Job(
            prompts(12)[data.draw(st.integers(0, 11))],
            max_new_tokens=data.draw(st.integers(1, LENGTH)),
            arrive=data.draw(st.integers(0, 30)),
            abort=data.draw(st.none() | st.integers(0, 40)),
        )
        for _ in range(data.draw(st.integers(1, 14)))
    ]
    for job in jobs:  # an abort before the arrival is an abort of nobody
        job.abort = None if job.abort is None else max(job.abort, job.arrive)
    assert_same(plain, jobs, harness.run(jobs))


def test_seeded_sampling_alone_and_batched(target, drafts):
    """Same seed, same output: alone, in a batch, in another place of it, through retraction."""
    sampling = {"temperature": 1.0, "seed": 77}
    mates = [Job(p, 30, sampling={"temperature": float(i % 2)}) for i, p in enumerate(prompts(12)[:8])]
    probe = Job(prompts(12)[9], 30, sampling=sampling)
    draft = drafts["rnn", True]
    roomy = Harness(target, draft)
    alone = roomy.run([probe])[0].tokens
    assert roomy.run([probe, *mates])[0].tokens == alone
    assert roomy.run([*mates, Job(probe.prompt, 30, arrive=6, sampling=sampling)])[-1].tokens == alone
    tight = Harness(target, draft, max_total_tokens=160)
    results = tight.run([*(Job(p, 60, sampling={"temperature": 1.0}) for p in prompts(3)), probe])
    assert results[-1].tokens == alone
    assert results[-1].num_retractions > 0
