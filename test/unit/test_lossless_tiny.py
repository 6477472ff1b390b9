"""Greedy losslessness on random tiny models: every draft, every arrival pattern, any pool size, one output."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flashspark.ipc import RequestOutput
from harness import Harness, Job, count_excused, to_message
from tiny_models import write_dflash, write_dflash2, write_target

WIDTH = 6
EOS = {"eos_token_id": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = write_target(root / "target", **EOS)
    return {
        None: None,
        "target": target,
        "dflash": write_dflash(root / "dflash", target, dflash_config={"block_size": WIDTH}),
        "dflash2": write_dflash2(root / "dflash2", target, dflash_config={"block_size": WIDTH}),
    }


def prompts(count: int) -> list[list[int]]:
    """Lengths from one token to several pages, all different."""
    return [[(7 * i + 13 * j * j + j) % 250 + 4 for j in range(1 + (i * 11) % 60)] for i in range(count)]


@pytest.fixture(scope="module")
def plain(folders):
    """A server without a draft, and what it says to each prompt alone."""
    harness = Harness(folders["target"])
    return harness, [harness.run([Job(p, 40)])[0].tokens for p in prompts(12)]


def assert_same(plain, jobs, results) -> None:
    harness, expected = plain
    of_prompt = dict(zip(map(tuple, prompts(12)), expected, strict=True))
    pairs = [(j, r) for j, r in zip(jobs, results, strict=True) if r.finish.type != "abort"]
    wanted = [of_prompt[tuple(j.prompt)][: j.max_new_tokens] for j, _ in pairs]
    assert count_excused(harness, [j for j, _ in pairs], wanted, [r.tokens for _, r in pairs]) == 0
    assert all(len(r.tokens) == j.max_new_tokens for j, r in pairs)


@pytest.mark.parametrize("draft", [None, "dflash", "dflash2"])
@pytest.mark.parametrize("together", [False, True])
def test_alone_and_together(folders, plain, draft, together):
    harness = Harness(folders["target"], folders[draft])
    jobs = [Job(p, 40) for p in prompts(12)]
    results = harness.run(jobs) if together else [harness.run([job])[0] for job in jobs]
    assert_same(plain, jobs, results)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prefill_changes_nothing(folders, plain, chunk):
    harness = Harness(folders["target"], folders["dflash2"], chunked_prefill_size=chunk)
    jobs = [Job(p, 12) for p in prompts(6)]
    assert_same(plain, jobs, harness.run(jobs))
    whole = Harness(folders["target"], folders["dflash2"])
    whole.run(jobs)
    steps = [[h.results[f"job{i}"].stats.num_verify_steps for i in range(6)] for h in (harness, whole)]
    assert steps[0] == steps[1]  # the draft saw the same context


def test_oracle_accepts_the_full_block_and_anti_oracle_nothing(folders, plain):
    continuation = dict(zip(map(tuple, prompts(12)), plain[1], strict=True))
    jobs = [Job(p, 40) for p in prompts(12)]
    harness = Harness(folders["target"], folders["dflash"])
    harness.script_drafts(7, continuation)
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    assert [r.stats.num_verify_steps for r in results] == [5] * 12  # 40 tokens in blocks of exactly 8
    assert all(r.stats.accept_histogram == [0] * 7 + [5] for r in results)
    harness.script_drafts(7, continuation, shift=1)
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    assert all(r.stats.num_accepted == 0 and r.stats.num_verify_steps == 40 for r in results)


def test_retraction_keeps_the_output(folders, plain):
    jobs = [Job(p, 40) for p in prompts(12)]
    harness = Harness(folders["target"], folders["dflash2"], max_total_tokens=256)
    results = harness.run(jobs)
    assert_same(plain, jobs, results)
    assert harness.scheduler.residency.num_retractions == sum(r.num_retractions for r in results) > 0


def test_speculation_off_in_a_mixed_batch(folders, plain):
    jobs = [Job(p, 40, speculation="off" if i % 2 else "static") for i, p in enumerate(prompts(12))]
    results = Harness(folders["target"], folders["dflash2"]).run(jobs)
    assert_same(plain, jobs, results)
    for job, result in zip(jobs, results, strict=True):
        if job.speculation == "off":
            assert (result.stats.num_drafted, result.stats.num_verified) == (0, 0)
            assert result.stats.num_verify_steps == 40


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(folders, plain, data):
    """Staggered arrivals, aborts at any moment, small pools, small chunks, few rows, any draft."""
    harness = Harness(
        folders["target"],
        folders[data.draw(st.sampled_from([None, "dflash", "dflash2"]))],
        max_total_tokens=data.draw(st.integers(8, 40)) * 16,
        max_running_requests=data.draw(st.integers(1, 8)),
        chunked_prefill_size=data.draw(st.integers(1, 80)),
    )
    jobs = [
        Job(
            prompts(12)[data.draw(st.integers(0, 11))],
            max_new_tokens=data.draw(st.integers(1, 40)),
            arrive=data.draw(st.integers(0, 30)),
            abort=data.draw(st.none() | st.integers(0, 40)),
        )
        for _ in range(data.draw(st.integers(1, 14)))
    ]
    for job in jobs:  # an abort before the arrival is an abort of nobody
        job.abort = None if job.abort is None else max(job.abort, job.arrive)
    assert_same(plain, jobs, harness.run(jobs))


def test_seeded_sampling_alone_and_batched(folders):
    """Same seed, same output: alone, in a batch, in another place of it, through retraction."""
    sampling = {"temperature": 1.0, "seed": 77}
    mates = [Job(p, 30, sampling={"temperature": 1.0}) for p in prompts(12)[:8]]
    probe = Job(prompts(12)[9], 30, sampling=sampling)
    roomy = Harness(folders["target"], folders["dflash2"])
    alone = roomy.run([probe])[0].tokens
    assert roomy.run([probe, *mates])[0].tokens == alone
    assert roomy.run([*mates, Job(probe.prompt, 30, arrive=6, sampling=sampling)])[-1].tokens == alone
    tight = Harness(folders["target"], folders["dflash2"], max_total_tokens=160)
    results = tight.run([*(Job(p, 60, sampling={"temperature": 1.0}) for p in prompts(3)), probe])
    assert results[-1].tokens == alone
    assert results[-1].num_retractions > 0
    other = Job(probe.prompt, 30, sampling=sampling, choice_index=1)
    assert roomy.run([other])[0].tokens != alone


def test_cut_inside_a_block(folders, plain):
    """Stop ids, max_new_tokens and min_new_tokens end a request at the exact token, block or not."""
    prompt, tokens = prompts(12)[5], plain[1][5]
    harness = Harness(folders["target"], folders["dflash"])
    harness.script_drafts(7, {tuple(prompt): tokens})
    for length in range(1, 20):
        result = harness.run([Job(prompt, length)])[0]
        assert (result.tokens, result.finish.type) == (tokens[:length], "length")
    for at in range(3, 17):
        first = tokens.index(tokens[at])
        result = harness.run([Job(prompt, 40, sampling={"stop_token_ids": (tokens[at],)})])[0]
        assert (result.tokens, result.finish.matched) == (tokens[: first + 1], tokens[at])
    stop = tokens[2]
    result = harness.run([Job(prompt, 12, sampling={"stop_token_ids": (stop,), "min_new_tokens": 10})])[0]
    assert stop not in result.tokens[:10]
    assert len(result.tokens) >= 10


def test_requests_that_cannot_run_are_answered(folders):
    harness = Harness(folders["target"], max_total_tokens=64)
    too_long, too_big, nothing = harness.run([Job([5] * 500, 100), Job([5] * 50, 40), Job([5], 0)])
    assert too_long.finish.status_code == 400
    assert "context length is 512" in too_long.finish.message
    assert "64" in too_big.finish.message
    assert (nothing.finish.type, nothing.tokens) == ("length", [])
    exact = harness.run([Job([5] * 50, 15)])[0]  # 64 positions: the whole pool
    assert len(exact.tokens) == 15


def test_stop_strings_wait_for_min_new_tokens(folders, plain):
    """Scheduler and API agree on where a stop string may begin to count."""
    from flashspark.api.generation import Choice, Prompt
    from flashspark.text import TextTokenizer

    prompt, tokenizer = prompts(12)[5], TextTokenizer.load(folders["target"])
    harness = Harness(folders["target"], folders["dflash2"])
    text = tokenizer.decode(plain[1][5], skip_special_tokens=False)
    early = text[1]  # completes at the second token or so
    for minimum in (0, 3, 10, 25):
        sampling = {"stop": (early,), "min_new_tokens": minimum, "skip_special_tokens": False}
        result = harness.run([Job(prompt, 40, sampling=sampling)])[0]
        message = to_message("r", Job(prompt, 40, sampling=sampling)).sampling
        choice = Choice(0, 0, "r", Prompt("r", list(prompt), message), tokenizer, "static")
        for i, token in enumerate(result.tokens):
            last = i == len(result.tokens) - 1
            choice.apply(RequestOutput("r", [token], result.finish if last else None))
        decoded = tokenizer.decode(result.tokens, skip_special_tokens=False)
        if result.finish.type == "stop":
            assert len(result.tokens) >= max(minimum, 1)
            assert choice.visible_text + early == decoded[: len(choice.visible_text) + 1]
            assert early not in decoded[len(choice.visible_text) + 1 :]
        else:
            assert choice.visible_text == decoded


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_without_finite_logits_fails_alone(tmp_path, folders, temperature, overlap):
    """A NaN in one token's embedding ends the requests that read it, and nobody else."""
    target = write_target(tmp_path / "poisoned", **EOS)
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][77] = float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    harness = Harness(target, folders["dflash2"], enable_overlap_schedule=overlap)
    healthy = [Job([5, 6, 7 + i], 20, sampling={"temperature": temperature, "seed": i}) for i in range(3)]
    alone = [harness.run([job])[0] for job in healthy]
    results = harness.run(
        [healthy[0], Job([9, 77, 9], 20, sampling={"temperature": temperature}), *healthy[1:]]
    )
    assert results[1].finish.type == "abort"
    assert results[1].finish.status_code == 500
    assert "not finite" in results[1].finish.message
    assert results[1].tokens == []
    for i, r in zip((0, 2, 3), alone, strict=True):
        ended_well = r.finish.type == "length"  # unless it drew the poisoned token by itself
        assert results[i].finish.type == r.finish.type
        assert results[i].tokens == r.tokens or not ended_well
