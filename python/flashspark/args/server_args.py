"""Every flag of the server, once: typed, validated, resolved, and sent to the scheduler process as JSON.

`command_line.py` turns a command line into a `ServerArgs`. Each field's metadata says how its flag is spelled and what
is allowed; a flag of SGLang that this version cannot honour is accepted only at its neutral value.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from flashspark import envs

LoadFormat = Literal["auto", "safetensors", "dummy"]
SpeculativeAlgorithm = Literal["DFLASH", "DSPARK"]
VERIFY_MODES = ("static", "cap-accept", "compact")
DEFAULT_RUNNING_WITH_DRAFT = 48  # as SGLang
DEFAULT_RUNNING_WITHOUT_DRAFT = 64
MAX_SEED = 2**30
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_NOT_YET = "not available yet"


class ArgumentError(ValueError):
    """A flag's value cannot be honoured; the message names flag, value and remedy."""

    def __init__(self, flag: str, value: object, remedy: str) -> None:
        super().__init__(f"{flag} {value}: {remedy}" if value is not None else f"{flag}: {remedy}")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How one field appears on the command line."""

    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    size: bool = False  # human-readable sizes: 32k, 32Ki
    minimum: float | None = None
    maximum: float | None = None
    neutral: tuple[Any, ...] | None = None  # the only values accepted
    remedy: str = _NOT_YET
    hint: str | None = None  # accepted with this warning: cannot change an answer, and has no effect yet


def flag(default: Any, help: str, secret: bool = False, **options: Any) -> Any:
    """A field with its flag; a secret stays out of the arguments' representation."""
    return field(default=default, repr=not secret, metadata={"flag": Flag(help=help, **options)})


def neutral(default: Any, *others: Any, help: str, remedy: str = _NOT_YET, **options: Any) -> Any:
    """A flag accepted at its default (and `others`) only."""
    return flag(default, help, neutral=(default, *others), remedy=remedy, **options)


def _attention(default: str | None, help: str) -> Any:
    """Of one part of the work, or of all."""
    remedy = "use torch_native or, on a GPU, triton (flashinfer: prefill alone); fa3 is not available yet"
    return flag(default, help, choices=("auto", "torch_native", "triton", "flashinfer"), remedy=remedy)


