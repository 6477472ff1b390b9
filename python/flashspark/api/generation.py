"""One client call on its way through the engine: prompts × choices, their tokens, text and statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashspark.ipc import (
    FinishReason,
    GenerateRequest,
    LogprobParams,
    RequestOutput,
    SamplingParams,
    SpeculationMode,
    SpeculativeStats,
)
from flashspark.text import StopMatcher, TextTokenizer
from flashspark.text.reasoning import ReasoningCounter

from .engine_client import DuplicateRequest, EngineCall, EngineClient, EngineDead
from .errors import RequestError, unavailable
from .logprobs import ChoiceLogprobs
from .metrics import RequestMetrics
from .token_trail import TokenTrail


@dataclass(frozen=True)
class Prompt:
    """One prompt of a call, checked against every limit."""

    request_id: str
    input_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    no_stop_trim: bool = False
    stream_interval: int = 1
    text: str | None = None  # as it came, for `echo`
    return_token_origin: bool = False
    cache_namespace: tuple[str, ...] = ()
    reasons_inside: bool | None = None  # whether answers begin as reasoning; None: nobody looks for it
    logprobs: LogprobParams | None = None
    logprob_text: bool = True  # whether log-probabilities come with the text of their ids

    @property
    def is_empty(self) -> bool:
        """Whether its answer has nothing to wait for: no output, and no log-probabilities of the prompt."""
        scores = self.logprobs is not None and self.logprobs.start < len(self.input_ids) - 1
        return self.sampling.max_new_tokens == 0 and not scores


class Choice:
    """One answer while it grows. `text[:num_released]` may be shown: no stop string can reach it any more."""

    def __init__(
        self,
        index: int,
        prompt_index: int,
        request_id: str,
        prompt: Prompt,
        tokenizer: TextTokenizer,
        speculation: SpeculationMode,
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.request_id = request_id
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.text = ""
        self.num_released = 0
        self.finish: FinishReason | None = None
        self.speculation = speculation
        self.speculative = SpeculativeStats()  # stays empty without speculation
        self.num_cached_tokens = 0
        self.num_retractions = 0
        self.queue_seconds: float | None = None
        self.first_token_s: float | None = None  # these two kept by `RequestMetrics`
        self.last_token_s: float | None = None
        self._detokenizer = tokenizer.detokenizer(prompt.sampling.skip_special_tokens)
        self.trail: TokenTrail | None = None
        if prompt.return_token_origin:
            self.trail = TokenTrail(tokenizer.detokenizer(prompt.sampling.skip_special_tokens))
        self._matcher = StopMatcher(prompt.sampling.stop)
        self._reasoning: ReasoningCounter | None = None
        if prompt.reasons_inside is not None:
            counted = tokenizer.detokenizer(prompt.sampling.skip_special_tokens)
            self._reasoning = ReasoningCounter(prompt.reasons_inside, counted)
        self.logprobs: ChoiceLogprobs | None = None
        if prompt.logprobs is not None:
            self.logprobs = ChoiceLogprobs(prompt.logprobs, prompt.input_ids, tokenizer, prompt.logprob_text)
        self._num_text_taken = 0
        self._num_ids_taken = 0

    @property
    def visible_text(self) -> str:
        """All text so far that may be shown."""
        return self.text[: self.num_released]

    def take_text(self) -> str:
        """What became visible since the last call."""
        delta = self.text[self._num_text_taken : self.num_released]
        self._num_text_taken = self.num_released
        return delta

    def take_ids(self) -> list[int]:
        """The ids since the last call."""
        ids = self.token_ids[self._num_ids_taken :]
        self._num_ids_taken = len(self.token_ids)
        return ids

    def take_logprobs(self) -> slice:
        """Which tokens' log-probabilities belong to the text that became visible since the last call."""
        assert self.logprobs is not None
        return self.logprobs.take(self.logprobs.num_shown(self.num_released, self.finish))

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens are reasoning."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    @property
    def num_ids_waiting(self) -> int:
        """How many ids `take_ids` would return."""
        return len(self.token_ids) - self._num_ids_taken

    def apply(self, output: RequestOutput) -> None:
        """Appends what the scheduler sent."""
        # As in the scheduler: no stop string counts before the last token that `min_new_tokens` asks for.
        num_exempt = max(0, self.prompt.sampling.min_new_tokens - 1 - len(self.token_ids))
        self.token_ids += output.token_ids
        if self.trail is not None:
            self.trail.add(output)
        if self.speculation != "off":
            self.speculative = output.speculative
        self.num_cached_tokens = output.num_cached_tokens
        self.num_retractions = output.num_retractions
        self.queue_seconds = output.queue_seconds
        self.finish = output.finish
        if self._reasoning is not None:
            self._reasoning.push(output.token_ids)
        if self.logprobs is not None:
            self.logprobs.add(output)
        ids = output.token_ids
        if self._ends_with_stop_token(output) and not self.prompt.no_stop_trim:
            ids = ids[:-1]
        exempt = self._detokenize(ids[:num_exempt])
        self.text += exempt
        self._matcher.skip(exempt)
        delta = self._detokenize(ids[num_exempt:])
        if self.finish is not None:
            delta += self._detokenizer.flush()
        self.text += delta
        match = self._matcher.push(delta)
        if self.finish is None:
            held_from = match.start if match is not None else len(self.text)
            releasable = self._matcher.releasable(self.text[self.num_released : held_from])
            self.num_released += releasable
            return
        if match is not None and self.finish.type == "stop" and isinstance(self.finish.matched, str):
            self.text = self.text[: match.end if self.prompt.no_stop_trim else match.start]
        self.num_released = len(self.text)

    def _detokenize(self, ids: Sequence[int]) -> str:
        """Text that follows `self.text`."""
        if self.logprobs is None:
            return self._detokenizer.push(ids)
        text = ""
        for token_id in ids:
            self.logprobs.text_starts.append(len(self.text) + len(text))
            text += self._detokenizer.push([token_id])
        return text

    def _ends_with_stop_token(self, output: RequestOutput) -> bool:
        finish, ids = output.finish, output.token_ids
        if finish is None or finish.type != "stop" or isinstance(finish.matched, str | None):
            return False
        return bool(ids) and ids[-1] == finish.matched


