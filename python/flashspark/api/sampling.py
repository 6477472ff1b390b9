"""From validated bodies to what the scheduler gets: sampling parameters, prompt ids, and their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashspark.args import ServerArgs
from flashspark.ipc import SamplingParams, SchedulerReady, SpeculationMode
from flashspark.text import TextTokenizer

from .errors import RequestError
from .fields import MAX_ANSWERS_PER_CALL
from .grammar import grammar_spec
from .protocol import EngineFields, NativeSampling, OpenAIFields, SamplingFields, SpeculationOptions

# Longer texts are tokenised in a thread: the event loop serves everyone else meanwhile.
_INLINE_CHARS = 4096
# Fields that a model's generation_config.json may set for chat.
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Limits:
    """What one request may be at most, from the engine."""

    context_length: int
    vocab_size: int
    pool_tokens: int
    auto_truncate: bool
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, ready: SchedulerReady, auto_truncate: bool) -> Limits:
        """The engine's limits."""
        return cls(
            ready.context_length,
            ready.vocab_size,
            ready.max_total_num_tokens,
            auto_truncate,
            frozenset(ready.eos_token_ids),
        )

    @property
    def longest_prompt(self) -> int:
        """Tokens. One more has to fit into the context; in the pool the last token of a request takes no place."""
        return min(self.context_length - 1, self.pool_tokens)


@dataclass(frozen=True)
class Lengths:
    """The asked-for numbers of tokens and the field names they came under."""

    max_tokens: int | None  # None: to the end of the context
    min_tokens: int
    max_name: str
    min_name: str


def check_token_ids(ids: Any, name: str, limits: Limits) -> list[int]:
    """A non-empty list of ids within the vocabulary."""
    if not isinstance(ids, list):
        raise RequestError(f"{name}: must be a list of token ids (whole numbers)", param=name, schema=True)
    if not ids:
        raise RequestError(f"{name}: must not be empty", param=name)
    if not all(type(item) is int for item in ids):
        raise RequestError(f"{name}: must be a list of token ids (whole numbers)", param=name, schema=True)
    if not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        wrong = next(item for item in ids if not 0 <= item < limits.vocab_size)
        raise RequestError(
            f"{name}: token id {wrong} is outside the vocabulary (0 to {limits.vocab_size - 1})", param=name
        )
    return ids


def check_prompt_ids(ids: Any, name: str, limits: Limits) -> list[int]:
    """A prompt's ids. Of a prompt far beyond the context nothing but its length is looked at: it may have
    millions of ids, and everyone else waits meanwhile."""
    if isinstance(ids, list) and len(ids) >= limits.context_length:
        if not limits.auto_truncate:
            raise _prompt_too_long(len(ids), name, limits)
        ids = ids[: limits.context_length]
    return check_token_ids(ids, name, limits)


async def encode(
    tokenizer: TextTokenizer, text: str, name: str, add_special_tokens: bool = True
) -> list[int]:
    """Ids of a text, not empty, of any length."""
    if not text:
        raise RequestError(f"{name}: must not be empty", param=name)
    if len(text) <= _INLINE_CHARS:
        ids = tokenizer.encode(text, add_special_tokens)
        await asyncio.sleep(0)  # a batch may have thousands of them
    else:
        ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    if not ids:
        raise RequestError(f"{name}: has no tokens", param=name)
    return ids


async def encode_prompt(
    tokenizer: TextTokenizer, text: str, name: str, limits: Limits, add_special_tokens: bool = True
) -> list[int]:
    """Ids of a prompt's text, within the vocabulary of the model too."""
    return check_prompt_ids(await encode(tokenizer, text, name, add_special_tokens), name, limits)


def _prompt_too_long(num_tokens: int, name: str, limits: Limits) -> RequestError:
    return RequestError(
        f"{name}: the prompt has {num_tokens} tokens; the context of {limits.context_length} tokens "
        "has to hold the prompt and at least one more",
        param=name,
        code="context_length_exceeded",
    )


