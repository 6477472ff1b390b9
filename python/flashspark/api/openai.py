"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .answering import complete, stream
from .chat_tools import ChatFormat, ChatOutput, offered_tools
from .context import ServerContext
from .errors import RequestError, openai_stream_error
from .generation import Choice, Generation, meta_info, spec_details, usage
from .openai_prompts import chat_prompt, completion_prompts
from .protocol import ChatBody, CompletionBody, OpenAIFields, StreamOptions
from .wire import json_response


async def completions(request: Request, context: ServerContext) -> Response:
    """Text in, text out."""
    context.check_serving()
    body = CompletionBody.parse(await context.read_json(request, content_type=True))
    call_id = uuid.uuid4().hex
    prompts = await completion_prompts(body, context, call_id)
    generation = Generation(prompts, context.tokenizer, *context.speculation(body.speculation))
    return await _answer(request, context, _Completion(body, context, generation, _call_id(body, call_id)))


async def chat_completions(request: Request, context: ServerContext) -> Response:
    """A conversation in, the next turn out."""
    context.check_serving()
    body = ChatBody.parse(await context.read_json(request, content_type=True))
    call_id = uuid.uuid4().hex
    tools = offered_tools(body, context)
    prompt = await chat_prompt(body, context, call_id, tools)
    generation = Generation([prompt], context.tokenizer, *context.speculation(body.speculation))
    form = ChatFormat.of(body, tools, prompt.reasons_inside, context.args.tool_call_parser)
    return await _answer(request, context, _Chat(body, context, generation, _call_id(body, call_id), form))


def _call_id(body: OpenAIFields, generated: str) -> str:
    if body.rid is None:
        return generated
    return body.rid if isinstance(body.rid, str) else body.rid[0]


async def _answer(request: Request, context: ServerContext, answer: _OpenAIAnswer) -> Response:
    if answer.body.stream_options is not None and not answer.body.stream:
        raise RequestError("stream_options: only with stream: true", param="stream_options")
    context.start(answer.generation, request.headers.get("x-request-id"))
    if answer.body.stream:
        return await stream(request, answer.generation, answer)
    await complete(request, answer.generation)
    return json_response(answer.whole())


class _OpenAIAnswer:
    """What the two routes have in common: envelope, usage, sglext."""

    OBJECT = ""
    CHUNK_OBJECT = ""

    def __init__(
        self, body: OpenAIFields, context: ServerContext, generation: Generation, call_id: str
    ) -> None:
        self.body = body
        self.generation = generation
        self.call_id = call_id
        self._context = context
        options = body.stream_options
        if options is None:
            always = context.args.stream_response_default_include_usage
            options = StreamOptions(include_usage=always, continuous_usage_stats=False)
        self._options = options

    def choice(self, choice: Choice) -> dict[str, Any]:
        """An ended choice of a whole answer."""
        raise AssertionError("each route has its own")

    def deltas(self, choice: Choice) -> list[dict[str, Any]]:
        """The `choices` entries of the frames that bring a choice up to date."""
        raise AssertionError("each route has its own")

    def _envelope(self, kind: str, choices: list[Any], used: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.generation.created,
            "model": self.body.model,
            "choices": choices,
            "usage": used,
        }

    def whole(self) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        choices = [self.choice(choice) for choice in self.generation.choices]
        body = self._envelope(self.OBJECT, choices, self._usage(with_statistics=True))
        body["metadata"] = {"weight_version": self._context.args.weight_version}
        extension = self._sglext()
        return body | ({"sglext": extension} if extension else {})

    def update(self, changed: Iterable[Choice]) -> list[Any]:
        frames = []
        for choice in changed:
            if choice.finish is None and choice.num_ids_waiting < choice.prompt.stream_interval:
                continue
            for delta in self.deltas(choice):
                used = None
                if self._options.continuous_usage_stats:
                    used = usage([choice], [choice.prompt], self._context.args.enable_cache_report, False)
                frames.append(self._envelope(self.CHUNK_OBJECT, [delta], used))
            choice.take_ids()
        return frames

    def last(self) -> list[Any]:
        frames = []
        extension = self._sglext()
        if extension:
            frames.append(self._envelope(self.CHUNK_OBJECT, [], None) | {"sglext": extension})
        if self._options.include_usage:
            frames.append(self._envelope(self.CHUNK_OBJECT, [], self._usage(with_statistics=True)))
        return frames

    def error(self, error: RequestError) -> Any:
        return openai_stream_error(error)

    def _usage(self, with_statistics: bool) -> dict[str, Any]:
        report = self._context.args.enable_cache_report
        used = usage(self.generation.choices, self.generation.prompts, report, with_statistics)
        return used | {"speculation": self.generation.speculation_report}

    def _sglext(self) -> dict[str, Any]:
        """SGLang's extras, on request; one value, or one per choice."""
        choices = self.generation.choices
        extension: dict[str, Any] = {}
        if self.body.return_cached_tokens_details:
            details = [{"device": choice.num_cached_tokens, "host": 0} for choice in choices]
            extension["cached_tokens_details"] = details if len(details) > 1 else details[0]
        if self.body.return_spec_tokens_details and any(spec_details(choice) for choice in choices):
            details = [spec_details(choice) for choice in choices]
            extension["spec_tokens_details"] = details if len(details) > 1 else details[0]
        if self.body.return_token_ids:
            ids = [choice.prompt.input_ids for choice in choices]
            extension["input_ids"] = ids if len(ids) > 1 else ids[0]
            ids = [choice.token_ids for choice in choices]
            extension["output_ids"] = ids if len(ids) > 1 else ids[0]
        return extension