class Generation:
    """All choices of one call. Whoever starts it closes it: closing frees what still runs."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: TextTokenizer,
        speculation: SpeculationMode,
        max_verify_len: int | None = None,
    ) -> None:
        self.prompts = list(prompts)
        self.speculation, self.max_verify_len = speculation, max_verify_len
        self.metrics: RequestMetrics | None = None
        self.is_streaming = False
        self.started_s = time.monotonic()
        self.created = int(time.time())
        self.choices: list[Choice] = []
        for prompt_index, prompt in enumerate(self.prompts):
            for j in range(prompt.n):
                request_id = prompt.request_id if prompt.n == 1 else f"{prompt.request_id}_{j}"
                choice = Choice(len(self.choices), prompt_index, request_id, prompt, tokenizer, speculation)
                self.choices.append(choice)
        self._by_id = {choice.request_id: choice for choice in self.choices}
        self._call: EngineCall | None = None
        self._empty: list[Choice] = []

    def start(self, engine: EngineClient) -> None:
        """Submits everything. An answer of no tokens needs no engine and is finished at once."""
        requests = []
        for choice in self.choices:
            if choice.prompt.is_empty:
                choice.finish = FinishReason("length")
                self._empty.append(choice)
                continue
            requests.append(
                GenerateRequest(
                    request_id=choice.request_id,
                    input_ids=choice.prompt.input_ids,
                    sampling=choice.prompt.sampling,
                    choice_index=choice.index % choice.prompt.n,  # `n` is the same for all prompts of a call
                    speculation=self.speculation,
                    max_verify_len=self.max_verify_len,
                    return_token_origin=choice.prompt.return_token_origin,
                    cache_namespace=choice.prompt.cache_namespace,
                    logprobs=choice.prompt.logprobs,
                )
            )
        try:
            self._call = engine.submit(requests)
        except DuplicateRequest as error:
            raise RequestError(f"rid: {str(error)!r} is in use by a request in flight", param="rid") from None
        except EngineDead as error:
            raise unavailable(f"the engine is down: {error}") from None

    @property
    def speculation_report(self) -> dict[str, Any]:
        """What was asked of the draft, as answers tell it."""
        report: dict[str, Any] = {"mode": self.speculation}
        return report if self.max_verify_len is None else report | {"max_verify_len": self.max_verify_len}

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self.choices)

    async def updates(self) -> list[Choice]:
        """The choices that grew or ended since the last call, each once; waits for at least one.

        An abort that the server itself ordered, and an engine that died, raise `RequestError`.
        """
        if self._empty:
            changed, self._empty = self._empty, []
            return changed
        assert self._call is not None
        try:
            outputs = await self._call.outputs()
        except EngineDead as error:
            raise RequestError(f"the engine is down: {error}", status=500, code="engine_down") from None
        changed_by_id: dict[str, Choice] = {}
        for output in outputs:
            choice = self._by_id[output.request_id]
            choice.apply(output)
            self._observe(choice, len(output.token_ids))
            changed_by_id[output.request_id] = choice
            if output.finish is not None and output.finish.type == "abort":
                self._raise_if_ordered(output.finish)
        return list(changed_by_id.values())

    async def first_updates(self) -> list[Choice]:
        """As `updates`, but waits for the first text or end, and in a call of several grammars until each is known
        to be one: what is refused before that can still be a status."""
        grammars = {choice.prompt.sampling.grammar for choice in self.choices}
        unknown = {choice for choice in self.choices if choice.prompt.sampling.grammar is not None}
        changed: dict[Choice, None] = {}
        while True:
            latest = await self.updates()
            unknown.difference_update(latest)
            changed |= dict.fromkeys(latest)
            has_begun = any(choice.token_ids or choice.finish is not None for choice in changed)
            if has_begun and (len(grammars) == 1 or not unknown):
                return list(changed)

    def _observe(self, choice: Choice, num_new: int) -> None:
        if self.metrics is None:
            return
        self.metrics.observe_tokens(choice, num_new, self.started_s, self.is_streaming)
        if choice.finish is not None:
            num_prompt, num_output = len(choice.prompt.input_ids), len(choice.token_ids)
            self.metrics.observe_end(choice, num_prompt, num_output, self.started_s, self.is_streaming)

    def _raise_if_ordered(self, finish: FinishReason) -> None:
        status = finish.status_code
        if status is None and self._call is not None:
            status = self._call.abort_status
        if status is not None:
            message = finish.message or "the request was aborted by the server"
            retry_after_s = 1 if status == 503 else None
            raise RequestError(message, param=finish.param, status=status, retry_after_s=retry_after_s)

    async def run(self) -> None:
        """Waits until every choice has ended."""
        while not self.finished:
            await self.updates()

    def close(self) -> None:
        """Frees what is still running. Any number of calls."""
        if self._call is not None:
            self._call.close()


def finish_reason(choice: Choice) -> dict[str, Any] | None:
    """`meta_info.finish_reason`."""
    finish = choice.finish
    if finish is None:
        return None
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": choice.prompt.sampling.max_new_tokens}
        case _:
            message = finish.message or "aborted"
            return {"type": "abort", "message": message, "status_code": finish.status_code, "err_type": None}


def spec_details(choice: Choice) -> dict[str, Any]:
    """Speculative statistics under SGLang's names (0.5.23, then 0.5.17's); empty without verify steps."""
    stats = choice.speculative
    if stats.num_verify_steps == 0:
        return {}
    rate = stats.num_accepted / stats.num_drafted if stats.num_drafted else 0.0
    details: dict[str, Any] = {
        "spec_verify_ct": stats.num_verify_steps,
        "spec_accept_length": len(choice.token_ids) / stats.num_verify_steps,
        "spec_accept_rate": rate,
        "spec_num_correct_drafts": stats.num_accepted,
        "spec_num_proposed_drafts": stats.num_drafted,
        "spec_num_verified_drafts": stats.num_verified,
        "spec_correct_drafts_histogram": stats.accept_histogram,
        "spec_accepted_drafts": stats.num_accepted,
        "spec_proposed_drafts": stats.num_drafted,
        "spec_accept_histogram": stats.accept_histogram,
    }
    if stats.verify_histogram:  # capped: in the ragged modes alone
        num_rows = sum(length * count for length, count in enumerate(stats.verify_histogram))
        details["spec_cap_length"] = num_rows / stats.num_verify_steps
        details["spec_cap_lens_histogram"] = stats.verify_histogram
    if stats.num_uncapped_tokens is not None:  # in cap-accept alone
        details["spec_block_accept_length"] = stats.num_uncapped_tokens / stats.num_verify_steps
    return details


def _times(choice: Choice, generation: Generation) -> dict[str, Any]:
    """When an ended answer's parts came, where metrics are kept; `_ts` in seconds since the epoch."""
    now_s = time.monotonic()
    times: dict[str, Any] = {
        "request_received_ts": time.time() - (now_s - generation.started_s),
        "response_sent_to_client_ts": time.time(),
        "queue_time": choice.queue_seconds,
    }
    first_s, last_s, num_tokens = choice.first_token_s, choice.last_token_s, len(choice.token_ids)
    if first_s is not None:
        times["first_token_latency"] = first_s - generation.started_s
    if first_s is not None and last_s is not None and last_s > first_s:
        times["decode_throughput"] = (num_tokens - 1) / (last_s - first_s)
    return times


