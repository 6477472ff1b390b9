"""Log lines in SGLang's format, which scripts parse."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str, prefix: str = "") -> None:
    """Sends the process's log to stderr as `[date time prefix] text`; `prefix` is e.g. ` TP0`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[%(asctime)s{prefix}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
