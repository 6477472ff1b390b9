"""Requests whose K/V partly comes from the prefix cache say what they say without it, in every mode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashspark.demo import DEMO_MODELS, DEMO_PROMPTS
from flashspark.ipc import LogprobParams
from flashspark.scheduler.prefix_cache import CachedPage
from flashspark.speculative.adaptive import VerifyMode
from harness import Harness, Job, Result, count_excused
from unit.test_lossless_adaptive import LINEAR, WIDTH, drafts, grid  # noqa: F401 - fixtures
from unit.test_lossless_tiny import folders, plain, prompts  # noqa: F401 - fixtures

PAGE = 16
SYSTEM = [(5 * i * i + 3 * i) % 250 + 4 for i in range(40)]  # two full pages and a half
KINDS = [
    (None, VerifyMode.STATIC),
    ("dflash2", VerifyMode.STATIC),
    ("dflash2", VerifyMode.CAP_ACCEPT),
    ("dflash2", VerifyMode.COMPACT),
    ("dspark", VerifyMode.STATIC),
    ("dspark", VerifyMode.CAP_ACCEPT),
    ("dspark", VerifyMode.COMPACT),
]
every_kind = pytest.mark.parametrize(
    ("draft", "mode"), KINDS, ids=[f"{draft or 'plain'}-{mode.value}" for draft, mode in KINDS]
)


class Cold:
    """A server without a draft and without a prefix cache, and what it has said."""

    def __init__(self, target) -> None:
        self.harness = Harness(target, disable_radix_cache=True)
        self._said: dict[tuple[int, ...], list[int]] = {}

    def expected(self, jobs: Sequence[Job]) -> list[list[int]]:
        """The tokens of these greedy jobs."""
        said, missing = self._said, {}
        for job in jobs:
            prompt = tuple(job.prompt)
            if len(said.get(prompt, [])) < job.max_new_tokens:
                missing[prompt] = max(missing.get(prompt, 0), job.max_new_tokens)
        results = self.harness.run([Job(prompt, length) for prompt, length in missing.items()])
        said |= {prompt: result.tokens for prompt, result in zip(missing, results, strict=True)}
        return [said[tuple(job.prompt)][: job.max_new_tokens] for job in jobs]


@pytest.fixture(scope="module")
def cold(folders):  # noqa: F811
    return Cold(folders["target"])


def make(folders, drafts, draft, mode, **args) -> Harness:  # noqa: F811
    harness = Harness(folders["target"], draft and drafts[draft], **args)
    if mode is not VerifyMode.STATIC:
        adaptive = harness.make_adaptive(mode, LINEAR, grid(48), min_gain=0.0, draft_free=None)
        adaptive.source.num_refits = 100  # an estimator that may trim from the start
    return harness


def check_output(cold: Cold, jobs: Sequence[Job], results: Sequence[Result]) -> None:
    """What the target alone says without a cache; of aborted requests, as far as they came."""
    wanted = [
        tokens[: len(result.tokens)] if result.finish.type == "abort" else tokens
        for tokens, result in zip(cold.expected(jobs), results, strict=True)
    ]
    assert count_excused(cold.harness, jobs, wanted, [result.tokens for result in results]) == 0


def whole_pages(num_tokens: int) -> int:
    """As many tokens as fill pages."""
    return num_tokens // PAGE * PAGE


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@every_kind
def test_one_after_another(folders, drafts, cold, draft, mode):  # noqa: F811
    """Conversations with one system prompt: each finds what was served before it, and says what it says without."""
    harness = make(folders, drafts, draft, mode)
    served: list[list[int]] = []  # committed tokens of earlier requests
    jobs, results = [], []
    for tail in (prompts(12)[i] for i in (1, 5, 7, 11, 5)):
        prompt = SYSTEM + tail
        for _ in range(2):  # the second is the next turn
            job = Job(prompt, 21)
            (result,) = harness.run([job])
            found = max([common(prompt[:-1], tokens) for tokens in served], default=0)
            assert result.num_cached_tokens == whole_pages(found)
            jobs.append(job)
            results.append(result)
            served.append((prompt + result.tokens)[: whole_pages(len(prompt) + len(result.tokens) - 1)])
            prompt = prompt + result.tokens + [9, 8, 7]
    check_output(cold, jobs, results)
    assert sum(result.num_cached_tokens > 32 for result in results) >= 6


@every_kind
def test_lengths_at_the_edges(folders, drafts, cold, draft, mode):  # noqa: F811
    """Around a page and around the context's end, cold and with all of it found that may be found."""
    limit = 96
    harness = make(folders, drafts, draft, mode, context_length=limit)
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, *range(limit - WIDTH - 1, limit + 2))
    all_prompts = [[(11 * i + length) % 250 + 4 for i in range(length)] for length in lengths]
    for max_new_tokens in (1, WIDTH + 1, None):  # the last: to the context's end
        every = [Job(p, max_new_tokens or max(1, limit - len(p))) for p in all_prompts]
        jobs = [job for job in every if len(job.prompt) + job.max_new_tokens <= limit]
        assert harness.scheduler.flush_cache()
        for hit in (False, True):
            refused = harness.run([job for job in every if job not in jobs])
            assert [result.finish.status_code for result in refused] == [400] * (len(every) - len(jobs))
            results = harness.run(jobs)
            for job, result in zip(jobs, results, strict=True):
                assert (len(result.tokens), result.finish.type) == (job.max_new_tokens, "length")
                assert result.num_cached_tokens == hit * whole_pages(len(job.prompt) - 1) < len(job.prompt)
            check_output(cold, jobs, results)