def fit(ids: list[int], lengths: Lengths, prompt_name: str, limits: Limits) -> tuple[list[int], int]:
    """The prompt and its number of output tokens, refused or (with --allow-auto-truncate) shortened."""
    context, asked = limits.context_length, lengths.max_tokens
    if limits.auto_truncate:
        ids = ids[: limits.longest_prompt]
    num_prompt = len(ids)
    if num_prompt >= context:
        raise _prompt_too_long(num_prompt, prompt_name, limits)
    if num_prompt > limits.longest_prompt:
        raise RequestError(
            f"{prompt_name}: the prompt has {num_prompt} tokens; the KV pool (--max-total-tokens) has "
            f"{limits.pool_tokens}",
            param=prompt_name,
            code="kv_pool_exceeded",
        )
    room = min(context, limits.pool_tokens + 1) - num_prompt
    if asked is None or (limits.auto_truncate and asked > room):
        return ids, room
    if num_prompt + asked > context:
        raise RequestError(
            f"{lengths.max_name}: {num_prompt} prompt tokens and {asked} output tokens "
            f"exceed the context of {context} tokens",
            param=lengths.max_name,
            code="context_length_exceeded",
        )
    if asked > room:
        raise RequestError(
            f"{lengths.max_name}: {num_prompt} prompt tokens and {asked} output tokens "
            f"exceed the KV pool of {limits.pool_tokens} tokens (--max-total-tokens), which has to hold "
            "all but the last of them",
            param=lengths.max_name,
            code="kv_pool_exceeded",
        )
    return ids, asked


def check_num_answers(num_prompts: int, n: int) -> None:
    """Refuses a call of too many answers. To be asked before anything is done per prompt or per answer: a small
    body can name millions."""
    if num_prompts * n > MAX_ANSWERS_PER_CALL:
        raise RequestError(
            f"n: {num_prompts * n} answers in one call, the limit is {MAX_ANSWERS_PER_CALL}", param="n"
        )


def native_lengths(sampling: NativeSampling) -> Lengths:
    """Of `/generate`."""
    return Lengths(
        sampling.max_new_tokens,
        sampling.min_new_tokens,
        "sampling_params.max_new_tokens",
        "sampling_params.min_new_tokens",
    )


def openai_lengths(body: OpenAIFields, max_tokens: int | None, max_name: str) -> Lengths:
    """Of the OpenAI routes."""
    return Lengths(max_tokens, body.min_tokens, max_name, "min_tokens")


def sampling_params(
    fields: SamplingFields,
    max_new_tokens: int,
    lengths: Lengths,
    seed: int | None,
    limits: Limits,
    prefix: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """The scheduler's parameters; `defaults` fill what the client left out."""
    if lengths.min_tokens > (max_new_tokens if lengths.max_tokens is None else lengths.max_tokens):
        raise RequestError(
            f"{lengths.min_name}: {lengths.min_tokens} is more than {max_new_tokens} output tokens "
            f"({lengths.max_name})",
            param=lengths.min_name,
        )
    stop_token_ids = _stop_token_ids(fields, prefix, limits)
    if lengths.min_tokens and len(limits.eos_token_ids.union(stop_token_ids)) >= limits.vocab_size:
        name = f"{prefix}stop_token_ids"
        message = f"{name}: with {lengths.min_name} there must be a token that does not end the output"
        raise RequestError(message, param=name)
    chosen = {**(defaults or {})}
    for name in (*_MODEL_DEFAULTS, "frequency_penalty", "presence_penalty"):
        value = getattr(fields, name)
        if value is not None:
            chosen[name] = value
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(lengths.min_tokens, max_new_tokens),
        logit_bias=_logit_bias(fields, prefix, limits),
        stop=tuple(fields.stop),
        stop_token_ids=stop_token_ids,
        ignore_eos=fields.ignore_eos,
        skip_special_tokens=fields.skip_special_tokens,
        seed=seed,
        grammar=grammar_spec(fields, prefix),
        **chosen,
    )


