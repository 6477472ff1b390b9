"""Typed messages between the API process and the scheduler process (msgspec over ZeroMQ, never pickle).

The API process binds both sockets; the scheduler connects. `Channel` is one direction pair of one side.
One message of the client can become several `GenerateRequest`s (a batch, `n` choices): each has its own
`request_id`, and everything that comes back is keyed by it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

SpeculationMode = Literal["off", "static", "adaptive"]
StateValue = int | float | str | bool | None | list[Any] | dict[str, Any]  # plain JSON-able data
# How an output token came about: an accepted draft; one at a position that an earlier step had drafted for and trimmed
# away; the token that follows a step's accepted drafts; the token of a step that drafted nothing for the request.
TokenOrigin = Literal["draft", "redraft", "bonus", "target"]


GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an output's text has to match. `field` is the request field it came in, for the refusal of a bad one."""

    kind: GrammarKind
    text: str
    field: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one choice asks of the target's distribution. Validated by the API; neutral values are the defaults.

    Applied per row, in this order: repetition, frequency and presence penalties, logit bias, `min_new_tokens`
    (masks end-of-sequence and stop ids), grammar, temperature, top-k, top-p, min-p. A temperature of at most 1e-5 (or
    top_k = 1) means argmax.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1  # -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output tokens
    frequency_penalty: float = 0.0  # over output tokens
    presence_penalty: float = 0.0  # over output tokens
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # of the text in which stop strings are looked for
    seed: int | None = None
    grammar: GrammarSpec | None = None


class LogprobParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log-probabilities to report of every output token and of the prompt's tokens after `start`.

    `start` is a position of the prompt; its last one asks for nothing of the prompt.
    """

    start: int
    num_top: int = 0  # the most likely tokens of each position
    token_ids: tuple[int, ...] = ()  # and these ids at each position


class GenerateRequest(msgspec.Struct, frozen=True, tag=True):
    """One prompt, one choice."""

    request_id: str
    input_ids: list[int]
    sampling: SamplingParams
    choice_index: int = 0  # enters the random draws, so that `n` choices of one seed differ
    # off: no draft; static: full blocks, whatever a plan would trim; adaptive: as much as the plan of the step says,
    # which is full blocks too where the server plans nothing.
    speculation: SpeculationMode = "adaptive"
    max_verify_len: int | None = None  # rows per step, anchor included: 1 … W; None: W
    return_token_origin: bool = False
    cache_namespace: tuple[str, ...] = ()  # the prefix cache is shared by requests of the same one only
    logprobs: LogprobParams | None = None


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Ends requests at once. Each still running or queued one answers with an `abort` finish."""

    request_ids: list[str]
    message: str = "aborted by the client"


class StateRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for one `StateReply` with the same `query_id`."""

    query_id: int
    with_records: bool = True  # whether `info_record` is wanted too, which can be large


class SetStateRequest(msgspec.Struct, frozen=True, tag=True):
    """Changes live settings, all of them or none; answered by one `SetStateReply` with the same `query_id`."""

    query_id: int
    values: dict[str, bool | int | float | str | None]


class PauseRequest(msgspec.Struct, frozen=True, tag=True):
    """Stops the step loop, or lets it go on (mode None); answered by one `SetStateReply`. In flight requests are
    aborted by the API, give up rows and pages (`retract`), or stay as they are."""

    query_id: int
    mode: Literal["abort", "retract", "in_place"] | None


class ProfileRequest(msgspec.Struct, frozen=True, tag=True):
    """Begins a trace of the step loop, or ends it (options None); answered by one `SetStateReply`."""

    query_id: int
    options: dict[str, bool | int | float | str | list[str]] | None


class MetricsRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for one `MetricsReply` with the same `query_id`."""

    query_id: int


class FlushCacheRequest(msgspec.Struct, frozen=True, tag=True):
    """Empties the prefix cache of an idle engine; answered by one `FlushCacheReply` with the same `query_id`."""

    query_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The scheduler leaves its loop and exits with code 0."""


class FinishReason(msgspec.Struct, frozen=True):
    """Why a request ended. `matched` is the stop id or the stop string, None where a grammar has come to its end;
    `status_code` is an HTTP code for aborts, `param` the request field to blame."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None
    param: str | None = None


class SpeculativeStats(msgspec.Struct, frozen=True):
    """Verify statistics of one request so far.

    `num_drafted` counts proposed drafts, `num_verified` those sent to the target, `num_accepted` those that
    became output. Acceptance length = completion tokens / verify steps (bonus included).
    """

    num_verify_steps: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    accept_histogram: list[int] = []  # steps by number of accepted drafts, index 0 … gamma
    # Steps by verify length, anchor included, index 0 … gamma + 1; empty where verification is static.
    verify_histogram: list[int] = []
    # Output tokens that the same verify steps would have given without cutoffs, for the mode that caps after a full
    # verify; None where that is not known.
    num_uncapped_tokens: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of consecutive tokens. The inner lists are there where `LogprobParams` asks for them."""

    values: list[float] = []  # one per token
    top_values: list[list[float]] = []  # by token, descending
    top_ids: list[list[int]] = []
    listed_values: list[list[float]] = []  # by token, in the order of `LogprobParams.token_ids`


class RequestOutput(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one request, in order; the last message of a request carries `finish`."""

    request_id: str
    token_ids: list[int]  # only the new ones
    finish: FinishReason | None = None
    speculative: SpeculativeStats = SpeculativeStats()
    num_retractions: int = 0
    num_cached_tokens: int = 0
    queue_seconds: float | None = None  # from arrival until it first got a row; None: it has none yet
    token_origins: list[TokenOrigin] = []  # one per token, where the request asked for them
    logprobs: TokenLogprobs | None = None  # of `token_ids`
    prompt_logprobs: TokenLogprobs | None = None  # once, of the prompt's tokens after `LogprobParams.start`


