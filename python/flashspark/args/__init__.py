"""Every flag of the server: the typed arguments, the command line, the log settings they name."""

from .command_line import parse_args
from .logs import configure_logging
from .server_args import ArgumentError, ServerArgs

__all__ = ["ArgumentError", "ServerArgs", "configure_logging", "parse_args"]
