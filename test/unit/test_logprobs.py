"""Log-probabilities against transformers: every position, block and chunk boundaries, every draft and mode."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from flashspark.ipc import LogprobParams, TokenLogprobs
from flashspark.speculative import logprobs as stage
from flashspark.speculative import worker as worker_module
from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.logprobs import gather_logprobs
from flashspark.speculative.sampling import LogprobRule
from harness import Harness, Job, Result
from tiny_models import IM_END_ID, VOCAB_SIZE, write_dspark
from unit.test_lossless_adaptive import LINEAR, grid
from unit.test_lossless_dspark import followers, learn_by_heart
from unit.test_lossless_tiny import assert_same, folders, plain, prompts  # noqa: F401 - fixtures

LISTED = (0, 5, 77, VOCAB_SIZE - 1)
LOWEST = float(torch.finfo(torch.float32).min)
RUNS = [
    ("none", VerifyMode.STATIC),
    *((draft, mode) for draft in ("dflash2", "dspark") for mode in VerifyMode),
    ("dflash", VerifyMode.STATIC),
]


@pytest.fixture(scope="module")
def drafts(folders, plain, tmp_path_factory):  # noqa: F811
    """The DSpark's head knows much of the plain outputs by heart: blocks are accepted whole, in part, not at all."""
    folder = write_dspark(tmp_path_factory.mktemp("dspark"), folders["target"], markov_rank=VOCAB_SIZE)
    learn_by_heart(folder / "model.safetensors", "vanilla", followers(plain[1]))
    return {"none": None, "dflash": folders["dflash"], "dflash2": folders["dflash2"], "dspark": folder}


@pytest.fixture(scope="module")
def theirs(folders):  # noqa: F811
    return Qwen3ForCausalLM.from_pretrained(folders["target"], attn_implementation="eager").eval()


def make(folders, draft, mode=VerifyMode.STATIC, **args) -> Harness:  # noqa: F811
    harness = Harness(folders["target"], draft, **args)
    if mode is not VerifyMode.STATIC:
        settings = {"min_gain": 0.0, "draft_free": None}
        adaptive = harness.make_adaptive(mode, LINEAR, grid(48), **settings)
        adaptive.source.num_refits = 100
    return harness


def reference_logits(theirs, job: Job, result: Result) -> torch.Tensor:
    """Of every position of prompt and output, float32 [n, V]."""
    with torch.no_grad():
        return theirs(torch.tensor([[*job.prompt, *result.tokens]])).logits[0]


def close(found, expected) -> bool:
    return torch.allclose(torch.tensor(found), torch.as_tensor(expected), rtol=0, atol=1e-4)


def check_positions(found: TokenLogprobs, expected: torch.Tensor, tokens: list[int], params: LogprobParams):
    """`expected` [n, V] are the log-probabilities of the positions of `tokens` [n]."""
    assert len(found.values) == len(tokens)
    assert close(found.values, expected[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64)])
    assert len(found.top_values) == len(found.top_ids) == (len(tokens) if params.num_top else 0)
    for values, ids, row in zip(found.top_values, found.top_ids, expected, strict=params.num_top > 0):
        assert values == sorted(values, reverse=True)
        assert len(set(ids)) == params.num_top
        assert close(values, row.topk(params.num_top).values)
        assert close(values, row[ids])
    assert len(found.listed_values) == (len(tokens) if params.token_ids else 0)
    for values, row in zip(found.listed_values, expected, strict=len(params.token_ids) > 0):
        assert close(values, row[list(params.token_ids)])


def joined(parts: list[TokenLogprobs]) -> TokenLogprobs:
    names = TokenLogprobs.__struct_fields__
    return TokenLogprobs(*([item for part in parts for item in getattr(part, name)] for name in names))


def check(theirs, job: Job, result: Result) -> None:
    """All of a job's log-probabilities, and that each message's are its own tokens'."""
    params = job.logprobs
    assert params is not None
    assert [len(part.values) for part in result.logprobs] == result.steps
    logits, num_prompt = reference_logits(theirs, job, result), len(job.prompt)
    temperature = job.sampling.get("temperature", 0.0) or 1.0
    output = torch.log_softmax(logits[num_prompt - 1 : len(logits) - 1] / temperature, -1)
    check_positions(joined(result.logprobs), output, result.tokens, params)
    prompt = torch.log_softmax(logits[params.start : num_prompt - 1], -1)
    assert len(result.prompt_logprobs) == (params.start < num_prompt - 1)
    check_positions(joined(result.prompt_logprobs), prompt, list(job.prompt[params.start + 1 :]), params)


