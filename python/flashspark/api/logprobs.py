"""Log-probabilities: what a body asks for, how they grow with a choice, and the shapes each route gives them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from flashspark.ipc import FinishReason, LogprobParams, RequestOutput, TokenLogprobs
from flashspark.text import TextTokenizer

from .errors import RequestError
from .fields import MAX_PROMPT_LOGPROBS
from .protocol import ChatBody, CompletionBody, GenerateBody
from .sampling import Limits, check_token_ids

Entry = tuple[float | None, int, str | None]  # SGLang's triple: log-probability, id, text


def native_logprobs(body: GenerateBody, lens: Sequence[int], limits: Limits) -> list[LogprobParams | None]:
    """What `/generate` asks for, per prompt; `lens` are their numbers of tokens."""
    num_prompts = len(lens)
    asked = _per_prompt(body.return_logprob, num_prompts, "return_logprob")
    starts = _per_prompt(body.logprob_start_len, num_prompts, "logprob_start_len")
    tops = _per_prompt(body.top_logprobs_num, num_prompts, "top_logprobs_num")
    listed: list[Any] = [body.token_ids_logprob] * num_prompts
    if body.token_ids_logprob and any(not isinstance(item, int) for item in body.token_ids_logprob):
        listed = _per_prompt(body.token_ids_logprob, num_prompts, "token_ids_logprob")
    found: list[LogprobParams | None] = []
    for length, is_asked, start, num_top, token_ids in zip(lens, asked, starts, tops, listed, strict=True):
        if not is_asked:
            unmet = {
                "logprob_start_len": start > 0,
                "top_logprobs_num": num_top,
                "token_ids_logprob": token_ids,
            }
            for name in (name for name, is_set in unmet.items() if is_set):
                raise RequestError(f"{name}: only with return_logprob: true", param=name)
            found.append(None)
            continue
        if start >= length:
            raise RequestError(
                f"logprob_start_len: {start} is not a position of the prompt, which has {length} tokens",
                param="logprob_start_len",
            )
        _check_num_top(num_top, "top_logprobs_num", limits)
        if token_ids:
            check_token_ids(token_ids, "token_ids_logprob", limits)
        start = length - 1 if start == -1 else start
        found.append(LogprobParams(start, num_top, tuple(token_ids or ())))
    return found


def completion_logprobs(body: CompletionBody, num_prompt: int, limits: Limits) -> LogprobParams | None:
    """What `/v1/completions` asks for; of the prompt too where it is echoed."""
    if body.logprobs is None or body.logprobs is False:
        return None
    _check_num_top(body.logprobs, "logprobs", limits)
    return LogprobParams(0 if body.echo else num_prompt - 1, body.logprobs)


def chat_logprobs(body: ChatBody, num_prompt: int, limits: Limits) -> LogprobParams | None:
    """What `/v1/chat/completions` asks for."""
    num_top = body.top_logprobs or 0
    if not body.logprobs:
        if num_top:
            raise RequestError("top_logprobs: only with logprobs: true", param="top_logprobs")
        return None
    _check_num_top(num_top, "top_logprobs", limits)
    return LogprobParams(num_prompt - 1, num_top)


def check_num_values(params: Sequence[LogprobParams | None], lens: Sequence[int], n: int, name: str) -> None:
    """Refuses a call that asks for too much of its prompts, of `lens` tokens: their rows come all at once."""
    asked = [(length - 1 - p.start, p) for length, p in zip(lens, params, strict=True) if p is not None]
    num_values = n * sum(rows * (1 + p.num_top + len(p.token_ids)) for rows, p in asked)
    if num_values > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"{name}: the prompts have {num_values} log-probabilities to report in one call, the limit is "
            f"{MAX_PROMPT_LOGPROBS}",
            param=name,
        )


def _per_prompt(value: Any, num_prompts: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(f"{name}: {len(value)} values for {num_prompts} prompts", param=name)
    return value


def _by_text(top: Sequence[Entry]) -> dict[str | None, float | None]:
    """Ids that read alike share a key; it has the value of the most likely, which comes first."""
    found: dict[str | None, float | None] = {}
    for value, _, text in top:
        found.setdefault(text, value)
    return found


def _check_num_top(num_top: int, name: str, limits: Limits) -> None:
    if num_top > limits.vocab_size:
        raise RequestError(
            f"{name}: {num_top} is more than the vocabulary's {limits.vocab_size} tokens", param=name
        )


class ChoiceLogprobs:
    """Those of one choice while it grows: an entry per token, and where each token's text begins.

    `prompt` and `output` are triples; `*_top` and `*_listed` hold a list of triples per token, and stay empty where
    none are asked for. The first entry of a prompt has no value: nothing of it says how likely that token was.
    """

    def __init__(
        self, params: LogprobParams, prompt_ids: Sequence[int], tokenizer: TextTokenizer, with_text: bool
    ) -> None:
        self._params, self._tokenizer, self._with_text = params, tokenizer, with_text
        self._prompt_ids = prompt_ids[params.start :]
        self.prompt: list[Entry] = [self._entry(None, self._prompt_ids[0])]
        self.prompt_top: list[list[Entry] | None] = [None] if params.num_top else []
        self.prompt_listed: list[list[Entry] | None] = [None] if params.token_ids else []
        self.output: list[Entry] = []
        self.output_top: list[list[Entry] | None] = []
        self.output_listed: list[list[Entry] | None] = []
        self.text_starts: list[int] = []  # by token, as far as they have been turned into text
        self._num_taken = 0

    def add(self, output: RequestOutput) -> None:
        """Appends what the scheduler sent."""
        if output.prompt_logprobs is not None:
            values = output.prompt_logprobs.values
            self.prompt += self._entries(values, self._prompt_ids[1 : 1 + len(values)])
            self._add_lists(output.prompt_logprobs, self.prompt_top, self.prompt_listed)
        if output.logprobs is not None:
            self.output += self._entries(output.logprobs.values, output.token_ids)
            self._add_lists(output.logprobs, self.output_top, self.output_listed)

    def num_shown(self, num_chars: int, finish: FinishReason | None) -> int:
        """How many of the tokens stand in the first `num_chars` of the text, which is all of it once ended.

        A token belongs to the text that begins with it. One without any, such as half a character, goes with
        what follows; what a stop string cut away, or a stop token that is not part of the text, is in none.
        """
        if finish is None or isinstance(finish.matched, str):
            return bisect_left(self.text_starts, num_chars)
        return len(self.text_starts)

    def take(self, num_shown: int) -> slice:
        """Those of the first `num_shown` tokens that were not taken before."""
        taken = slice(self._num_taken, max(num_shown, self._num_taken))
        self._num_taken = taken.stop
        return taken

    def native(self, new: slice, with_prompt: bool) -> dict[str, Any]:
        """Keys of `meta_info`, about the output tokens of `new`."""
        num_prompt = None if with_prompt else 0
        info = {
            "input_token_logprobs": self.prompt[:num_prompt],
            "output_token_logprobs": self.output[new],
            "output_token_logprobs_length": len(self.output),
        }
        if self._params.num_top:
            info["input_top_logprobs"] = self.prompt_top[:num_prompt]
            info["output_top_logprobs"] = self.output_top[new]
        if self._params.token_ids:
            info["input_token_ids_logprobs"] = self.prompt_listed[:num_prompt]
            info["output_token_ids_logprobs"] = self.output_listed[new]
        return info

    def completion(self, new: slice, with_prompt: bool) -> dict[str, Any]:
        """`logprobs` of `/v1/completions`, about the output tokens of `new` and, before them, the prompt's."""
        entries = (self.prompt if with_prompt else []) + self.output[new]
        tops = (self.prompt_top if with_prompt else []) + self.output_top[new]
        return {
            "tokens": [text for _, _, text in entries],
            "token_logprobs": [value for value, _, _ in entries],
            "top_logprobs": [None if top is None else _by_text(top) for top in tops],
            "text_offset": [-1] * len(entries),  # as upstream: not every token has a place in the text
        }

    def chat(self, new: slice) -> dict[str, Any]:
        """`logprobs` of `/v1/chat/completions`, about the output tokens of `new`."""
        tops = self.output_top[new] or [None] * len(self.output[new])
        content = [
            self._chat_entry(entry) | {"top_logprobs": [self._chat_entry(other) for other in top or ()]}
            for entry, top in zip(self.output[new], tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _chat_entry(self, entry: Entry) -> dict[str, Any]:
        value, token_id, text = entry
        return {"token": text, "bytes": list(self._tokenizer.token_bytes(token_id)), "logprob": value}

    def _add_lists(
        self, logprobs: TokenLogprobs, tops: list[list[Entry] | None], listed: list[list[Entry] | None]
    ) -> None:
        for values, ids in zip(logprobs.top_values, logprobs.top_ids, strict=True):
            tops.append(self._entries(values, ids))
        for values in logprobs.listed_values:
            listed.append(self._entries(values, self._params.token_ids))

    def _entries(self, values: Sequence[float], ids: Sequence[int]) -> list[Entry]:
        return [self._entry(value, token_id) for value, token_id in zip(values, ids, strict=True)]

    def _entry(self, value: float | None, token_id: int) -> Entry:
        return value, token_id, self._tokenizer.token_text(token_id) if self._with_text else None