def _finish(choice: Choice, has_calls: bool = False) -> dict[str, Any]:
    """`finish_reason` is null until the end, never an empty string."""
    finish = choice.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    reason = "tool_calls" if has_calls and finish.type == "stop" else finish.type
    return {"finish_reason": reason, "matched_stop": finish.matched}


class _Completion(_OpenAIAnswer):
    OBJECT = CHUNK_OBJECT = "text_completion"
    body: CompletionBody

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._echoed: set[int] = set()

    def _echo(self, choice: Choice) -> str:
        if not self.body.echo or choice.index in self._echoed:
            return ""
        self._echoed.add(choice.index)
        if choice.prompt.text is not None:
            return choice.prompt.text
        return self._context.tokenizer.decode(choice.prompt.input_ids)

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self._entry(choice, choice.visible_text)

    def deltas(self, choice: Choice) -> list[dict[str, Any]]:
        entry = self._entry(choice, choice.take_text())
        return [entry] if entry["text"] or entry["logprobs"] or choice.finish is not None else []

    def _entry(self, choice: Choice, text: str) -> dict[str, Any]:
        echoes = self.body.echo and choice.index not in self._echoed
        text, logprobs = self._echo(choice) + text, None
        if choice.logprobs is not None and (text or echoes or choice.finish is not None):
            logprobs = choice.logprobs.completion(choice.take_logprobs(), with_prompt=echoes)
        return {"index": choice.index, "text": text, "logprobs": logprobs, **_finish(choice)}


def _chat_logprobs(choice: Choice, is_delta: bool) -> dict[str, Any] | None:
    """Of the tokens whose text became visible since the last call; None where nobody asked, or a delta has none."""
    if choice.logprobs is None:
        return None
    new = choice.take_logprobs()
    return None if is_delta and new.start == new.stop else choice.logprobs.chat(new)


class _Chat(_OpenAIAnswer):
    OBJECT, CHUNK_OBJECT = "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def __init__(
        self, body: ChatBody, context: ServerContext, generation: Generation, call_id: str, form: ChatFormat
    ) -> None:
        super().__init__(body, context, generation, call_id)
        self._begun: set[int] = set()
        self._outputs = [ChatOutput(form) for _ in generation.choices]

    def choice(self, choice: Choice) -> dict[str, Any]:
        output = self._outputs[choice.index]
        message = output.message(choice.visible_text)
        finish, logprobs = _finish(choice, output.num_calls > 0), _chat_logprobs(choice, is_delta=False)
        body = {"index": choice.index, "message": message, "logprobs": logprobs, **finish}
        if self.body.return_meta_info:
            body["meta_info"] = meta_info(choice, self.generation, self._context.args.weight_version)
        return body

    def deltas(self, choice: Choice) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            deltas.append({"role": "assistant", "content": "", "reasoning_content": None})
        output, has_ended = self._outputs[choice.index], choice.finish is not None
        added = output.push(choice.take_text(), has_ended)
        deltas += [{"reasoning_content": None} | delta for delta in added]
        running = {"finish_reason": None, "matched_stop": None}
        frames = [{"index": choice.index, "delta": delta, "logprobs": None, **running} for delta in deltas]
        if added:  # where a parser holds text back, what is known of it comes with the next frame
            frames[-1]["logprobs"] = _chat_logprobs(choice, is_delta=True)
        if has_ended:
            finish = _finish(choice, output.num_calls > 0)
            end = {"delta": {"reasoning_content": None}, "logprobs": _chat_logprobs(choice, is_delta=True)}
            frames.append({"index": choice.index, **end, **finish})
        return frames
