"""What hostile input or an odd model folder must not cost: the event loop, the step loop, the start."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError

from flashspark.api import text_routes
from flashspark.api.context import ServerContext, StartupError
from flashspark.api.errors import RequestError
from flashspark.api.native import _prompts
from flashspark.api.openai_prompts import completion_prompts, render_chat
from flashspark.api.protocol import ChatBody, ChatMessage, CompletionBody, GenerateBody, SamplingFields
from flashspark.api.sampling import Lengths, Limits, sampling_params
from flashspark.args import ArgumentError, ServerArgs, parse_args
from flashspark.attention.interface import AttentionCapabilities
from flashspark.demo import DEMO_MODELS
from flashspark.engine.capacity import decide_capacity, gpu_memory
from flashspark.ipc import GenerateRequest, SamplingParams
from flashspark.kernels.target_probs import sample_categorical
from flashspark.scheduler import build
from flashspark.scheduler.graph_build import check_backends
from flashspark.scheduler.request import Request, StopChecker
from flashspark.text import TextTokenizer
from harness import Harness, Job
from tiny_models import VOCAB_SIZE, write_target, write_tokenizer

KEYS = [str(i) for i in range(1000)]


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


@pytest.mark.parametrize("min_name", ["min_tokens", "min_new_tokens"])
def test_a_token_that_does_not_end_the_output_must_be_left(min_name):
    limits = Limits(64, 8, 64, False, eos_token_ids=frozenset({7}))

    def ask(num_stop_ids: int, min_tokens: int) -> SamplingParams:
        fields = SamplingFields.parse({"stop_token_ids": list(range(num_stop_ids))})
        return sampling_params(fields, 4, Lengths(4, min_tokens, "max", min_name), None, limits)

    ask(6, 2)
    ask(7, 0)
    with pytest.raises(RequestError, match=rf"stop_token_ids.*{min_name}"):
        ask(7, 2)


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
        (GenerateBody, {"text": "a", "sampling_params": [1] * 1000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * 1000}),
        (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1000)), "x")}),
        (ChatBody, {"messages": [1] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    ],
)
def test_one_violation_in_a_list_is_enough(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 5


@pytest.mark.parametrize(
    ("model", "body", "limit"),
    [
        (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(20000)), 1)}, "16384"),
        (CompletionBody, {"prompt": "a", **dict.fromkeys(KEYS, 1)}, "256"),
        (CompletionBody, {"prompt": "a", "stream_options": dict.fromkeys(KEYS, 1)}, "256"),
        (CompletionBody, {"prompt": "a", "metadata": dict.fromkeys(KEYS, 1)}, "256"),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [1] * 1025}, "1024"),
        (GenerateBody, {"rid": "a" * 257}, "256"),
        (ChatBody, {"messages": [{"role": "user"}], "chat_template_kwargs": dict.fromkeys(KEYS, 1)}, "256"),
        (ChatBody, {"messages": [{"role": "user"}] * 16385}, "16384"),
    ],
)
def test_what_is_too_long_is_refused_by_its_limit(model, body, limit):
    with pytest.raises(RequestError, match=f"the limit is {limit}$"):
        model.parse(body)


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (ChatBody, {"messages": [1]}, "messages[0]: must be a JSON object"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [1]}]},
            "messages[0].content[0]: must be a JSON object",
        ),
        (GenerateBody, {"rid": 5}, "rid: must be a string"),
        (GenerateBody, {"rid": ["a", 5]}, "rid[1]: must be a string"),
        (GenerateBody, {"text": ["a", 5]}, "text[1]: must be a string"),
        (GenerateBody, {"speculation": {}}, "speculation.mode: is required"),
        (CompletionBody, {"prompt": "a", "metadata": 5}, "metadata: must be a JSON object"),
    ],
)
def test_messages_speak_of_json(model, body, message):
    with pytest.raises(RequestError) as caught:
        model.parse(body)
    assert caught.value.message == message


def test_a_bias_has_one_value_per_token():
    limits = Limits(64, 8, 64, False)
    for bias in ({"5": 1, "05": 2}, {"00": 1}, {"+5": 1}):
        fields = SamplingFields.parse({"logit_bias": bias})
        with pytest.raises(RequestError, match="is not a token id"):
            sampling_params(fields, 4, Lengths(4, 0, "max", "min"), None, limits)


def test_long_conversations_and_texts_leave_the_event_loop_alone(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path))
    context = SimpleNamespace(tokenizer=tokenizer, limits=Limits(64, VOCAB_SIZE, 64, False))
    threads = []

    def seen_in(name):
        work = getattr(tokenizer, name)

        def watch(*arguments, **options):
            threads.append(threading.current_thread() is threading.main_thread())
            return work(*arguments, **options)

        return watch

    tokenizer.apply_chat_template, tokenizer.decode = seen_in("apply_chat_template"), seen_in("decode")

    async def detokenize(tokens):
        async def read_json(request, content_type):
            return {"tokens": tokens}

        context.read_json = read_json
        return json.loads((await text_routes.detokenize(None, context)).body)["text"]

    message = ChatMessage.parse({"role": "user", "content": "a"})
    parts = ChatMessage.parse({"role": "user", "content": [{"type": "text", "text": "a"}] * 300})
    for messages, inline in (([message], True), ([message] * 300, False), ([parts], False)):
        asyncio.run(render_chat(messages, {}, context))
        assert threads.pop() is inline
    ids = tokenizer.encode("ab")
    for tokens, inline in ((ids, True), (ids * 5000, False), ([ids] * 3, False)):
        text = asyncio.run(detokenize(tokens))
        assert text == (["ab"] * 3 if tokens == [ids] * 3 else "ab" * (len(tokens) // len(ids)))
        assert threads.pop() is inline


@pytest.mark.parametrize("key", ["config", "--config", "conf"])
def test_a_file_of_flags_names_no_other(tmp_path, capsys, key):
    file = tmp_path / "flags.yaml"
    file.write_text(f"model-path: m\n{key}: other.yaml\n")
    with pytest.raises(SystemExit):
        parse_args(["--config", str(file)])
    assert f"has a key '{key}'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["page_size", "max_running_requests", "max_total_tokens"])
def test_sizes_beyond_any_machine_are_refused_by_flag(name):
    with pytest.raises(ArgumentError, match=f"--{name.replace('_', '-')} .*must be at most"):
        ServerArgs(model_path="m", **{name: 10**15})


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9 bytes")]
)
def test_pools_that_do_not_fit_name_their_flags(monkeypatch, error):
    monkeypatch.setattr(build, "build_engine", Mock(side_effect=error))
    with pytest.raises(ValueError, match="lower one of --max-total-tokens 640, --max-running-requests"):
        build.build_scheduler(ServerArgs(model_path="demo", max_total_tokens=640), print)
    for bug in (RuntimeError("a bug"), torch.AcceleratorError("an illegal memory access")):
        monkeypatch.setattr(build, "build_engine", Mock(side_effect=bug))
        with pytest.raises(RuntimeError, match=f"^{bug}$"):
            build.build_scheduler(ServerArgs(model_path="demo"), print)


def test_a_gpu_that_is_too_small_names_its_flags(monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
    monkeypatch.setattr(build, "build_engine", Mock(side_effect=error))
    with pytest.raises(ValueError, match=r"--page-size 16, --mem-fraction-static 0\.9 \(CUDA out"):
        build.build_scheduler(ServerArgs(model_path="demo", mem_fraction_static=0.9), print)
    memory = gpu_memory(3 << 30, 4 << 30, 0.88, 1 << 20)
    with pytest.raises(
        ValueError, match=r"--mem-fraction-static 0\.88 of 4\.0 GiB.*: raise --mem-fraction-static"
    ):
        decide_capacity(None, 1024, 48, 16, 1 << 14, memory)
    with pytest.raises(
        ValueError, match=r"\(--max-total-tokens\).*: raise --max-total-tokens or lower --page-size"
    ):
        decide_capacity(3, 1024, 48, 16, 1 << 14, memory)


@pytest.mark.parametrize("drafts_on", [None, "torch_native"])
def test_a_backend_that_cannot_be_captured_is_refused_by_its_flag(drafts_on):
    """The draft's too: a capture that fails on the way says nothing of use."""
    harness = Harness("demo", "demo-dflash2", max_running_requests=2, max_total_tokens=64, device="cpu")
    runner = harness._worker.runner
    runner._backend = SimpleNamespace(
        name="graphic", capabilities=AttentionCapabilities(True, drafts_on is not None, True)
    )
    flag = (
        "--speculative-draft-attention-backend torch_native" if drafts_on else "--attention-backend graphic"
    )
    with pytest.raises(ValueError, match=f"^{flag} cannot be captured in CUDA graphs: use triton"):
        check_backends(runner)
    runner._backend = runner._draft_backend = SimpleNamespace(
        name="graphic", capabilities=AttentionCapabilities(True, True, True)
    )
    check_backends(runner)


def test_a_shipped_name_wins_over_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert ServerArgs(model_path="demo").model_path == str(DEMO_MODELS["demo"])
    assert ServerArgs(model_path="./demo").model_path == "./demo"


def test_a_template_in_the_flag_may_be_longer_than_a_file_name(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path), "{{ messages[0].content }}" + "x" * 5000)
    assert tokenizer.apply_chat_template([{"content": "a"}]) == "a" + "x" * 5000
