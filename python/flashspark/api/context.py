"""What every route needs: arguments, tokenizer, engine, limits, and whether the server takes requests."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
from starlette.requests import Request

from flashspark import envs
from flashspark.args import ArgumentError, ServerArgs
from flashspark.ipc import SchedulerReady, SpeculationMode
from flashspark.text import ChatTemplateError, TextTokenizer, TokenizerLoadError

from .engine_client import EngineClient
from .errors import RequestError, unavailable
from .generation import Generation
from .metrics import RequestMetrics
from .protocol import NativeSampling, SpeculationOptions
from .sampling import Limits, chat_defaults, speculation
from .wire import BodyTooLarge, read_body

logger = logging.getLogger("flashspark.api")

Status = Literal["starting", "ready", "draining", "failed"]
_LOGGED_CHARS = 2048


class StartupError(Exception):
    """The server cannot start; the message says why and what to do."""


def load_tokenizer(args: ServerArgs) -> TextTokenizer:
    """The tokenizer that the flags name."""
    try:
        return TextTokenizer.load(args.tokenizer_path or args.model_path, args.chat_template)
    except (TokenizerLoadError, ChatTemplateError) as error:
        raise StartupError(str(error)) from error


class ServerContext:
    """One per server. `status` is set by whoever runs the process."""

    def __init__(
        self, args: ServerArgs, tokenizer: TextTokenizer, engine: EngineClient, command: str
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.engine = engine
        self.launch_command = command
        self.status: Status = "starting"
        self.paused = False  # by /pause_generation
        self.started = time.time()
        self.startup_seconds: float | None = None
        self.limits = Limits.of(engine.ready, args.allow_auto_truncate)
        self.model_config = _read_json_object(Path(args.model_path) / "config.json")
        self.chat_defaults = self._chat_defaults()
        self.native_defaults = self._native_defaults()
        self.metrics = RequestMetrics(args.served_model_name or "") if args.enable_metrics else None
        self.health_asks_engine = envs.HEALTH_ENDPOINT_GENERATION.get()
        self.health_timeout_s = envs.HEALTH_CHECK_TIMEOUT_S.get()

    @property
    def ready(self) -> SchedulerReady:
        """The engine's limits and resolved values."""
        return self.engine.ready

    def speculation(self, options: SpeculationOptions | None) -> tuple[SpeculationMode, int | None]:
        """What a body asks of the draft, checked against what this server can do."""
        return speculation(options, self.args, self.ready.info.get("speculative_num_draft_tokens"))

    @property
    def failed(self) -> bool:
        """Whether the engine is down, noticed by whoever runs the process or not yet."""
        return self.status == "failed" or self.engine.failure is not None

    @property
    def serving(self) -> bool:
        """Whether requests are taken."""
        return self.status == "ready" and not self.failed

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and the step loop is alive."""
        alive = self.engine.heartbeat_age_s < self.health_timeout_s
        return self.serving and (alive or not self.health_asks_engine)

    def _chat_defaults(self) -> dict[str, Any]:
        if self.args.sampling_defaults == "openai":
            return {}
        path = Path(self.args.model_path) / "generation_config.json"
        try:
            return chat_defaults(_read_json_object(path))
        except RequestError as error:
            raise StartupError(
                f"{path.parent}/{error.message}; --sampling-defaults openai ignores it"
            ) from None

    def _native_defaults(self) -> dict[str, Any]:
        defaults = json.loads(self.args.preferred_sampling_params or "{}")
        try:
            NativeSampling.parse(defaults)
        except RequestError as error:
            raise ArgumentError("--preferred-sampling-params", None, error.message) from None
        return defaults

    async def read_json(self, request: Request, content_type: bool = False, empty: Any = None) -> Any:
        """The parsed body, `empty` (if not None) where there is none; every way in which it is not JSON is a 400."""
        _check_rank(request)
        declared = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type and declared != "application/json":
            raise RequestError(
                f"content-type must be application/json, not {declared[:80]!r}",
                param="content-type",
                schema=True,
            )
        try:
            body = await read_body(request, self.args.max_body_bytes)
        except BodyTooLarge as error:
            raise RequestError(str(error), status=413) from None
        if not body and empty is not None:
            return empty
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the request body is not valid JSON: {error}", schema=True) from None

    def check_serving(self) -> None:
        """Refuses new work while starting, draining or failed."""
        if self.status == "draining":
            raise unavailable("the server is shutting down", retry_after_s=5)
        if self.failed:
            raise unavailable(f"the engine is down: {self.engine.failure}", retry_after_s=5)

    def start(self, generation: Generation, client_id: str | None = None) -> None:
        """Submits a call's requests unless the queue is full."""
        self.check_serving()
        self._check_queue(len(generation.choices))
        generation.metrics = self.metrics
        generation.start(self.engine)
        if self.args.log_requests:
            self._log(generation, client_id)

    def _check_queue(self, num_new: int) -> None:
        limit = self.args.max_queued_requests
        if limit is None:
            return
        free = self.ready.max_running_requests + limit - self.engine.num_in_flight
        if num_new > free or self.engine.heartbeat.num_queue_reqs >= limit:
            raise unavailable(f"the queue is full (--max-queued-requests {limit})")

    def _log(self, generation: Generation, client_id: str | None) -> None:
        level = self.args.log_requests_level
        for prompt in generation.prompts:
            line = f"Receive: rid={prompt.request_id!r} x-request-id={client_id!r} n={prompt.n} "
            line += f"#prompt-token={len(prompt.input_ids)} speculation={generation.speculation_report}"
            if level >= 1:
                line += f" sampling={prompt.sampling}"
            if level >= 2:
                text = (
                    prompt.text if prompt.text is not None else self.tokenizer.decode(prompt.input_ids, False)
                )
                line += f" text={text if level >= 3 else text[:_LOGGED_CHARS]!r}"
            logger.info("%s", line)


def _check_rank(request: Request) -> None:
    """There is one data-parallel rank, 0; the header beats what a body says."""
    rank = request.headers.get("x-data-parallel-rank")
    if rank not in (None, "0"):
        message = f"X-Data-Parallel-Rank: there is rank 0 only, not {rank[:40]!r}"
        raise RequestError(message, param="X-Data-Parallel-Rank")


def _read_json_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # the engine judges model folders; the API only reports what is there
    return value if isinstance(value, dict) else {}
