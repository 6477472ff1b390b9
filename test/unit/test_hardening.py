"""What hostile input or an odd model folder must not cost: the event loop, the step loop, the start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from flashspark.api.context import ServerContext, StartupError
from flashspark.api.errors import RequestError
from flashspark.api.native import _prompts
from flashspark.api.openai_prompts import completion_prompts
from flashspark.api.protocol import ChatBody, CompletionBody, GenerateBody
from flashspark.args import ArgumentError, ServerArgs
from flashspark.ipc import GenerateRequest, SamplingParams
from flashspark.kernels.target_probs import sample_categorical
from flashspark.scheduler.request import Request, StopChecker
from harness import Harness, Job
from tiny_models import VOCAB_SIZE, write_target


def test_too_many_answers_are_refused_before_any_work():
    context = SimpleNamespace(native_defaults={})  # no tokenizer, no limits: nothing may be looked at yet
    bodies = [
        completion_prompts(CompletionBody.parse({"prompt": ["a"] * 4097}), context, "id"),
        completion_prompts(CompletionBody.parse({"prompt": ["a"] * 33, "n": 128}), context, "id"),
        _prompts(GenerateBody.parse({"input_ids": [[1]] * 33, "sampling_params": {"n": 128}}), context),
    ]
    for work in bodies:
        with pytest.raises(RequestError, match="answers in one call, the limit is 4096"):
            asyncio.run(work)


def test_requests_are_compared_by_identity():
    message = GenerateRequest("same", [1], SamplingParams(max_new_tokens=1))
    checker = StopChecker(message, frozenset(), None)
    first, second = (Request(message, 1, 0, checker, 0) for _ in range(2))
    assert first != second


def test_a_random_seed_leaves_room_for_the_order_of_arrival():
    ServerArgs(model_path="m", random_seed=2**30)
    with pytest.raises(ArgumentError, match="--random-seed"):
        ServerArgs(model_path="m", random_seed=2**31)


@pytest.mark.parametrize("eos_token_id", [-1, 10**6])
def test_an_end_id_outside_the_vocabulary_harms_nobody(tmp_path, eos_token_id):
    target = write_target(tmp_path / "target", eos_token_id=eos_token_id)
    harness = Harness(target)
    assert all(0 <= token_id < VOCAB_SIZE for token_id in harness.ready.eos_token_ids)
    harness.run([Job([1, 2, 3], 4, sampling={"min_new_tokens": 3})])


def test_sampling_defaults_out_of_range_are_named_at_the_start(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_p": 0}')
    context = ServerContext.__new__(ServerContext)
    context.args = ServerArgs(model_path=str(tmp_path))
    with pytest.raises(StartupError, match=r"generation_config\.json: top_p.*--sampling-defaults openai"):
        context._chat_defaults()


def test_a_distribution_of_nan_gives_an_id_of_the_vocabulary():
    weights = torch.full((1, 5), float("nan"))
    assert 0 <= sample_categorical(weights, torch.tensor([0.5], dtype=torch.float64)).item() < 5


def test_suppressing_every_token_ends_no_engine(tmp_path):
    harness = Harness(write_target(tmp_path / "target"))
    sampling = {"min_new_tokens": 2, "stop_token_ids": tuple(range(VOCAB_SIZE)), "temperature": 1.0}
    (result,) = harness.run([Job([1, 2, 3], 4, sampling=sampling)])
    assert all(0 <= token < VOCAB_SIZE for token in result.tokens)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GenerateBody, {"text": [1] * 1000}),
        (GenerateBody, {"text": "a", "rid": [1] * 1000}),
        (ChatBody, {"messages": [1] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    ],
)
def test_one_violation_in_a_list_is_enough(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 5
