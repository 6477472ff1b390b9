"""Every environment variable FlashSpark reads, each once: SGLang's names, for scripts that set them already.

The one exception is where the desktop standard puts caches.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One variable: an unparsable value warns and counts as unset, as upstream."""

    name: str
    default: T
    parse: Callable[[str], T]
    help: str = ""  # for docs/compatibility.md

    def raw(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The text set, also under the older `SGL_` prefix; None if unset or empty."""
        environ = os.environ if environ is None else environ
        legacy = "SGL_" + self.name.removeprefix("SGLANG_")
        return environ.get(self.name) or environ.get(legacy) or None

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The typed value."""
        text = self.raw(environ)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            logger.warning("%s=%r cannot be read; using the default %r", self.name, text, self.default)
            return self.default


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"true", "1", "yes", "y"}:
        return True
    if lowered in {"false", "0", "no", "n"}:
        return False
    raise ValueError(text)


RAGGED_VERIFY_MODE = EnvVar(
    "SGLANG_RAGGED_VERIFY_MODE",
    "static",
    str,  # kept as text: an unknown mode refuses to start rather than warn
    "the mode of verification; `--ragged-verify-mode` wins",
)
HEALTH_CHECK_TIMEOUT_S = EnvVar(
    "SGLANG_HEALTH_CHECK_TIMEOUT",
    20.0,
    float,
    "seconds without progress of the step loop until `/health` is 503",
)
HEALTH_ENDPOINT_GENERATION = EnvVar(
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
    True,
    _parse_bool,
    "0: `/health` says no more than that requests are taken, whatever the step loop does",
)
REQ_WAITING_TIMEOUT_S = EnvVar(
    "SGLANG_REQ_WAITING_TIMEOUT",
    -1.0,
    float,
    "seconds a request may wait for its first row before a 503; -1: any",
)
REQ_RUNNING_TIMEOUT_S = EnvVar(
    "SGLANG_REQ_RUNNING_TIMEOUT", -1.0, float, "seconds a request may run from then on before a 503; -1: any"
)
KEEP_ALIVE_TIMEOUT_S = EnvVar(
    "SGLANG_TIMEOUT_KEEP_ALIVE", 5, int, "seconds a connection is kept after an answer"
)
TORCH_PROFILER_DIR = EnvVar("SGLANG_TORCH_PROFILER_DIR", "", str, "where `/start_profile` writes by default")
XDG_CACHE_HOME = EnvVar("XDG_CACHE_HOME", "", str, "measured cost tables are cached below it")

DSPARK_ENABLE_SPS_RECORD = EnvVar(
    "SGLANG_DSPARK_ENABLE_SPS_RECORD",
    False,
    _parse_bool,
    "keep a record of every decode step for `/server_info`",
)
DSPARK_DEBUG_DUMP = EnvVar(
    "SGLANG_DSPARK_DEBUG_DUMP",
    "",
    str,
    "components of these records: `core`, `step_cpu_time`, `reqs`, or `all`",
)
SIMULATE_ACC_LEN = EnvVar(
    "SGLANG_SIMULATE_ACC_LEN",
    -1.0,
    float,
    "tokens that each step commits, for measuring step times. 1: no draft is ever accepted; more, up to a block, in "
    "static mode alone: drafts are accepted unseen, and the text is nonsense",
)
SIMULATE_ACC_METHOD = EnvVar(
    "SGLANG_SIMULATE_ACC_METHOD", "match-expected", str, "beside it; other methods are refused"
)
GRAMMAR_TIMEOUT_S = EnvVar(
    "SGLANG_GRAMMAR_TIMEOUT",
    60.0,
    float,
    "seconds for a grammar to be compiled in; one that takes longer is a 400",
)
RETURN_ORIGINAL_LOGPROB = EnvVar(
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    False,
    _parse_bool,
    "log-probabilities of output tokens are those before temperature",
)
DSPARK_STS_COLLECT_PATH = EnvVar(
    "SGLANG_DSPARK_STS_COLLECT_PATH",
    "",
    str,
    "a head's logits and what was accepted go to `<stem>.<i>.pt`, for `flashspark.benchmark.dspark_sts_fit`",
)

RECORD_COMPONENTS = ("core", "step_cpu_time", "reqs")
GPU_RECORD_COMPONENTS = ("step_gpu_time", "draft_gpu_time", "target_verify_gpu_time")

# Would change what the server does, and is not built yet: refused at start-up rather than ignored.
UNAVAILABLE: tuple[EnvVar[bool] | EnvVar[int] | EnvVar[str], ...] = (
    EnvVar("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", False, _parse_bool),
    EnvVar("SGLANG_RECORD_STEP_TIME", False, _parse_bool),
    EnvVar("SGLANG_DSPARK_BLOCK_ACCEPT_ESTIMATE_PATH", "", str),
    EnvVar("SGLANG_DSPARK_CONFIDENCE_RELAY_LAG_STEPS", 2, int),
    EnvVar("SGLANG_DSPARK_LOG_SPS_PRED_INTERVAL", 0, int),
)


def record_components(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Which parts of the per-step records are kept, `core` with any of them; empty: none.

    `all` means what there is. A component that is asked for by name and cannot be had is refused: whoever waits for
    its values would find none.

    Raises:
        ValueError: which one, and why.
    """
    wanted = set(DSPARK_DEBUG_DUMP.get(environ).replace(",", " ").split())
    for name in sorted(wanted - {"all", *RECORD_COMPONENTS}):
        reason = f"no such component; there are {', '.join(RECORD_COMPONENTS)} and all"
        if name in GPU_RECORD_COMPONENTS:
            reason = "is read from a GPU's clock and not available on a CPU; step_cpu_time is the host's"
        raise ValueError(f"{DSPARK_DEBUG_DUMP.name}={name}: {reason}")
    if wanted:
        wanted.add("core")
    if "all" in wanted:
        wanted.update(RECORD_COMPONENTS)
    if DSPARK_ENABLE_SPS_RECORD.get(environ):
        wanted.update(("core", "step_cpu_time"))
    return tuple(name for name in RECORD_COMPONENTS if name in wanted)


def simulated_accept_length(environ: Mapping[str, str] | None = None) -> float | None:
    """Tokens that a step commits on average, 1.0 where no draft is to be accepted; None where the target judges.

    Raises:
        ValueError: a simulation that cannot be had, with the reason.
    """
    length, method = SIMULATE_ACC_LEN.get(environ), SIMULATE_ACC_METHOD.get(environ)
    if length <= 0:
        return None
    if not 1.0 <= length < math.inf:
        raise ValueError(
            f"{SIMULATE_ACC_LEN.name}={length:g}: a step commits at least 1 token, and at most a block"
        )
    if method != SIMULATE_ACC_METHOD.default:
        raise ValueError(
            f"{SIMULATE_ACC_METHOD.name}={method} is not available: only {SIMULATE_ACC_METHOD.default} is, in which "
            "every step commits one of the two nearest whole numbers; others draw lengths around the mean"
        )
    return length


def unavailable_settings(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names of variables that are set to something this version cannot do."""
    return [variable.name for variable in UNAVAILABLE if variable.get(environ) != variable.default]
