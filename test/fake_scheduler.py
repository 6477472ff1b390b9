"""A scheduler process without a model: speaks the real messages and answers with the prompt itself.

A request's output is its prompt's ids over and over, so that a test decides by its prompt what text comes
back. Steps commit `WIDTH` tokens (one with speculation off); stop ids and strings end an answer inside a
step, as the engine does it. A grammar with BAD in its text is refused, any other is taken and without effect.
Negative seeds are orders, see `SEED_*`. Log-probabilities follow from positions, see `fake_logprobs`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field

from flashspark.args import ServerArgs
from flashspark.ipc import (
    AbortRequest,
    FinishReason,
    FlushCacheReply,
    FlushCacheRequest,
    GenerateRequest,
    Heartbeat,
    LogprobParams,
    MetricSample,
    MetricsReply,
    MetricsRequest,
    PauseRequest,
    ProfileRequest,
    RequestOutput,
    SchedulerChannel,
    SchedulerFailed,
    SchedulerMetrics,
    SchedulerReady,
    SetStateReply,
    SetStateRequest,
    Shutdown,
    SpeculativeStats,
    StateReply,
    StateRequest,
    TokenLogprobs,
    TokenOrigin,
)
from flashspark.text import StopMatcher, TextTokenizer

WIDTH = 4
CONTEXT_LENGTH = 256
QUEUE_SECONDS = 0.25  # that every request claims to have waited
SEED_CRASH = -1001  # the process dies with exit code 7
SEED_FAIL = -1002  # it says why, then dies
SEED_HANG = -1003  # it stops turning its loop
SEED_ERROR = -1004  # this request alone ends with status 500
# Any other negative seed -k: a step of this request takes k milliseconds.

METRICS = SchedulerMetrics(
    samples=[
        MetricSample("num_running_reqs", 3),
        MetricSample("verify_tokens_total", 70),
        MetricSample("plans_total", 5, {"outcome": "trimmed"}),
        MetricSample("plans_total", 2, {"outcome": 'full ("quoted")'}),
    ],
    steps_by_size=[1, 0, 4] + [0] * 11 + [2],
    num_rows_run=20_000,
)

# What the dashboard plots. Nothing of it is counted, and the clock stands still.
CHARTS = dict.fromkeys(
    (
        *("num_queue_reqs", "num_used_tokens", "num_steps", "output_tokens", "verify_tokens", "verify_steps"),
        *("full_block_tokens", "monotonic_seconds"),
        *("predicted_steps", "predicted_step_seconds", "measured_step_seconds"),
    ),
    0,
) | {
    "ragged_verify_mode": "static",
    "speculative_num_draft_tokens": WIDTH,
    "steps_by_rows": [0] * 15,
    "plan_outcomes": {},
    "confidence_calibration": None,
}


def fake_logprobs(params: LogprobParams, ids: list[int], positions: range) -> TokenLogprobs:
    """Minus an eighth per position; the best are the token itself and the ids after it, one less each; a listed id
    has minus itself."""
    values = [-position / 8 for position in positions]
    tops = range(params.num_top)
    return TokenLogprobs(
        values,
        [[value - j for j in tops] for value in values] if tops else [],
        [[token + j for j in tops] for token in ids] if tops else [],
        [[-float(i) for i in params.token_ids] for _ in ids] if params.token_ids else [],
    )


@dataclass
class Running:
    request: GenerateRequest
    tokenizer: TextTokenizer
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * WIDTH)
    next_step_s: float = 0.0
    has_told_prompt: bool = False

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.detokenizer = self.tokenizer.detokenizer(sampling.skip_special_tokens)
        self.matcher = StopMatcher(sampling.stop)
        self.ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.ends |= set(self.tokenizer.eos_token_ids)

    def step(self) -> RequestOutput:
        sampling, ids = self.request.sampling, self.request.input_ids
        if sampling.max_new_tokens == 0:  # its prompt is all that is asked about
            return self.output([], FinishReason("length"))
        drafts = self.request.speculation != "off"
        width = min(WIDTH, self.request.max_verify_len or WIDTH) if drafts else 1
        new: list[int] = []
        finish = None
        while len(new) < width and finish is None:
            token = ids[self.num_tokens % len(ids)]
            new.append(token)
            self.num_tokens += 1
            match = self.matcher.push(self.detokenizer.push([token]))
            if token in self.ends and self.num_tokens > sampling.min_new_tokens:
                finish = FinishReason("stop", token)
            elif match is not None:
                finish = FinishReason("stop", match.stop)
            elif self.num_tokens >= sampling.max_new_tokens:
                finish = FinishReason("length")
        if drafts:
            self.num_steps += 1
            self.num_drafted += WIDTH - 1
            self.num_accepted += len(new) - 1
            self.histogram[len(new) - 1] += 1
        return self.output(new, finish)

    def output(self, new: list[int], finish: FinishReason | None) -> RequestOutput:
        stats = SpeculativeStats(
            self.num_steps, self.num_drafted, self.num_drafted, self.num_accepted, list(self.histogram)
        )
        origins: list[TokenOrigin] = []
        if self.request.return_token_origin:
            last: TokenOrigin = "bonus" if self.num_steps else "target"
            origins = ["draft" if i < len(new) - 1 else last for i in range(len(new))]
        stats = stats if self.num_steps else SpeculativeStats()
        params, num_prompt, prompt_logprobs = self.request.logprobs, len(self.request.input_ids), None
        if params is not None and not self.has_told_prompt and params.start < num_prompt - 1:
            self.has_told_prompt = True
            positions = range(params.start + 1, num_prompt)
            prompt_logprobs = fake_logprobs(params, self.request.input_ids[positions.start :], positions)
        at = num_prompt + self.num_tokens
        return RequestOutput(
            self.request.request_id,
            new,
            finish,
            stats,
            queue_seconds=QUEUE_SECONDS,
            token_origins=origins,
            logprobs=None if params is None else fake_logprobs(params, new, range(at - len(new), at)),
            prompt_logprobs=prompt_logprobs,
        )


class FakeScheduler:
    def __init__(self, args: ServerArgs, channel: SchedulerChannel) -> None:
        self.channel = channel
        self.tokenizer = TextTokenizer.load(args.tokenizer_path or "")
        self.running: dict[str, Running] = {}
        self.num_aborted = 0
        self.num_steps = 0
        self.last_beat_s = 0.0
        self.context_length = args.context_length or CONTEXT_LENGTH
        self.pool = args.max_total_tokens or 8 * self.context_length
        self.num_stepping = self.max_running = args.max_running_requests or 8
        self.info_record: bytes | None = None

    def ready(self) -> SchedulerReady:
        vocab, ends = self.tokenizer.vocab_size, list(self.tokenizer.eos_token_ids)
        info = {"speculative_num_draft_tokens": WIDTH, "dtype": "float32"}
        return SchedulerReady(self.context_length, vocab, ends, self.pool, self.max_running, info)

    def loop(self) -> None:
        while True:
            wait_ms = 1 if self.running else 100
            for message in self.channel.receive_all(wait_ms):
                match message:
                    case GenerateRequest():
                        self.add(message)
                    case AbortRequest():
                        self.abort(message)
                    case StateRequest():
                        state = {"num_running_reqs": len(self.running), "num_aborted": self.num_aborted}
                        record = self.info_record if message.with_records else None
                        self.channel.send(StateReply(message.query_id, CHARTS | state, record))
                    case MetricsRequest():
                        self.channel.send(MetricsReply(message.query_id, METRICS))
                    case SetStateRequest():
                        self.channel.send(SetStateReply(message.query_id, self.set_state(message.values)))
                    case FlushCacheRequest():
                        self.channel.send(FlushCacheReply(message.query_id, not self.running))
                    case PauseRequest():
                        self.num_stepping = 0 if message.mode else self.max_running
                        self.channel.send(SetStateReply(message.query_id))
                    case ProfileRequest():
                        refusal = None if message.options else "no trace is being recorded"
                        self.channel.send(SetStateReply(message.query_id, refusal))
                    case Shutdown():
                        return
            now = time.monotonic()
            for running in list(self.running.values())[: self.num_stepping]:
                if running.next_step_s <= now:
                    self.step(running, now)
            if now - self.last_beat_s > 0.2:
                self.last_beat_s = now
                num_queued = max(0, len(self.running) - self.max_running)
                beat = Heartbeat(self.num_steps, len(self.running) - num_queued, num_queued, 0)
                self.channel.send(beat)

    def set_state(self, values: dict) -> str | None:
        """Takes records, as a number of empty ones; nothing else."""
        if set(values) != {"fake_records"}:
            return "no such setting"
        self.info_record = b'{"mode":"static","records":[%s]}' % b",".join(
            [b"{}"] * int(values["fake_records"])
        )
        return None

    def add(self, request: GenerateRequest) -> None:
        match request.sampling.seed:
            case int(seed) if seed == SEED_CRASH:
                os._exit(7)
            case int(seed) if seed == SEED_FAIL:
                raise RuntimeError("told to fail")
            case int(seed) if seed == SEED_HANG:
                time.sleep(3600)
            case int(seed) if seed == SEED_ERROR:
                finish = FinishReason("abort", message="this request alone failed", status_code=500)
                self.channel.send(RequestOutput(request.request_id, [], finish))
                return
        grammar = request.sampling.grammar
        if grammar is not None:
            finish = None
            if "BAD" in grammar.text:
                message = f"{grammar.field}: this is no {grammar.kind}"
                finish = FinishReason("abort", message=message, status_code=400, param=grammar.field)
            self.channel.send(RequestOutput(request.request_id, [], finish))
            if finish is not None:
                return
        self.running[request.request_id] = Running(request, self.tokenizer)

    def abort(self, message: AbortRequest) -> None:
        for request_id in message.request_ids:
            running = self.running.pop(request_id, None)
            if running is not None:
                self.num_aborted += 1
                self.channel.send(running.output([], FinishReason("abort", message=message.message)))

    def step(self, running: Running, now: float) -> None:
        self.num_steps += 1
        output = running.step()
        if output.finish is not None:
            del self.running[running.request.request_id]
        self.channel.send(output)
        seed = running.request.sampling.seed
        running.next_step_s = now + (-seed / 1000 if seed is not None and seed < 0 else 0)


def leave_with_the_api_process() -> None:
    while os.read(0, 1 << 16):  # not sys.stdin: its lock would be held at interpreter shutdown
        pass
    os._exit(0)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=leave_with_the_api_process, daemon=True).start()
    channel = SchedulerChannel(start["requests_address"], start["outputs_address"])
    args = ServerArgs.from_dict(start["args"])
    time.sleep(float(os.environ.get("FAKE_LOAD_SECONDS", "0")))
    try:
        if args.load_format == "dummy":
            raise ValueError("told not to load")
        scheduler = FakeScheduler(args, channel)
        channel.send(scheduler.ready())
        scheduler.loop()
        return 0
    except Exception as error:
        channel.send(SchedulerFailed(f"{type(error).__name__}: {error}"))
        time.sleep(float(os.environ.get("FAKE_LINGER_SECONDS", "0")))
        return 1
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