def _logit_bias(fields: SamplingFields, prefix: str, limits: Limits) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in fields.logit_bias.items():
        # isdecimal alone would let other scripts' digits through, and leading zeros two values for one id
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) <= 12 else -1
        if str(token_id) != key or not 0 <= token_id < limits.vocab_size:
            name = f"{prefix}logit_bias"
            raise RequestError(
                f"{name}: key {key[:40]!r} is not a token id of the vocabulary (0 to {limits.vocab_size - 1})",
                param=name,
            )
        bias[token_id] = value
    return bias


def _stop_token_ids(fields: SamplingFields, prefix: str, limits: Limits) -> tuple[int, ...]:
    if not fields.stop_token_ids:
        return ()
    return tuple(check_token_ids(fields.stop_token_ids, f"{prefix}stop_token_ids", limits))


def default_speculation(args: ServerArgs) -> SpeculationMode:
    """The mode of a request that asks for none: the server's own."""
    if not args.speculative:
        return "off"
    return "static" if args.ragged_verify_mode == "static" else "adaptive"


def speculation(
    options: SpeculationOptions | None, args: ServerArgs, width: Any
) -> tuple[SpeculationMode, int | None]:
    """The mode and the most rows per step that the body asks for; `width` is that of a full block.

    A server can only be asked for what it was started with: a draft, and plans for `adaptive`.
    """
    default = default_speculation(args)
    if options is None:
        return default, None
    needed = None
    if options.mode != "off" and default == "off":
        needed = "--speculative-algorithm"
    elif options.mode == "adaptive" and default != "adaptive":
        needed = "--ragged-verify-mode compact or cap-accept"
    if needed is not None:
        raise RequestError(
            f"speculation.mode: {options.mode!r} needs a server started with {needed}",
            param="speculation.mode",
            code="unsupported_value",
        )
    longest = options.max_verify_len
    if longest is not None:
        name = "speculation.max_verify_len"
        if options.mode == "off":
            raise RequestError(f"{name}: mode 'off' verifies one row per step; leave it out", param=name)
        if longest > width:
            raise RequestError(f"{name}: {longest} is more than the {width} rows of a block", param=name)
    return options.mode, longest


def chat_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults from a model's generation_config.json, as far as they are in range."""
    found: dict[str, Any] = {}
    for name in _MODEL_DEFAULTS:
        value = generation_config.get(name)
        if name == "top_k" and value == 0:
            value = -1  # transformers' way to say "all"
        if value is not None:
            found[name] = getattr(SamplingFields.parse({name: value}, "generation_config.json: "), name)
    return found


def request_ids(rid: str | Sequence[str] | None, num_prompts: int, fallback: str) -> list[str]:
    """One id per prompt. A single id becomes `rid_0`, `rid_1`, … in a batch."""
    if isinstance(rid, str) or rid is None:
        base = rid if isinstance(rid, str) else fallback
        return [base] if num_prompts == 1 else [f"{base}_{i}" for i in range(num_prompts)]
    if len(rid) != num_prompts:
        raise RequestError(f"rid: {len(rid)} ids for {num_prompts} prompts", param="rid")
    if len(set(rid)) != len(rid):
        raise RequestError("rid: has duplicates", param="rid")
    return list(rid)


def cache_namespaces(body: EngineFields, num_prompts: int) -> list[tuple[str, ...]]:
    """Per prompt, whose K/V it may reuse and lend its own to."""
    keys = []
    for name in ("extra_key", "cache_salt"):
        value: str | list[str] = getattr(body, name) or ""
        if isinstance(value, list) and len(value) != num_prompts:
            raise RequestError(f"{name}: {len(value)} keys for {num_prompts} prompts", param=name)
        keys.append(value if isinstance(value, list) else [value] * num_prompts)
    return list(zip(*keys, strict=True))
