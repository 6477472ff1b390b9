"""A command line, in SGLang's spelling, into `ServerArgs`."""

from __future__ import annotations

import argparse
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from flashspark.args.server_args import ArgumentError, Flag, ServerArgs, flag_name, flags

_SIZE_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE_UNITS_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_size(text: str) -> int:
    """`32k` = 32000 and `1.5M` in decimal units, `32Ki` = 32768 in binary ones (whole numbers only)."""
    match = re.fullmatch(r"(-?\d+)(\.\d+)?(|[kMGT]|[KMGT]i)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use for example 4096, 32k or 32Ki")
    whole, fraction, unit = match.groups()
    if unit in _SIZE_UNITS_BINARY:
        if fraction:
            raise argparse.ArgumentTypeError(f"{text!r}: {unit} takes whole numbers only")
        return int(whole) * _SIZE_UNITS_BINARY[unit]
    if not fraction:
        return int(whole) * _SIZE_UNITS[unit]
    exact = int(whole + fraction[1:]) * _SIZE_UNITS[unit]
    scale = 10 ** len(fraction[1:])
    if exact % scale:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return exact // scale


class _Parser(argparse.ArgumentParser):
    """Errors name flag and remedy; a usage line of a hundred flags above them would hide that."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"usage: {self.usage}\n{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """One option per field of `ServerArgs`, abbreviations on."""
    prog = "flashspark.launch_server"
    parser = _Parser(prog=prog, usage=f"python -m {prog} --model-path MODEL [flags] (--help lists them)")
    parser.add_argument("--config", metavar="FILE.yaml", help="flags from a YAML file; the command line wins")
    hints = typing.get_type_hints(ServerArgs)
    for name, spec in flags().items():
        options = [flag_name(name), *spec.aliases]
        parser.add_argument(*options, dest=name, default=argparse.SUPPRESS, **_option(hints[name], spec))
    return parser


def _option(hint: Any, spec: Flag) -> dict[str, Any]:
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    kinds.discard(type(None))
    (kind,) = kinds
    text = spec.help.replace("%", "%%")
    if kind is bool:
        return {"action": "store_true", "help": text}
    if typing.get_origin(kind) is tuple:
        return {"type": int, "nargs": "+", "help": text}
    convert: Callable[[str], Any] = parse_size if spec.size else kind
    return {"type": convert, "metavar": kind.__name__.upper(), "help": text}


def _config_file_argv(path: str) -> list[str]:
    """The flags of a YAML file as if they stood first on the command line."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ArgumentError("--config", path, f"cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ArgumentError("--config", path, "must map flag names to values")
    argv: list[str] = []
    for key, value in values.items():
        name = "--" + str(key).lstrip("-").replace("_", "-")
        if "--config".startswith(name):
            raise ArgumentError("--config", path, f"has a key {key!r}: a file cannot name another one")
        if value is True:
            argv.append(name)
        elif isinstance(value, list):
            argv += [name, *map(str, value)]
        elif isinstance(value, dict):  # of a flag that takes JSON
            argv.append(f"{name}={json.dumps(value)}")
        elif value is False:
            build_parser().parse_args([name])  # a switch, or the message says what is wrong with it
        elif value is not None:
            argv.append(f"{name}={value}")
    return argv


def parse_args(argv: Sequence[str]) -> ServerArgs:
    """Exits with code 2 and a message that names flag, value and remedy where a flag cannot be honoured."""
    parser = build_parser()
    file = parser.parse_args(argv).config
    try:
        from_file = _config_file_argv(file) if file is not None else []
        values = vars(parser.parse_args([*from_file, *argv]))
        values.pop("config")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        if not values.get("model_path"):
            raise ArgumentError("--model-path", None, "is required: a model folder, or `demo`")
        return ServerArgs(**values)
    except ArgumentError as error:
        parser.error(str(error))