def test_a_prompt_that_is_there_is_not_computed_again(folders):  # noqa: F811
    """All but the anchor is found: the request decodes in its first step."""
    harness = Harness(folders["target"], folders["dflash2"])
    prompt = [*SYSTEM[:32], 9]
    harness.run([Job(prompt, 4)])
    before = len(harness.scheduler.records)
    (result,) = harness.run([Job(prompt, 4)])
    records = list(harness.scheduler.records)[before:]
    assert result.num_cached_tokens == 32 == len(prompt) - 1
    assert [record.num_prefill_tokens for record in records] == [0] * len(records)
    assert records[0].num_reqs == 1


def test_a_running_request_lends_its_prompt(folders, cold):  # noqa: F811
    harness = Harness(folders["target"], folders["dflash2"])
    jobs = [Job([*SYSTEM, i], 40, arrive=i) for i in range(3)]
    results = harness.run(jobs)
    assert [result.num_cached_tokens for result in results] == [0, 32, 32]
    assert max(record.num_reqs for record in harness.scheduler.records) == 3
    check_output(cold, jobs, results)
    # Three requests of one system prompt hold its two pages once.
    assert harness.scheduler.residency.cache.num_pages == 2 + 3 * ((len(SYSTEM) + 40) // PAGE - 2)


def test_choices_of_one_prompt_compute_it_once(folders, cold):  # noqa: F811
    """They wait until the first one has computed the last whole page of it, chunk by chunk."""
    harness = Harness(folders["target"], folders["dflash2"], chunked_prefill_size=20)
    prompt = [*SYSTEM, *prompts(12)[5]]
    other = Job([7] * 20, 20)
    jobs = [other, *[Job(prompt, 20, choice_index=i) for i in range(4)], Job([*prompt[:15], 9, 9], 20)]
    results = harness.run(jobs)
    found = whole_pages(len(prompt) - 1)
    assert [result.num_cached_tokens for result in results] == [0, 0, found, found, found, 0]
    computed = sum(record.num_prefill_tokens for record in harness.scheduler.records)
    assert computed == sum(len(job.prompt) - 1 for job in jobs) - 3 * found
    check_output(cold, jobs, results)


def test_log_probabilities_of_a_prompt_limit_what_is_taken_from_the_cache(folders, cold):  # noqa: F811
    """Rows that have any to tell are run, and tell what they told without the cache."""
    harness = Harness(folders["target"])
    starts = (0, 31, 16, 0, len(SYSTEM) - 1)
    jobs = [Job(SYSTEM, 8), *(Job(SYSTEM, 8, logprobs=LogprobParams(start, 2)) for start in starts)]
    results = [harness.run([job])[0] for job in jobs]
    assert [result.num_cached_tokens for result in results] == [0, 0, 16, 16, 0, 32]
    check_output(cold, jobs, results)
    (told,) = results[1].prompt_logprobs
    assert len(told.values) == len(SYSTEM) - 1
    for start, result in zip(starts[:4], results[1:5], strict=True):
        (found,) = result.prompt_logprobs
        assert found.values == pytest.approx(told.values[start:], abs=1e-4)
        assert found.top_ids == told.top_ids[start:]
    assert results[5].prompt_logprobs == []


def test_namespaces_never_share(folders):  # noqa: F811
    harness = Harness(folders["target"])
    namespaces = [(), ("", "a"), ("a", ""), ("", "a"), ("a", "a"), ("",)]
    jobs = [Job(SYSTEM, 4, message={"cache_namespace": namespace}) for namespace in namespaces]
    assert [harness.run([job])[0].num_cached_tokens for job in jobs] == [0, 0, 0, 32, 0, 0]


def test_flush(folders):  # noqa: F811
    """Refused while a request runs; when none does, every page is free, and the mean acceptance starts afresh."""
    harness = Harness(folders["target"], folders["dflash2"], max_total_tokens=640)
    scheduler, busy = harness.scheduler, []
    step = scheduler.step

    def watched() -> None:
        busy.append(scheduler.flush_cache())
        step()

    scheduler.step = watched
    harness.run([Job(SYSTEM, 8)])
    assert len(busy) > 2 and not any(busy)
    state = scheduler.state()
    assert state["num_evictable_pages"] == state["num_cached_pages"] == 2
    assert (state["num_free_pages"], state["num_used_tokens"]) == (38, 0)
    assert state["avg_spec_accept_length"] == 8 / state["verify_steps"]
    assert scheduler.flush_cache()
    after = scheduler.state()
    assert (after["num_free_pages"], after["num_cached_pages"]) == (40, 0)
    assert "avg_spec_accept_length" not in after and after["verify_steps"] == state["verify_steps"]
    (result,) = harness.run([Job(SYSTEM, 8)])
    assert result.num_cached_tokens == 0
    assert scheduler.state()["avg_spec_accept_length"] == 8 / result.stats.num_verify_steps


def test_turned_off(folders):  # noqa: F811
    harness = Harness(folders["target"], disable_radix_cache=True)
    assert [harness.run([Job(SYSTEM, 4)])[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert harness.scheduler.state()["num_free_pages"] == harness.scheduler.state()["num_pages"]


# Poison


def cached_nodes(harness: Harness) -> Iterator[CachedPage]:
    nodes = [harness.scheduler.residency.cache._root]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        if node.page:
            yield node


def poison(harness: Harness) -> list[int]:
    """From now on free pages are full of NaN, and a page of the cache must keep what it had when it was published.

    Returns a list that gets the pages of the cache at every step.
    """
    residency, runner, seen = harness.scheduler.residency, harness._worker.runner, []
    pools = [runner.target_pool, *([runner.draft_pool] if runner.draft_pool else [])]
    caches = [cache for pool in pools for cache in (*pool.k, *pool.v)]
    kept: dict[CachedPage, list[torch.Tensor]] = {}
    publish, free, step = residency.cache.publish, residency.allocator.free, harness.scheduler.step

    def slots(page: int) -> slice:
        return slice(page * PAGE, (page + 1) * PAGE)

    def watched_publish(path, *args, **kwargs) -> None:
        publish(path, *args, **kwargs)
        for node in path:
            if node not in kept:
                kept[node] = [cache[slots(node.page)].clone() for cache in caches]
                assert all(tensor.isfinite().all() for tensor in kept[node])

    def poisoned_free(pages) -> None:
        free(pages)
        for page in pages:
            for cache in caches:
                cache[slots(page)] = float("nan")

    def watched_step() -> None:
        step()
        nodes = set(cached_nodes(harness))
        for node in list(kept):
            if node not in nodes:
                del kept[node]
        assert nodes == kept.keys()
        for node, tensors in kept.items():
            for cache, tensor in zip(caches, tensors, strict=True):
                assert torch.equal(cache[slots(node.page)], tensor)
        seen.append(len(nodes))

    residency.cache.publish, residency.allocator.free = watched_publish, poisoned_free
    harness.scheduler.step = watched_step
    poisoned_free([])
    for cache in caches:
        cache[PAGE:] = float("nan")
    return seen


def family(i: int) -> list[int]:
    """Prompts that share nothing, one page, two, or all but their end."""
    return (SYSTEM[: (0, 20, 40)[i % 3]] + prompts(12)[i % 12] + [i % 5 + 4])[:90]


@every_kind
def test_aborts_and_retractions_with_shared_pages(folders, drafts, cold, draft, mode):  # noqa: F811
    """A pool that a few requests outgrow: shared pages outlive their first owner and are never written again."""
    harness = make(folders, drafts, draft, mode, max_total_tokens=192, chunked_prefill_size=50)
    seen = poison(harness)
    jobs = [Job(family(i), 24 if draft == "dflash2" else 40, arrive=i // 3) for i in range(18)]
    for i in (4, 9, 14):
        jobs[i].abort = jobs[i].arrive + 5
    results = harness.run(jobs)
    check_output(cold, jobs, results)
    assert harness.scheduler.residency.num_retractions > 0
    assert sum(result.num_cached_tokens > 0 for result in results) >= 6
    assert max(seen) > 8


def test_a_retracted_request_finds_what_it_left(folders, cold):  # noqa: F811
    """Two requests of seven pages on twelve: the younger waits for the older, then computes a page again."""
    jobs = [Job([*SYSTEM[:39], i], 60) for i in (5, 6)]
    jobs[1].prompt = jobs[1].prompt[::-1]  # it shares nothing
    computed_again = []
    for off in (False, True):
        harness = Harness(folders["target"], max_total_tokens=12 * PAGE, disable_radix_cache=off)
        results = harness.run(jobs)
        assert [result.num_retractions for result in results] == [0, 1]
        assert [result.num_cached_tokens for result in results] == [0, 0]
        check_output(cold, jobs, results)
        computed_again.append(sum(r.num_prefill_tokens for r in harness.scheduler.records) - 2 * 39)
    assert computed_again[0] <= PAGE  # the one that the older took
    assert computed_again[1] > 5 * PAGE


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(folders, drafts, cold, data):  # noqa: F811
    """Any arrivals and aborts, any pool, chunk and number of rows, any draft and mode, two tenants."""
    harness = make(
        folders,
        drafts,
        *data.draw(st.sampled_from(KINDS)),
        max_total_tokens=data.draw(st.integers(8, 30)) * PAGE,
        max_running_requests=data.draw(st.integers(1, 8)),
        chunked_prefill_size=data.draw(st.integers(1, 80)),
    )
    poison(harness)
    jobs = []
    for _ in range(data.draw(st.integers(1, 14))):
        arrive = data.draw(st.integers(0, 30))
        jobs.append(
            Job(
                family(data.draw(st.integers(0, 11))),
                max_new_tokens=data.draw(st.integers(1, 24)),
                arrive=arrive,
                abort=data.draw(st.none() | st.integers(arrive, 40)),
                message={"cache_namespace": data.draw(st.sampled_from([(), ("tenant",)]))},
            )
        )
    check_output(cold, jobs, harness.run(jobs))


# The draft's context


@pytest.mark.parametrize("draft", ["demo-dflash2", "demo-dspark"])
def test_a_hit_costs_no_acceptance(draft):
    """On the shipped pair: as many verify steps as cold. A hit without the draft's K/V would need many more."""
    held_out = json.loads(DEMO_PROMPTS.read_text())
    jobs = [Job(prompt["token_ids"], 48) for prompt in held_out if len(prompt["token_ids"]) > 48][:8]
    harness = Harness("demo", DEMO_MODELS[draft])

    def steps(results: list[Result]) -> int:
        return sum(result.stats.num_verify_steps for result in results)

    cold, hit = harness.run(jobs), harness.run(jobs)
    assert [r.num_cached_tokens for r in hit] == [whole_pages(len(job.prompt) - 1) for job in jobs]
    assert [r.tokens for r in hit] == [r.tokens for r in cold]
    assert abs(steps(hit) - steps(cold)) <= 0.02 * steps(cold)
    pool = harness._worker.runner.draft_pool
    for cache in (*pool.k, *pool.v):
        cache.zero_()
    without = harness.run(jobs)
    assert [r.tokens for r in without] == [r.tokens for r in cold]
    assert steps(without) > 1.1 * steps(cold)
