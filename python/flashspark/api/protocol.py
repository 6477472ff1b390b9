"""Request bodies. A field is honoured, or made by `neutral`; anything else is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from .fields import (
    INT64,
    MAX_FIELDS,
    MAX_MESSAGES,
    GrammarText,
    Interval,
    LogitBias,
    LogprobIds,
    LogprobStart,
    MinP,
    NumChoices,
    NumTokens,
    Penalty,
    PositiveTokens,
    RepetitionPenalty,
    RequestId,
    RequestModel,
    Seed,
    StopIds,
    Stops,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    VerifyLen,
    neutral,
)
from .tool_fields import MessageToolCalls, ToolChoice, Tools

_FUNCTIONS = "superseded by tools and tool_choice"
_LORA = "LoRA adapters are not available"
_MEDIA = "this model takes text only"
_DISAGGREGATION = "disaggregated serving is not available"

Identifier = Annotated[str, StringConstraints(max_length=512)]
# One violation is reported, so one is enough: a body can hold a million, and everyone else waits meanwhile.
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Labels = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]
RequestIds = Annotated[list[RequestId], Field(fail_fast=True)]
CacheKey = Annotated[str, StringConstraints(max_length=512)]
CacheKeys = Annotated[list[CacheKey], Field(fail_fast=True)]
# One per prompt of a batch.
Flags = Annotated[list[bool], Field(fail_fast=True)]
LogprobStarts = Annotated[list[LogprobStart], Field(fail_fast=True)]
TopLogprobsList = Annotated[list[TopLogprobs], Field(fail_fast=True)]
LogprobIdLists = Annotated[list[LogprobIds | None], Field(fail_fast=True)]


def _role(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class SpeculationOptions(RequestModel):
    """FlashSpark's own: how this request's tokens are found. The distribution they follow never changes."""

    mode: Literal["off", "static", "adaptive"] = Field(
        description="off: one token per step; static: full blocks, never trimmed; adaptive: what the step's plan admits"
    )
    max_verify_len: VerifyLen | None = Field(
        None, description="most rows a step verifies, anchor included: 1 to the block's width"
    )


class StreamOptions(RequestModel):
    include_usage: bool = Field(False, description="one last frame with the usage of the whole call")
    continuous_usage_stats: bool = Field(False, description="usage so far in every content frame")
    include_obfuscation: Any = neutral(False)


class ResponseFormat(RequestModel):
    """OpenAI's way to ask for structured output; `structural_tag` is SGLang's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = Field(None, description="name, schema, strict, description")
    structures: Objects | None = Field(None, description="of a structural_tag: begin, schema and end of each")
    triggers: Texts | None = Field(None, description="of a structural_tag: what announces a structure")
    format: dict[str, Any] | None = Field(None, description="of a structural_tag, instead of the two")


class SamplingFields(RequestModel):
    """Sampling that both APIs name alike. None: the route's default."""

    n: NumChoices = Field(1, description="answers per prompt")
    temperature: Temperature | None = Field(None, description="at most 1e-5: greedy")
    top_p: TopP | None = None
    top_k: TopK | None = Field(None, description="-1: all")
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: Stops = Field([], description="output ends before the first of these")
    stop_token_ids: StopIds = Field([], description="output ends at the first of these")
    ignore_eos: bool = False
    no_stop_trim: bool = Field(False, description="the stop string or token stays in the text")
    skip_special_tokens: bool = True
    logit_bias: LogitBias = Field({}, description="token id (as a string) to bias, -10000 to 10000")
    spaces_between_special_tokens: Any = neutral(True)
    stop_regex: Any = neutral(None, "", [], remedy="stop patterns are not available yet")
    json_schema: GrammarText | dict[str, Any] | None = Field(
        None, description="the output is JSON of this schema, given as an object or as its text"
    )
    regex: GrammarText | None = Field(None, description="the output matches this regular expression, whole")
    ebnf: GrammarText | None = Field(None, description="the output follows this grammar (GBNF, rule `root`)")
    structural_tag: GrammarText | dict[str, Any] | None = Field(
        None, description="free text with structured parts, as xgrammar takes them"
    )
    custom_params: Any = neutral(None, {})


