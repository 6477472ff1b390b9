"""Reading config.json: what is wrong with it is said with file, key and remedy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashspark.layers.rotary import RopeConfig, yarn_attention_factor


class ModelFormatError(ValueError):
    """A model folder that cannot be served as it is: the message names the file, the key or tensor, and what to do."""


class ConfigReader:
    """Typed look-ups in one or several merged levels of a config.json; remembers which keys were read."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        self.known: set[str] = set()

    def error(self, key: str, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {key}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is missing or null."""
        self.known.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "missing; expected an integer")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"{value!r} is not an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None, positive: bool = True) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "missing; expected a number")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or (positive and not value > 0):
            raise self.error(key, f"{value!r} is not a {'positive ' if positive else ''}number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is neither true nor false")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(v, int) or isinstance(v, bool) for v in value):
            raise self.error(key, f"{value!r} is not a list of integers")
        return tuple(value)

    def strings(self, key: str) -> tuple[str, ...] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(v, str) for v in value):
            raise self.error(key, f"{value!r} is not a list of strings")
        return tuple(value)

    def unknown(self, ignored: Iterable[str]) -> list[str]:
        """Keys nobody has asked for and that are not in `ignored`."""
        return sorted(set(self.values) - self.known - set(ignored))


def read_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """config.json of a model folder: `(its path, its contents)`."""
    if not folder.exists():
        raise ModelFormatError(f"{folder}: no such folder; give the path of a model in Hugging Face layout")
    if not folder.is_dir():
        raise ModelFormatError(f"{folder}: is a file; give the folder that holds config.json and the weights")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelFormatError(f"{path}: missing; a model folder in Hugging Face layout has one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path}: not valid JSON ({error}); was it written completely?") from error
    if not isinstance(values, dict):
        raise ModelFormatError(f"{path}: holds a {type(values).__name__}; expected a JSON object")
    return path, values


def architecture(path: Path, values: dict[str, Any]) -> str:
    """The one name in `architectures`."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelFormatError(f"{path}: architectures: {names!r}; expected a list with one name")
    return names[0]


def rope_config(reader: ConfigReader, max_position_embeddings: int) -> RopeConfig:
    """Rope of a configuration; nested `rope_parameters` wins over flat `rope_theta` and `rope_scaling`."""
    theta = reader.get("rope_theta")
    flat, nested = reader.get("rope_scaling", {}), reader.get("rope_parameters", {})
    for key, value in (("rope_scaling", flat), ("rope_parameters", nested)):
        if not isinstance(value, dict):
            raise reader.error(key, f"{value!r} is not an object")
    where = "rope_parameters" if nested else "rope_scaling"
    rope = ConfigReader(reader.path, {"rope_theta": theta, **(nested or flat)})
    if rope.values["rope_theta"] is None:
        rope.values["rope_theta"] = theta
    rope.values = {f"{where}.{key}": value for key, value in rope.values.items()}
    rope_type = rope.get(f"{where}.rope_type", rope.get(f"{where}.type", "default"))
    rope_theta = rope.number(f"{where}.rope_theta", 10000.0)
    if rope.number(f"{where}.partial_rotary_factor", 1.0) != 1.0:
        raise rope.error(f"{where}.partial_rotary_factor", "only 1.0 is supported: rope over the whole head")
    if rope_type == "default":
        return RopeConfig(theta=rope_theta)
    if rope_type == "linear":
        return RopeConfig(theta=rope_theta, rope_type="linear", factor=rope.number(f"{where}.factor"))
    if rope_type != "yarn":
        raise rope.error(
            f"{where}.rope_type", f"{rope_type!r} is not supported; default, linear and yarn are"
        )
    original = rope.integer(f"{where}.original_max_position_embeddings", max_position_embeddings)
    factor = rope.number(f"{where}.factor", max_position_embeddings / original)
    scales = [rope.number(f"{where}.{key}", 0.0, positive=False) for key in ("mscale", "mscale_all_dim")]
    return RopeConfig(
        theta=rope_theta,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number(f"{where}.beta_fast", 32.0),
        beta_slow=rope.number(f"{where}.beta_slow", 1.0),
        attention_factor=rope.number(f"{where}.attention_factor", yarn_attention_factor(factor, *scales)),
        truncate=rope.boolean(f"{where}.truncate", True),
    )