def meta_info(choice: Choice, generation: Generation, weight_version: str) -> dict[str, Any]:
    """`meta_info` of one answer so far; statistics and latency once it has ended."""
    info: dict[str, Any] = {
        "id": choice.request_id,
        "finish_reason": finish_reason(choice),
        "prompt_tokens": len(choice.prompt.input_ids),
        "completion_tokens": len(choice.token_ids),
        "cached_tokens": choice.num_cached_tokens,
        "reasoning_tokens": choice.num_reasoning_tokens,
        "weight_version": weight_version,
        "num_retractions": choice.num_retractions,
    }
    if choice.finish is not None:
        info["speculation"] = generation.speculation_report
        info |= spec_details(choice)
        info["e2e_latency"] = time.monotonic() - generation.started_s
        if generation.metrics is not None:
            info |= _times(choice, generation)
    return info


def usage(
    choices: Sequence[Choice], prompts: Sequence[Prompt], cache_report: bool, with_statistics: bool
) -> dict[str, Any]:
    """OpenAI's `usage` over some choices; prompt tokens count once per prompt, not per choice.

    `speculative` is FlashSpark's own: the verify statistics of the whole call.
    """
    num_prompt = sum(len(prompt.input_ids) for prompt in prompts)
    num_completion = sum(len(choice.token_ids) for choice in choices)
    num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
    cached = {choice.prompt_index: choice.num_cached_tokens for choice in choices}
    details = {"cached_tokens": sum(cached.values())} if cache_report else None
    body: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": num_reasoning} if num_reasoning else None,
        "reasoning_tokens": num_reasoning,
    }
    num_steps = sum(choice.speculative.num_verify_steps for choice in choices)
    if with_statistics and num_steps:
        body["speculative"] = {
            "verify_steps": num_steps,
            "drafted_tokens": sum(choice.speculative.num_drafted for choice in choices),
            "verified_tokens": sum(choice.speculative.num_verified for choice in choices),
            "accepted_tokens": sum(choice.speculative.num_accepted for choice in choices),
            "acceptance_length": num_completion / num_steps,
        }
    return body