class NativeSampling(SamplingFields):
    """`sampling_params` of `/generate`."""

    NULLABLE: ClassVar[frozenset[str]] = frozenset({"max_new_tokens"})

    max_new_tokens: NumTokens | None = Field(128, description="null: to the end of the context")
    min_new_tokens: NumTokens = 0
    sampling_seed: Seed | None = None
    stream_interval: Interval | None = None
    beam_width: Any = neutral(None, 0, 1, remedy="beam search is not available")
    watermark: Any = neutral(None, False)
    choice: Any = neutral(None)


class EngineFields(RequestModel):
    """What every generating route takes: tenancy; at its neutral value only, routing and what no engine here does."""

    extra_key: CacheKey | CacheKeys | None = Field(
        None, description="K/V is reused among requests of the same key only; one, or one per prompt"
    )
    cache_salt: CacheKey | CacheKeys | None = Field(None, description="as `extra_key`, beside it")

    return_hidden_states: Any = neutral(False, remedy="hidden states are not returned")
    return_routed_experts: Any = neutral(False, remedy="hidden states are not returned")
    lora_path: Any = neutral(None, "", remedy=_LORA)
    session_params: Any = neutral(None, {})
    custom_logit_processor: Any = neutral(None, "", remedy="custom code is never executed")
    priority: Any = neutral(None, 0)
    routing_key: Any = neutral(None)
    custom_labels: Any = neutral(None, {})
    data_parallel_rank: Any = neutral(None, 0)
    routed_dp_rank: Any = neutral(None, 0)
    disagg_prefill_dp_rank: Any = neutral(None, remedy=_DISAGGREGATION)
    bootstrap_host: Any = neutral(None, remedy=_DISAGGREGATION)
    bootstrap_port: Any = neutral(None, remedy=_DISAGGREGATION)
    bootstrap_room: Any = neutral(None, remedy=_DISAGGREGATION)


class GenerateBody(EngineFields):
    """`/generate`. Either `text` or `input_ids`, one or a batch."""

    text: str | Texts | None = None
    input_ids: list[Any] | None = Field(None, description="token ids of one prompt, or a list of such lists")
    sampling_params: dict[str, Any] | Objects = Field({}, description="one, or one per prompt")
    stream: bool = False
    rid: RequestId | RequestIds | None = Field(None, description="the client's id, to abort by")
    speculation: SpeculationOptions | None = None
    return_prompt_token_ids: bool = False
    return_token_origin: bool = Field(
        False, description="FlashSpark's own: adds meta_info.token_origins and token_text_ends"
    )
    return_logprob: bool | Flags = Field(False, description="log-probabilities in meta_info")
    logprob_start_len: LogprobStart | LogprobStarts = Field(
        -1, description="also of the prompt after this position; -1: of the output alone"
    )
    top_logprobs_num: TopLogprobs | TopLogprobsList = Field(
        0, description="also of so many of the most likely tokens at each position"
    )
    token_ids_logprob: LogprobIds | LogprobIdLists | None = Field(
        None, description="also of these ids at each position"
    )
    return_text_in_logprobs: bool = Field(False, description="each id comes with its text")
    return_entropy: Any = neutral(False, remedy="entropies are not returned")
    return_bytes: Any = neutral(False)
    log_metrics: Any = neutral(True)
    background: Any = neutral(False, remedy="background requests are not available")
    no_logs: Any = neutral(False)
    model: Any = neutral(None)
    input_embeds: Any = neutral(None)
    image_data: Any = neutral(None, [], remedy=_MEDIA)
    video_data: Any = neutral(None, [], remedy=_MEDIA)
    audio_data: Any = neutral(None, [], remedy=_MEDIA)
    modalities: Any = neutral(None, [], ["text"], remedy=_MEDIA)
    lora_id: Any = neutral(None, "", remedy=_LORA)