_GRAPHS = "has no effect: one rule says which shapes are captured (docs/architecture.md)"


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Resolved on construction: demo names become paths, defaults that depend on other flags are filled in."""

    # Model and tokenizer
    model_path: str = flag("", "model folder, or `demo`", aliases=("--model",))
    tokenizer_path: str | None = flag(None, "tokenizer folder (default: the model's)")
    tokenizer_mode: str = neutral(
        "auto", "slow", help="accepted for compatibility; one tokenizer serves both"
    )
    skip_tokenizer_init: bool = neutral(False, help="ids in, ids out")
    load_format: str = flag(
        "auto", "weights: safetensors, or dummy (random)", choices=("auto", "safetensors", "dummy")
    )
    trust_remote_code: bool = flag(
        False, "accepted for scripts", hint="has no effect: code in model folders is never executed"
    )
    revision: str | None = flag(None, "accepted for scripts", hint="has no effect: model folders are local")
    json_model_override_args: str = flag("{}", "JSON object that overrides keys of config.json")
    dtype: str = flag(
        "auto",
        "auto: float32 on a CPU, on a GPU what config.json says",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    quantization: str | None = neutral(None, help="weight quantisation")
    kv_cache_dtype: str = neutral("auto", help="KV cache type")
    context_length: int | None = flag(
        None, "tokens of prompt + output (default: model)", size=True, minimum=2
    )
    served_model_name: str | None = flag(None, "name in /v1/models (default: the model path)")
    chat_template: str | None = flag(None, "Jinja file or text that replaces the model's chat template")

    # HTTP
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "port to listen on", minimum=0, maximum=65535)
    api_key: str | None = flag(None, "bearer key of the normal routes", secret=True)
    admin_api_key: str | None = flag(None, "bearer key of the management routes", secret=True)
    max_body_bytes: int = flag(8 << 20, "largest request body", size=True, minimum=1024)
    max_queued_requests: int | None = flag(None, "beyond it new requests get 503", minimum=1)
    stream_interval: int = flag(1, "tokens between stream frames", minimum=1)
    incremental_streaming_output: bool = flag(False, "/generate streams deltas, not the text so far")
    stream_response_default_include_usage: bool = flag(False, "usage frame in every OpenAI stream")
    enable_cache_report: bool = flag(False, "usage.prompt_tokens_details.cached_tokens")
    allow_auto_truncate: bool = flag(False, "shorten over-long prompts and outputs instead of refusing them")
    sampling_defaults: str = flag("model", "where chat defaults come from", choices=("openai", "model"))
    preferred_sampling_params: str | None = flag(None, "JSON object: defaults of /generate")
    weight_version: str = flag("default", "echoed in meta_info")
    reasoning_parser: str | None = flag(
        None, "how chat answers show reasoning", choices=("deepseek-r1", "qwen3", "qwen3-thinking")
    )
    tool_call_parser: str | None = flag(
        None, "how chat answers call tools", choices=("hermes", "qwen", "qwen25", "qwen3_coder")
    )
    grammar_backend: str | None = flag(
        None,
        "structured output: xgrammar (default), or none",
        choices=("xgrammar", "none"),
        remedy="use xgrammar; outlines and llguidance are not available",
    )

    # Life cycle and logs
    log_level: str = flag("info", "log level", choices=_LOG_LEVELS)
    log_level_http: str | None = flag(None, "log level of HTTP access lines", choices=_LOG_LEVELS)
    log_requests: bool = flag(False, "log every request")
    log_requests_level: int = flag(
        2, "0 ids and counts, 1 + sampling, 2 + start of text, 3 + text", maximum=3
    )
    decode_log_interval: int = flag(40, "decode steps per log line", minimum=1)
    skip_server_warmup: bool = flag(
        False, "no internal request before ready, and on a GPU no trial of kernels"
    )
    watchdog_timeout: float = flag(300.0, "seconds a step may take before the server ends", minimum=1)
    shutdown_timeout: float = flag(30.0, "seconds running requests get to finish after SIGTERM", minimum=0)
    enable_metrics: bool = flag(False, "Prometheus metrics at /metrics")

    # Scheduler and memory
    max_running_requests: int | None = flag(
        None, "concurrent requests (48 with a draft)", minimum=1, maximum=2**16
    )
    max_total_tokens: int | None = flag(None, "KV capacity in tokens", size=True, minimum=1, maximum=2**40)
    chunked_prefill_size: int | None = flag(None, "prefill tokens per chunk, -1: no chunks", size=True)
    max_prefill_tokens: int = flag(16384, "prefill tokens per step", size=True, minimum=1)
    page_size: int = flag(16, "KV tokens per page", minimum=1, maximum=2**16)
    random_seed: int | None = flag(
        None, "seed of requests without one (default: random)", minimum=0, maximum=MAX_SEED
    )
    schedule_policy: str = neutral("fcfs", help="order of the queue")
    schedule_conservativeness: float = flag(
        1.0, "accepted for scripts", hint="has no effect: admission goes by free pages, with retraction"
    )
    mem_fraction_static: float | None = flag(
        None,
        "on a GPU, share of its memory for weights and KV (default 0.88); --max-total-tokens wins",
        minimum=0.01,
        maximum=0.99,
    )
    disable_radix_cache: bool = flag(False, "no prefix cache: every prompt is computed")
    disable_overlap_schedule: bool = flag(False, "each step's tokens are handled before the next step starts")
    enable_overlap_schedule: bool = flag(False, "on a CPU too, where there is nothing to gain but tests")
    enable_deterministic_inference: bool = flag(
        False, "per-request seeds (always honoured); step times correct no cost table"
    )
    min_free_slots_delay: int | None = neutral(None, 1, help="prefill batching")

    # Device
    device: str = flag("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    base_gpu_id: int = neutral(0, help="first GPU", remedy="choose one with CUDA_VISIBLE_DEVICES")
    torch_threads: int | None = flag(None, "CPU threads of the engine (default: cores - 1)", minimum=1)
    attention_backend: str = _attention("auto", "attention kernels; auto: triton on a GPU, else torch_native")
    prefill_attention_backend: str | None = _attention(
        None, "attention kernels of prefill (default: --attention-backend)"
    )
    decode_attention_backend: str | None = _attention(
        None, "attention kernels of verify steps (default: --attention-backend)"
    )
    sampling_backend: str | None = neutral(None, "pytorch", help="sampling kernels")
    tp_size: int = neutral(1, help="tensor parallel ranks", aliases=("--tensor-parallel-size",))
    dp_size: int = neutral(
        1,
        help="data parallel servers",
        remedy="start several servers behind sglang-router (docs/scale-out.md)",
        aliases=("--data-parallel-size",),
    )
    pp_size: int = neutral(1, help="pipeline stages", aliases=("--pipeline-parallel-size",))
    nnodes: int = neutral(
        1, help="machines", remedy="start several servers behind sglang-router (docs/scale-out.md)"
    )
    disable_cuda_graph: bool = flag(False, "steps on a GPU are launched kernel by kernel, in the same shapes")
    disable_cuda_graph_padding: bool = flag(False, "accepted for scripts", hint=_GRAPHS)
    cuda_graph_max_bs_decode: int | None = flag(
        None,
        "on a GPU, requests of the largest step that is captured (default: --max-running-requests)",
        aliases=("--cuda-graph-max-bs",),
        minimum=1,
    )
    cuda_graph_bs_decode: tuple[int, ...] | None = flag(
        None, "graph sizes", aliases=("--cuda-graph-bs",), hint=_GRAPHS
    )
    cuda_graph_max_bs_prefill: int | None = flag(None, "no prefill graphs", hint=_GRAPHS)
    cuda_graph_bs_prefill: tuple[int, ...] | None = flag(None, "no prefill graphs", hint=_GRAPHS)
    cuda_graph_config: str | None = flag(None, "JSON", hint=_GRAPHS)

    # Speculation
    speculative_algorithm: str | None = flag(
        None, "DFLASH or DSPARK", choices=("DFLASH", "DSPARK"), remedy="use DFLASH or DSPARK"
    )
    speculative_draft_model_path: str | None = flag(
        None, "draft folder, or `demo-dflash2`", aliases=("--speculative-draft-model",)
    )
    speculative_num_draft_tokens: int | None = flag(
        None, "verify width (default: the draft's block)", minimum=2
    )
    speculative_dflash_block_size: int | None = flag(None, "the same, DFLASH's name", minimum=2)
    speculative_dspark_block_size: int | None = flag(
        None, "DSPARK: tokens per block, the verify width less one", minimum=1
    )
    speculative_draft_window_size: int | None = neutral(
        None,
        help="context tokens the draft attends to",
        remedy="the draft attends to all of the context",
        aliases=("--speculative-dflash-draft-window-size",),
    )
    ragged_verify_mode: str | None = flag(
        None,
        "verification mode (also SGLANG_RAGGED_VERIFY_MODE)",
        choices=VERIFY_MODES,
    )
    speculative_cost_table: str = flag(
        "measured",
        "where step costs come from without a table file: measured at start-up, or none (verify everything)",
        choices=("measured", "none"),
    )
    disable_cost_table_correction: bool = flag(False, "step times of serving do not correct the cost table")
    speculative_min_drafts_every: int = flag(
        0, "a request verifies a draft at least every N drafted steps, 0: no such floor", minimum=0
    )
    speculative_verify_tier_tokens: int = flag(
        8, "rows between two verify tiers while steps are small", minimum=1
    )
    speculative_num_steps: int | None = neutral(
        None, 1, help="always 1", remedy="a block is drafted in one step: 1"
    )
    speculative_eagle_topk: int | None = neutral(None, 1, help="always 1", remedy="a block is one chain: 1")
    speculative_draft_model_revision: str | None = flag(
        None, "accepted for scripts", hint="has no effect: model folders are local"
    )
    speculative_draft_load_format: str | None = flag(
        None, "weights of the draft (default: --load-format)", choices=("auto", "safetensors", "dummy")
    )
    speculative_draft_model_quantization: str | None = neutral(None, help="draft quantisation")
    speculative_draft_attention_backend: str | None = _attention(
        None, "attention kernels of the draft (default: those of verify steps)"
    )
    speculative_draft_kv_cache_dtype: str | None = neutral(None, "auto", help="draft KV type")
    speculative_attention_mode: str = neutral("prefill", help="attention of the verify step")
    speculative_dspark_sps_table_path: str | None = flag(
        None, "cost table, JSON of either kind (default: --speculative-cost-table)"
    )
    speculative_dspark_confidence_sts_path: str | None = flag(
        None, "calibration of a draft's confidence head, JSON (default: none)"
    )
    speculative_dspark_align_verify_tokens_to_graph_tier: bool = flag(
        False,
        "accepted for scripts",
        hint="has no effect: what a verify tier holds is always used for drafts",
    )
    speculative_accept_threshold_single: float = neutral(1.0, help="1: lossless", remedy="only 1.0 is exact")
    speculative_accept_threshold_acc: float = neutral(1.0, help="1: lossless", remedy="only 1.0 is exact")
    speculative_use_rejection_sampling: bool = flag(False, "exact rejection sampling (always on)")
    speculative_use_block_verification: bool = neutral(False, help="block verification")

    def __post_init__(self) -> None:
        self._check_fields()
        self._set("served_model_name", self.served_model_name or self.model_path)
        self._set("model_path", resolve_model_path(self.model_path))
        if self.tokenizer_path is not None:
            self._set("tokenizer_path", resolve_model_path(self.tokenizer_path))
        else:
            self._set("tokenizer_path", self.model_path)
        self._resolve_speculation()
        if self.random_seed is None:
            self._set("random_seed", random.SystemRandom().randrange(MAX_SEED + 1))
        if self.max_running_requests is None:
            with_draft = self.speculative_algorithm is not None
            default = DEFAULT_RUNNING_WITH_DRAFT if with_draft else DEFAULT_RUNNING_WITHOUT_DRAFT
            self._set("max_running_requests", default)
        for name in ("json_model_override_args", "preferred_sampling_params", "cuda_graph_config"):
            _check_json_object(flag_name(name), getattr(self, name))
        if self.enable_overlap_schedule and self.disable_overlap_schedule:
            remedy = "contradicts --disable-overlap-schedule: give one"
            raise ArgumentError("--enable-overlap-schedule", None, remedy)
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk != -1 and chunk < 1:
            raise ArgumentError("--chunked-prefill-size", chunk, "use -1 or a number above 0")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_fields(self) -> None:
        if not self.model_path:
            raise ArgumentError("--model-path", None, "is required: a model folder, or `demo`")
        for name, spec in flags().items():
            value = getattr(self, name)
            if value is not None:
                _check_value(flag_name(name), value, spec)
            elif spec.neutral is not None and None not in spec.neutral:
                raise ArgumentError(flag_name(name), value, "must have a value")

    def _resolve_speculation(self) -> None:
        algorithm, draft = self.speculative_algorithm, self.speculative_draft_model_path
        if (
            algorithm == "DSPARK"
            and draft is None
            and (Path(self.model_path) / "dspark/config.json").is_file()
        ):
            draft = str(Path(self.model_path) / "dspark")
        if algorithm is not None and draft is None:
            remedy = "needs a draft: add --speculative-draft-model-path"
            raise ArgumentError("--speculative-algorithm", algorithm, remedy)
        if draft is not None and algorithm is None:
            remedy = "is used by an algorithm only: add --speculative-algorithm DFLASH or DSPARK"
            raise ArgumentError("--speculative-draft-model-path", draft, remedy)
        if draft is not None:
            self._set("speculative_draft_model_path", resolve_model_path(draft))
        self._check_widths()
        if self.ragged_verify_mode is None:
            mode = envs.RAGGED_VERIFY_MODE.get()
            _check_value(f"{envs.RAGGED_VERIFY_MODE.name} =", mode, flags()["ragged_verify_mode"])
            self._set("ragged_verify_mode", mode)

    def _check_widths(self) -> None:
        """One width, whatever it is called."""
        rows, of_dspark = "--speculative-num-draft-tokens", "--speculative-dspark-block-size"
        owners = {rows: None, "--speculative-dflash-block-size": "DFLASH", of_dspark: "DSPARK"}
        values = [getattr(self, name.removeprefix("--").replace("-", "_")) for name in owners]
        given = {name: value for name, value in zip(owners, values, strict=True) if value is not None}
        for name, value in given.items():
            owner = owners[name]
            if self.speculative_algorithm is None:
                remedy = (
                    f"is used by an algorithm only: add --speculative-algorithm {owner or 'DFLASH or DSPARK'}"
                )
                raise ArgumentError(name, value, remedy)
            if owner not in (None, self.speculative_algorithm):
                remedy = f"belongs to {owner}: give {rows}, which --speculative-algorithm "
                raise ArgumentError(name, value, f"{remedy}{self.speculative_algorithm} reads too")
        if len({value + (name == of_dspark) for name, value in given.items()}) > 1:
            both = ", ".join(f"{name} {value}" for name, value in given.items())
            remedy = "are two names of one width: give one, or equal values"
            if of_dspark in given:
                remedy = f"contradict each other: {rows} is {of_dspark} + 1; give one"
            raise ArgumentError(both, None, remedy)

    @property
    def draft_block_size(self) -> int | None:
        """The block that the flags ask for, as the draft's config.json counts it: the verify width of DFLASH, one
        less of DSPARK. None: the trained one."""
        if self.speculative_algorithm != "DSPARK":
            return self.speculative_num_draft_tokens or self.speculative_dflash_block_size
        if self.speculative_num_draft_tokens is not None:
            return self.speculative_num_draft_tokens - 1
        return self.speculative_dspark_block_size

    @property
    def speculative(self) -> bool:
        """Whether the server has a draft."""
        return self.speculative_algorithm is not None

    @property
    def model_overrides(self) -> dict[str, Any]:
        """`--json-model-override-args`, parsed."""
        return json.loads(self.json_model_override_args)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, keys included: not for display."""
        return msgspec.to_builtins(self)

    def to_json(self) -> str:
        """For the scheduler process."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> ServerArgs:
        """What `to_json` wrote."""
        return msgspec.json.decode(text, type=cls)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ServerArgs:
        """What `to_dict` gave, or a part of it."""
        return msgspec.convert(values, type=cls)

    def warnings(self) -> list[str]:
        """One line per flag that was given and has no effect."""
        return [
            f"{flag_name(item.name)} {spec.hint}"
            for item in dataclasses.fields(self)
            if (spec := item.metadata["flag"]).hint and getattr(self, item.name) != item.default
        ]


def flags() -> dict[str, Flag]:
    """Each field's flag, by field name."""
    return {item.name: item.metadata["flag"] for item in dataclasses.fields(ServerArgs)}