class SchedulerReady(msgspec.Struct, frozen=True, tag=True):
    """Sent once, when the engine can serve. Limits the API validates against."""

    context_length: int  # prompt + output, at most
    vocab_size: int
    eos_token_ids: list[int]
    max_total_num_tokens: int  # KV capacity of the pool in tokens
    max_running_requests: int
    info: dict[str, int | float | str | bool | list[int | str] | None]  # resolved values for /server_info


class SchedulerFailed(msgspec.Struct, frozen=True, tag=True):
    """Start-up or the loop failed; the process exits with a non-zero code right after."""

    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Progress of the step loop, sent at least once a second while the loop turns."""

    num_steps: int
    num_running_reqs: int
    num_queue_reqs: int
    num_used_tokens: int
    num_queue_tokens: int = 0  # known tokens of the requests that wait


class StateReply(msgspec.Struct, frozen=True, tag=True):
    """Counters and live values, for /server_info and tests of conservation."""

    query_id: int
    state: dict[str, StateValue]
    info_record: bytes | None = (
        None  # JSON of `dspark_info_record`, made once by the scheduler; None: not recorded
    )


class MetricSample(msgspec.Struct, frozen=True):
    """One value of a metric, under its name without prefix."""

    name: str
    value: float
    labels: dict[str, str] = {}


class SchedulerMetrics(msgspec.Struct, frozen=True):
    """What the scheduler adds to /metrics."""

    samples: list[MetricSample]
    steps_by_size: list[int]  # decode steps that ran up to 1, 2, 4 … rows; the last: more
    num_rows_run: int  # by all of them


class MetricsReply(msgspec.Struct, frozen=True, tag=True):
    """The metrics of the moment."""

    query_id: int
    metrics: SchedulerMetrics


class SetStateReply(msgspec.Struct, frozen=True, tag=True):
    """Whether what was asked for was done; where not, nothing was, and `refusal` says why."""

    query_id: int
    refusal: str | None = None


class FlushCacheReply(msgspec.Struct, frozen=True, tag=True):
    """Whether the prefix cache was emptied; it is not while requests run or wait."""

    query_id: int
    flushed: bool


Query = StateRequest | MetricsRequest | SetStateRequest | FlushCacheRequest | PauseRequest | ProfileRequest
Reply = StateReply | MetricsReply | SetStateReply | FlushCacheReply
ToScheduler = GenerateRequest | AbortRequest | Query | Shutdown
FromScheduler = RequestOutput | SchedulerReady | SchedulerFailed | Heartbeat | Reply


class SchedulerChannel:
    """The scheduler's end: non-blocking receive, blocking wait, send. Not thread-safe."""

    def __init__(self, requests_address: str, outputs_address: str) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PULL)
        self._requests.setsockopt(zmq.RCVHWM, 0)
        self._requests.connect(requests_address)
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.setsockopt(zmq.SNDHWM, 0)
        self._outputs.connect(outputs_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToScheduler)

    def receive_all(self, wait_ms: int = 0) -> list[ToScheduler]:
        """Every message there is; waits up to `wait_ms` for the first one."""
        messages: list[ToScheduler] = []
        if not self._requests.poll(wait_ms):
            return messages
        while True:
            try:
                messages.append(self._decoder.decode(self._requests.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromScheduler) -> None:
        """Queues the message; never blocks (no high-water mark: outputs are bounded by the running requests)."""
        self._outputs.send(self._encoder.encode(message))

    def close(self) -> None:
        """Gives what is queued two seconds to leave, then closes."""
        self._requests.close(linger=0)
        self._outputs.close(linger=2000)
        self._context.term()


class ApiChannel:
    """The API process's end, on its event loop. Binds both addresses before the scheduler starts."""

    def __init__(self, requests_address: str, outputs_address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.setsockopt(zmq.SNDHWM, 0)
        self._requests.bind(requests_address)
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.setsockopt(zmq.RCVHWM, 0)
        self._outputs.bind(outputs_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromScheduler)

    async def send(self, message: ToScheduler) -> None:
        """Queues the message for the scheduler."""
        await self._requests.send(self._encoder.encode(message))

    async def receive(self) -> FromScheduler:
        """The next message of the scheduler."""
        return self._decoder.decode(await self._outputs.recv())

    def close(self) -> None:
        """Closes at once; what is unsent is dropped."""
        self._context.destroy(linger=0)