class OpenAIFields(SamplingFields, EngineFields):
    """What completions and chat share."""

    model: Identifier = Field("default", description="echoed; one model is served")
    max_tokens: PositiveTokens | None = None
    min_tokens: NumTokens = 0
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    rid: RequestId | RequestIds | None = Field(None, description="the client's id, to abort by")
    speculation: SpeculationOptions | None = None
    return_cached_tokens_details: bool = Field(False, description="adds sglext.cached_tokens_details")
    return_spec_tokens_details: bool = Field(False, description="adds sglext.spec_tokens_details")
    return_token_ids: bool = Field(False, description="adds sglext.input_ids and output_ids")
    user: Identifier | None = Field(None, description="identifies an end user; no effect on the answer")
    safety_identifier: Identifier | None = Field(None, description="as `user`")
    metadata: Labels | None = Field(None, description="the client's own labels; no effect")
    response_format: ResponseFormat | None = Field(None, description="text, JSON, or JSON of a schema")
    store: Any = neutral(False)
    service_tier: Any = neutral(None, "auto", "default")
    prompt_cache_key: Any = neutral(None, "")


class CompletionBody(OpenAIFields):
    """`/v1/completions`."""

    prompt: Any = Field(description="text, list of texts, token ids, or list of token id lists")
    max_tokens: PositiveTokens = 16
    echo: bool = Field(False, description="the prompt before the answer")
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="only as 1 or the value of n")
    suffix: Any = neutral(None, "")
    logprobs: TopLogprobs | Literal[False] | None = Field(
        None,
        description="log-probabilities, also of so many of the most likely tokens at each position",
    )


class ChatMessage(RequestModel):
    """One turn. `content` is text or a list of text parts."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"], BeforeValidator(_role)
    ]
    content: str | Objects | None = None
    name: Identifier | None = None
    reasoning_content: str | None = None
    tool_call_id: Identifier | None = None
    tool_calls: MessageToolCalls | None = Field(None, description="of an assistant's turn")
    refusal: Any = neutral(None)
    audio: Any = neutral(None, remedy=_MEDIA)
    annotations: Any = neutral(None, [])
    function_call: Any = neutral(None, remedy=_FUNCTIONS)


Messages = Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ChatBody(OpenAIFields):
    """`/v1/chat/completions`."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: PositiveTokens | None = Field(None, description="beats max_tokens")
    chat_template_kwargs: Labels | None = Field(None, description="variables of the chat template")
    return_meta_info: bool = Field(False, description="adds meta_info to each choice (not streamed)")
    separate_reasoning: bool = Field(True, description="false: reasoning stays in the content, tags and all")
    stream_reasoning: bool = Field(True, description="false: reasoning is sent when it is complete")
    tools: Tools | None = Field(None, description="functions that the answer may call")
    tool_choice: ToolChoice | None = Field(None, description="default: auto with tools, else none")
    parallel_tool_calls: bool = Field(True, description="false: calls after the first are dropped")
    functions: Any = neutral(None, [], remedy=_FUNCTIONS)
    function_call: Any = neutral(None, "none", "auto", remedy=_FUNCTIONS)
    logprobs: bool = Field(False, description="log-probabilities of the tokens of the text")
    top_logprobs: TopLogprobs | None = Field(
        None, description="also of so many of the most likely tokens at each position"
    )
    reasoning_effort: Any = neutral(None, remedy="pass template variables in chat_template_kwargs")
    continue_final_message: bool = Field(False, description="the answer goes on where the last turn ends")
    input_ids: Any = neutral(None, remedy="use /generate for token ids")
    modalities: Any = neutral(None, [], ["text"], remedy=_MEDIA)
    audio: Any = neutral(None, remedy=_MEDIA)
    prediction: Any = neutral(None)
    web_search_options: Any = neutral(None)
    verbosity: Any = neutral(None)