def flag_name(field_name: str) -> str:
    """`model_path` → `--model-path`."""
    return "--" + field_name.replace("_", "-")


def _check_value(name: str, value: Any, spec: Flag) -> None:
    if spec.choices is not None and value not in spec.choices:
        known = f"use one of {', '.join(spec.choices)}"
        raise ArgumentError(name, value, known if spec.remedy == _NOT_YET else spec.remedy)
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(name, value, "must be a finite number")
    if spec.minimum is not None and value < spec.minimum:
        raise ArgumentError(name, value, f"must be at least {_number(spec.minimum)}")
    if spec.maximum is not None and value > spec.maximum:
        raise ArgumentError(name, value, f"must be at most {_number(spec.maximum)}")
    if spec.neutral is not None and value not in spec.neutral:
        accepted = " or ".join(str(item) for item in spec.neutral if item is not None and item is not False)
        only = f" (accepted: {accepted})" if accepted else " (leave it out)"
        raise ArgumentError(name, None if value is True else value, spec.remedy + only)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_json_object(name: str, text: str | None) -> None:
    if text is None:
        return
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentError(name, text, f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ArgumentError(name, text, "must be a JSON object")


def resolve_model_path(path: str) -> str:
    """A shipped model's name becomes its folder (`./demo` is a folder of that name); anything else stays."""
    from flashspark import demo

    shipped = getattr(demo, "DEMO_MODELS", {}).get(path)
    return path if shipped is None else str(shipped)
