"""`/generate`: SGLang's own route."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .answering import complete, stream
from .context import ServerContext
from .errors import RequestError, native_stream_error
from .generation import Choice, Generation, Prompt, meta_info
from .logprobs import check_num_values, native_logprobs
from .protocol import GenerateBody, NativeSampling
from .sampling import (
    cache_namespaces,
    check_num_answers,
    check_prompt_ids,
    encode_prompt,
    fit,
    native_lengths,
    request_ids,
    sampling_params,
)
from .wire import json_response


async def generate(request: Request, context: ServerContext) -> Response:
    """One prompt or a batch, whole or streamed."""
    context.check_serving()
    body = GenerateBody.parse(await context.read_json(request))
    prompts, is_batch = await _prompts(body, context)
    generation = Generation(prompts, context.tokenizer, *context.speculation(body.speculation))
    context.start(generation, request.headers.get("x-request-id"))
    answers = _Answers(body, context, generation, is_batch)
    if body.stream:
        return await stream(request, generation, answers)
    await complete(request, generation)
    bodies = [answers.body(choice) for choice in generation.choices]
    return json_response(bodies if is_batch else bodies[0])


class _Answers:
    """Answer objects. Frames are cumulative unless --incremental-streaming-output says otherwise."""

    def __init__(
        self, body: GenerateBody, context: ServerContext, generation: Generation, is_batch: bool
    ) -> None:
        self._with_prompt_ids = body.return_prompt_token_ids
        self._args = context.args
        self._generation = generation
        self._is_batch = is_batch

    def body(self, choice: Choice, incremental: bool = False) -> dict[str, Any]:
        """The answer so far."""
        info = meta_info(choice, self._generation, self._args.weight_version)
        if choice.logprobs is not None:
            start = len(choice.token_ids) - choice.num_ids_waiting if incremental else 0
            info |= choice.logprobs.native(slice(start, None), with_prompt=start == 0)
        body: dict[str, Any] = {
            "text": choice.take_text() if incremental else choice.visible_text,
            "output_ids": choice.take_ids() if incremental else choice.token_ids,
            "meta_info": info,
        }
        if choice.trail is not None:
            body["meta_info"] |= choice.trail.fields(incremental)
        if self._with_prompt_ids:
            body["prompt_token_ids"] = choice.prompt.input_ids
        return body

    def update(self, changed: Iterable[Choice]) -> list[Any]:
        bodies = []
        for choice in changed:
            if choice.finish is None and choice.num_ids_waiting < choice.prompt.stream_interval:
                continue
            body = self.body(choice, self._args.incremental_streaming_output)
            choice.take_ids()
            bodies.append(body | {"index": choice.index} if self._is_batch else body)
        return bodies

    def last(self) -> list[Any]:
        return []

    def error(self, error: RequestError) -> Any:
        return native_stream_error(error)


async def _prompts(body: GenerateBody, context: ServerContext) -> tuple[list[Prompt], bool]:
    inputs, name, is_batch = _inputs(body)
    check_num_answers(len(inputs), 1)
    samplings = _samplings(body, context, len(inputs))
    check_num_answers(len(inputs), samplings[0].n)
    ids = request_ids(body.rid, len(inputs), uuid.uuid4().hex)
    namespaces = cache_namespaces(body, len(inputs))
    prompts = []
    for i, (item, sampling) in enumerate(zip(inputs, samplings, strict=True)):
        item_name = f"{name}[{i}]" if is_batch else name
        if isinstance(item, str):
            input_ids = await encode_prompt(context.tokenizer, item, item_name, context.limits)
        else:
            input_ids = check_prompt_ids(item, item_name, context.limits)
        lengths = native_lengths(sampling)
        input_ids, max_new_tokens = fit(input_ids, lengths, item_name, context.limits)
        params = sampling_params(
            sampling, max_new_tokens, lengths, sampling.sampling_seed, context.limits, "sampling_params."
        )
        prompts.append(
            Prompt(
                request_id=ids[i],
                input_ids=input_ids,
                sampling=params,
                n=sampling.n,
                no_stop_trim=sampling.no_stop_trim,
                stream_interval=sampling.stream_interval or context.args.stream_interval,
                text=item if isinstance(item, str) else None,
                return_token_origin=body.return_token_origin,
                cache_namespace=namespaces[i],
                logprob_text=body.return_text_in_logprobs,
            )
        )
    lens = [len(prompt.input_ids) for prompt in prompts]
    logprobs = native_logprobs(body, lens, context.limits)
    check_num_values(logprobs, lens, prompts[0].n, "logprob_start_len")
    prompts = [replace(prompt, logprobs=asked) for prompt, asked in zip(prompts, logprobs, strict=True)]
    return prompts, is_batch or prompts[0].n > 1


def _inputs(body: GenerateBody) -> tuple[list[Any], str, bool]:
    """The prompts, the field they came in, and whether they came as a batch."""
    if body.text is not None and body.input_ids is not None:
        raise RequestError("text and input_ids: give only one of them", param="input_ids")
    if body.text is not None:
        inputs: list[Any] = body.text if isinstance(body.text, list) else [body.text]
        name, is_batch = "text", isinstance(body.text, list)
    elif body.input_ids is not None:
        is_batch = any(isinstance(item, list) for item in body.input_ids)
        name, inputs = "input_ids", body.input_ids if is_batch else [body.input_ids]
    else:
        raise RequestError("text: either text or input_ids is required", param="text")
    if not inputs:
        raise RequestError(f"{name}: must not be empty", param=name)
    return inputs, name, is_batch


def _samplings(body: GenerateBody, context: ServerContext, num_prompts: int) -> list[NativeSampling]:
    given, defaults = body.sampling_params, context.native_defaults
    if isinstance(given, dict):
        return [NativeSampling.parse({**defaults, **given}, "sampling_params.")] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(
            f"sampling_params: {len(given)} objects for {num_prompts} prompts", param="sampling_params"
        )
    parsed = [
        NativeSampling.parse({**defaults, **item}, f"sampling_params[{i}].") for i, item in enumerate(given)
    ]
    if len({sampling.n for sampling in parsed}) > 1:
        raise RequestError("sampling_params.n: must be the same for all prompts", param="sampling_params.n")
    return parsed