class TokenizeBody(RequestModel):
    """`/tokenize`: either `prompt` or `messages`."""

    model: Identifier = "default"
    prompt: str | Texts | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: Labels | None = None
    tools: Tools | None = None


class DetokenizeBody(RequestModel):
    """`/detokenize`: the ids of one text, or of several."""

    model: Identifier = "default"
    tokens: list[Any]
    skip_special_tokens: bool = True


class AbortBody(RequestModel):
    """`/abort_request`: every request whose id begins with `rid`, or all."""

    rid: str | None = None
    abort_all: bool = False
    abort_message: Identifier | None = None


MAX_LIVE_SETTINGS = 64
MAX_LIVE_TEXT = 64


def _live_value(value: Any) -> Any:
    """Which type a setting wants, the scheduler knows; here, what no setting can be. (A union's first branch would
    answer for all of them.)"""
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError("must be a number, a string, true, false or null")
    if isinstance(value, int) and not -INT64 <= value < INT64:
        raise ValueError("must be a whole number of at most 64 bits")
    if isinstance(value, str) and len(value) > MAX_LIVE_TEXT:
        raise ValueError(f"has {len(value)} characters, the limit is {MAX_LIVE_TEXT}")
    return value


LiveValue = Annotated[bool | int | float | str | None, BeforeValidator(_live_value)]


class SetInternalStateBody(RequestModel):
    """`/set_internal_state`: live settings by name; a null clears one that can be cleared."""

    server_args: Annotated[dict[Identifier, LiveValue], Field(max_length=MAX_LIVE_SETTINGS)]


class PauseBody(RequestModel):
    """`/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="requests in flight end, start again from their tokens later, or wait where they are",
    )


class ContinueBody(RequestModel):
    """`/continue_generation` and `/stop_profile`: nothing to say."""


def _count(value: Any) -> Any:
    """Clients of this route send numbers as strings, too."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


Count = Annotated[int, Field(ge=0, le=INT64 - 1), BeforeValidator(_count)]
ShortText = Annotated[str, StringConstraints(max_length=1024)]


class StartProfileBody(RequestModel):
    """`/start_profile`: a trace by torch's profiler."""

    OPTIONS: ClassVar[tuple[str, ...]] = (
        *("output_dir", "start_step", "num_steps", "activities", "profile_prefix"),
        *("with_stack", "record_shapes"),
    )

    output_dir: ShortText | None = Field(None, description="folder on the server (SGLANG_TORCH_PROFILER_DIR)")
    start_step: Count | None = Field(None, description="step of the loop to begin at; none: the next one")
    num_steps: Count | None = Field(None, description="steps to record; none: until /stop_profile")
    activities: Annotated[list[ShortText], Field(max_length=8)] | None = Field(None, description="CPU, GPU")
    profile_prefix: Annotated[str, StringConstraints(pattern=r"^[\w.-]{0,64}$")] | None = Field(
        None, description="beginning of the file's name: letters, digits, '.', '_' and '-'"
    )
    with_stack: bool = False
    record_shapes: bool = False
    profile_by_stage: Any = neutral(False, remedy="a trace is of all stages")
    profile_stages: Any = neutral(None, remedy="a trace is of all stages")
    merge_profiles: Any = neutral(False, remedy="there is one rank, and one trace")


# Request models by route, for the OpenAPI document and for the test that walks every field.
BODIES: dict[str, type[RequestModel]] = {
    "/generate": GenerateBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
    "/set_internal_state": SetInternalStateBody,
    "/pause_generation": PauseBody,
    "/continue_generation": ContinueBody,
    "/start_profile": StartProfileBody,
    "/stop_profile": ContinueBody,
}
