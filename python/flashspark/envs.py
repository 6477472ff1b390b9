"""Every environment variable FlashSpark reads, each once: SGLang's names, for scripts that set them already.

The one exception is where the desktop standard puts caches.
"""

from __future__ import annotations

import logging
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


# Also --ragged-verify-mode, which wins. Kept as text: an unknown mode refuses to start rather than warn.
RAGGED_VERIFY_MODE = EnvVar("SGLANG_RAGGED_VERIFY_MODE", "static", str)
# /health turns 503 when the step loop has shown no progress for so long; shown in /server_info.
HEALTH_CHECK_TIMEOUT_S = EnvVar("SGLANG_HEALTH_CHECK_TIMEOUT", 20.0, float)
# Seconds an idle connection is kept; shown in /server_info.
KEEP_ALIVE_TIMEOUT_S = EnvVar("SGLANG_TIMEOUT_KEEP_ALIVE", 5, int)
# Measured cost tables are cached below it.
XDG_CACHE_HOME = EnvVar("XDG_CACHE_HOME", "", str)

# Would change what the server does, and is not built yet: refused at start-up rather than ignored.
UNAVAILABLE: tuple[EnvVar[float] | EnvVar[bool], ...] = (
    EnvVar("SGLANG_SIMULATE_ACC_LEN", -1.0, float),
    EnvVar("SGLANG_REQ_WAITING_TIMEOUT", -1.0, float),
    EnvVar("SGLANG_REQ_RUNNING_TIMEOUT", -1.0, float),
    EnvVar("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", False, _parse_bool),
)


def unavailable_settings(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names of variables that are set to something this version cannot do."""
    return [variable.name for variable in UNAVAILABLE if variable.get(environ) != variable.default]