def asking_jobs(length: int = 40, **sampling) -> list[Job]:
    """Requests that ask for different things, and two in between that ask for nothing."""
    jobs = []
    for i, prompt in enumerate(prompts(12)):
        start = (0, len(prompt) - 1, len(prompt) // 2)[i % 3]
        params = LogprobParams(start, (0, 3, 7)[i // 2 % 3], LISTED[: i % 5])
        jobs.append(Job(prompt, length, sampling=sampling, logprobs=None if i in (4, 9) else params))
    return jobs


def check_all(theirs, jobs: list[Job], results: list[Result]) -> None:
    for job, result in zip(jobs, results, strict=True):
        if job.logprobs is None:
            assert (result.logprobs, result.prompt_logprobs) == ([], [])
        else:
            check(theirs, job, result)


@pytest.mark.parametrize(("draft", "mode"), RUNS, ids=lambda value: getattr(value, "value", value))
def test_greedy_equals_transformers(folders, drafts, plain, theirs, draft, mode):  # noqa: F811
    jobs = asking_jobs()
    harness = make(folders, drafts[draft], mode)
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    check_all(theirs, jobs, results)
    if draft == "dspark":
        assert max(max(result.steps) for result in results) > 1  # accepted drafts are among the positions
    if mode is not VerifyMode.STATIC:
        assert harness.scheduler.totals["trimmed_steps"] > 0


@pytest.mark.parametrize(("draft", "mode"), RUNS[:7:3], ids=lambda value: getattr(value, "value", value))
def test_sampled_are_scaled_by_temperature(folders, drafts, theirs, draft, mode):  # noqa: F811
    jobs = asking_jobs(24, temperature=0.7, top_k=20, top_p=0.9)
    check_all(theirs, jobs, make(folders, drafts[draft], mode).run(jobs))


def test_original_logprobs_are_before_temperature(folders, drafts, theirs, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    harness = make(folders, drafts["dspark"])
    assert harness.ready.info["return_original_logprob"] is True
    (result,) = harness.run(
        [Job(prompts(6)[5], 20, sampling={"temperature": 3.0}, logprobs=LogprobParams(0))]
    )
    check(theirs, Job(prompts(6)[5], logprobs=LogprobParams(0)), result)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunk_boundaries(folders, drafts, theirs, chunk):  # noqa: F811
    jobs = asking_jobs(6)
    check_all(theirs, jobs, make(folders, drafts["dflash2"], chunked_prefill_size=chunk).run(jobs))


def test_long_prompts_are_told_in_slices(folders, theirs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(stage, "LOGITS_AT_ONCE", 3 * VOCAB_SIZE + 1)
    sizes = []
    monkeypatch.setattr(
        stage,
        "gather_logprobs",
        lambda logits, *rest: sizes.append(len(logits)) or gather_logprobs(logits, *rest),
    )
    job = Job(prompts(12)[10], 1, logprobs=LogprobParams(2, 4, LISTED))
    check(theirs, job, make(folders, None).run([job])[0])
    assert max(sizes) == 3 and sum(sizes) == len(job.prompt) - 3 + 1


def count_prompt_rows(harness: Harness, monkeypatch) -> list[int]:
    """Prompt rows told, by prefill."""
    counts: list[int] = []
    prefill = harness._worker.prefill

    def counting(chunks, wanted=()):
        counts.append(sum(len(one.rows) for one in wanted))
        return prefill(chunks, wanted)

    monkeypatch.setattr(harness._worker, "prefill", counting)
    return counts


@pytest.mark.parametrize("draft", ["none", "dspark"])
def test_retraction_tells_nothing_twice(folders, drafts, plain, theirs, monkeypatch, draft):  # noqa: F811
    """Retracted while decoding and in the middle of a prompt; each position is computed and sent once."""
    jobs = [Job(p, 40, logprobs=LogprobParams(0, 2)) for p in prompts(12)]
    harness = make(folders, drafts[draft], max_total_tokens=256, chunked_prefill_size=5)
    counts, retracted_at = count_prompt_rows(harness, monkeypatch), []
    retract = harness.scheduler.residency._retract
    monkeypatch.setattr(
        harness.scheduler.residency,
        "_retract",
        lambda request: retracted_at.append(request.prompt_logprobs.first_row) or retract(request),
    )
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    check_all(theirs, jobs, results)
    assert None in retracted_at  # its prompt was told
    assert sum(counts) == sum(len(job.prompt) - 1 for job in jobs)


def test_a_prompt_that_was_half_told_goes_on_after_retraction(folders, theirs, monkeypatch):  # noqa: F811
    """The second request gives way while its prompt is being read."""
    jobs = [
        Job(list(range(20, 60)), 60, logprobs=LogprobParams(0)),
        Job(list(range(80, 120)), 4, arrive=3, logprobs=LogprobParams(1, 2, LISTED)),
    ]
    harness = make(folders, None, max_total_tokens=112, chunked_prefill_size=20)
    counts = count_prompt_rows(harness, monkeypatch)
    seen = []

    def retract_once(request) -> None:
        if request.row >= 0 and request.prompt_logprobs.first_row == 20 and not seen:
            seen.append(request)
            harness.scheduler.residency._retract(request)

    step = harness.scheduler.step

    def stepping() -> None:
        step()
        for request in list(harness.scheduler._requests.values()):
            if request.message.input_ids == jobs[1].prompt:
                retract_once(request)

    monkeypatch.setattr(harness.scheduler, "step", stepping)
    results = harness.run(jobs)
    check_all(theirs, jobs, results)
    assert len(seen) == 1 and results[1].num_retractions == 1
    assert sum(counts) == 39 + 38


def test_a_stop_inside_a_block_cuts_them_too(folders, plain, theirs):  # noqa: F811
    prompt, tokens = prompts(12)[5], plain[1][5]
    harness = make(folders, folders["dflash"])
    harness.script_drafts(7, {tuple(prompt): tokens})
    for length in (1, 3, 11):
        job = Job(prompt, length, logprobs=LogprobParams(len(prompt) - 1, 2))
        check(theirs, job, harness.run([job])[0])
    job = Job(prompt, 40, sampling={"stop_token_ids": (tokens[4],)}, logprobs=LogprobParams(0, 2))
    result = harness.run([job])[0]
    assert result.tokens == tokens[: tokens.index(tokens[4]) + 1]
    check(theirs, job, result)


def test_a_prompt_alone(folders, theirs):  # noqa: F811
    """No output: what is asked about the prompt is the answer. Nothing asked, or nothing to tell: at once."""
    harness = make(folders, folders["dflash2"], chunked_prefill_size=9)
    params = [LogprobParams(0, 2), LogprobParams(11, 0, LISTED), LogprobParams(len(prompts(8)[7]) - 1), None]
    jobs = [Job(prompts(8)[7], 0, logprobs=one) for one in params]
    results = harness.run([*jobs, Job([9], 0, logprobs=LogprobParams(0))])
    assert all((result.tokens, result.finish.type) == ([], "length") for result in results)
    check_all(theirs, jobs, results[:4])
    assert results[4].prompt_logprobs == []
    assert harness.scheduler.totals["verify_steps"] == 0


def test_adjusted_logits_are_what_they_are_of(folders, drafts, theirs):  # noqa: F811
    """Bias and suppressed ids are in them, row by row along the block; what cannot be chosen is the lowest float."""
    bias, stops = {7: 4.0, 9: -3.0}, (30, IM_END_ID)
    sampling = {"temperature": 0.0, "logit_bias": bias, "min_new_tokens": 9, "stop_token_ids": stops}
    params = LogprobParams(3, 5, (7, 9, 30))
    job = Job(prompts(12)[6], 20, sampling=sampling, logprobs=params)
    mate = Job(prompts(12)[2], 20, logprobs=LogprobParams(0, 1))
    result, other = make(folders, drafts["dspark"]).run([job, mate])
    check(theirs, mate, other)
    logits, num_prompt = reference_logits(theirs, job, result).clone(), len(job.prompt)
    prompt = torch.log_softmax(logits[3 : num_prompt - 1], -1)
    check_positions(joined(result.prompt_logprobs), prompt, job.prompt[4:], params)
    output = logits[num_prompt - 1 : len(logits) - 1]
    for token_id, value in bias.items():
        output[:, token_id] += value
    output[:9, list(stops)] = -torch.inf
    expected = torch.log_softmax(output, -1).clamp(min=LOWEST)
    check_positions(joined(result.logprobs), expected, result.tokens, params)
    assert [values[2] for values in joined(result.logprobs).listed_values[:9]] == [LOWEST] * 9


def test_repetition_penalty_sees_the_drafts_before_a_row(folders, drafts, theirs):  # noqa: F811
    job = Job(
        prompts(12)[6],
        24,
        sampling={"temperature": 0.0, "repetition_penalty": 1.4},
        logprobs=LogprobParams(20, 3),
    )
    result = make(folders, drafts["dspark"]).run([job])[0]
    logits, num_prompt = reference_logits(theirs, job, result), len(job.prompt)
    for i, token in enumerate(result.tokens):
        row = logits[num_prompt - 1 + i].clone()
        seen = torch.tensor(sorted({*job.prompt, *result.tokens[:i]}))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.4, row[seen] * 1.4)
        assert close(joined(result.logprobs).values[i], torch.log_softmax(row, -1)[token])


def test_nobody_who_asks_for_nothing_pays(folders, drafts, monkeypatch):  # noqa: F811
    """A batch without such requests runs nothing of the stage."""

    def never(*_: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(worker_module, "committed_logprobs", never)
    monkeypatch.setattr(stage, "gather_logprobs", never)
    results = make(folders, drafts["dspark"]).run([Job(p, 8) for p in prompts(4)])
    assert all(len(result.tokens) == 8 for result in results)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(folders, drafts, plain, theirs, data):  # noqa: F811
    draft, mode = data.draw(st.sampled_from(RUNS))
    harness = make(
        folders,
        drafts[draft],
        mode,
        max_total_tokens=data.draw(st.integers(8, 40)) * 16,
        max_running_requests=data.draw(st.integers(1, 8)),
        chunked_prefill_size=data.draw(st.integers(1, 80)),
    )
    jobs = []
    for _ in range(data.draw(st.integers(1, 8))):
        prompt = prompts(12)[data.draw(st.integers(0, 11))]
        params = st.builds(
            LogprobParams,
            st.integers(0, len(prompt) - 1),
            st.integers(0, 4),
            st.lists(st.sampled_from(LISTED), unique=True).map(tuple),
        )
        job = Job(prompt, data.draw(st.integers(1, 30)), arrive=data.draw(st.integers(0, 20)))
        job.logprobs = data.draw(st.none() | params)
        jobs.append(job)
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    check_all(theirs, jobs, results)


@given(data=st.data())
def test_gather_takes_apart_what_it_put_together(data):
    """Requests of any rules in one call are told what each alone would be."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rules = data.draw(
        st.lists(
            st.builds(LogprobRule, st.integers(0, 6), st.lists(st.integers(0, 8), max_size=3).map(tuple)),
            min_size=1,
            max_size=4,
        )
    )
    counts = [data.draw(st.integers(1, 3)) for _ in rules]
    logits = torch.randn(sum(counts), 9, generator=generator)
    tokens = torch.randint(0, 9, (sum(counts),), generator=generator)
    together = gather_logprobs(logits, tokens, rules, counts)
    at = 0
    for rule, count, found in zip(rules, counts, together, strict=True):
        rows = slice(at, at + count)
        assert found == gather_logprobs(logits[rows], tokens[rows], [rule], [count])[0]
        assert all(len(ids) == rule.num_top for ids in found.top_ids)
        at += count


def test_gather_of_what_is_no_number():
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [torch.nan, 0.0, 0.0]])
    found = gather_logprobs(logits, torch.tensor([1, 1]), [LogprobRule(3)], [2])[0]
    assert found.values[0] == LOWEST and found.top_ids[0] == [2, 0, 1]
    assert found.values[1] != found.values[1]  # NaN, which is sent as null
