"""Reading safetensors into a model's fused weights, tensor by tensor, and saying all that does not fit at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from flashspark.layers.parameters import NamedParameters, Parameter
from flashspark.models.config_file import ModelFormatError

Progress = Callable[[int, int], None]  # tensors loaded so far, of how many

INDEX_FILE = "model.safetensors.index.json"
MAX_NAMED = 20  # tensors of one kind that an error message lists


def collect(parameters: NamedParameters) -> dict[str, Parameter]:
    """Parameters by name; the views of one that occurs several times are put together."""
    by_name: dict[str, Parameter] = {}
    for name, parameter in parameters:
        known = by_name.get(name)
        if known is not None:
            assert known.shape == parameter.shape, name
            parameter = Parameter(parameter.shape, known.views + parameter.views)
        by_name[name] = parameter
    return by_name


def load_weights(
    folder: Path,
    parameters: dict[str, Parameter],
    *,
    rename: Callable[[str], str] = lambda name: name,
    skip: Callable[[str], bool] = lambda name: False,
    on_progress: Progress | None = None,
) -> set[torch.dtype]:
    """Fills `parameters` from the safetensors files in `folder`; returns the dtypes that were in them.

    `rename` maps a file's tensor name to ours, `skip` says which of our names are of no use. At any moment one
    tensor is held besides the model. ModelFormatError names every tensor that is missing, unexpected or of
    another shape, before a weight is touched.
    """
    located = _locate(folder, rename, skip)
    _check(folder, parameters, located)
    done = 0
    dtypes: set[torch.dtype] = set()
    for file in sorted({file for file, _, _ in located.values()}):
        with _open(file) as tensors:
            for name, (of_file, original, _) in located.items():
                if of_file != file:
                    continue
                tensor = tensors.get_tensor(original)
                if not tensor.is_floating_point():
                    raise ModelFormatError(f"{file}: {original} is {tensor.dtype}; expected floating point")
                for view in parameters[name].views:
                    view.copy_(tensor)
                dtypes.add(tensor.dtype)
                done += 1
                if on_progress is not None:
                    on_progress(done, len(located))
    return dtypes


def random_weights(parameters: dict[str, Parameter], seed: int, on_progress: Progress | None = None) -> None:
    """Fills `parameters` with noise of a plausible scale, the same for equal seeds on one kind of device:
    `--load-format dummy`."""
    generators: dict[torch.device, torch.Generator] = {}
    for done, (name, parameter) in enumerate(sorted(parameters.items()), start=1):
        device = parameter.views[0].device
        if name.endswith("norm.weight"):
            tensor = torch.ones(parameter.shape, device=device)
        else:
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            tensor = torch.randn(parameter.shape, generator=generators[device], device=device)
            tensor /= math.sqrt(parameter.shape[-1])
        for view in parameter.views:
            view.copy_(tensor)
        if on_progress is not None:
            on_progress(done, len(parameters))


Located = dict[str, tuple[Path, str, tuple[int, ...]]]  # our name -> file, its name there, its shape


def _locate(folder: Path, rename: Callable[[str], str], skip: Callable[[str], bool]) -> Located:
    located: Located = {}
    for file in weight_files(folder):
        with _open(file) as tensors:
            for original in tensors.keys():  # noqa: SIM118 (not a dict)
                name = rename(original)
                if skip(name):
                    continue
                if name in located:
                    other = located[name]
                    raise ModelFormatError(
                        f"{folder}: {name} is there twice: {other[1]} in {other[0].name} and {original} in "
                        f"{file.name}"
                    )
                located[name] = (file, original, tuple(tensors.get_slice(original).get_shape()))
    return located


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those the index names, or all there are without one."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ModelFormatError(f"{index}: not a valid index of weights ({error!r})") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelFormatError(f"{folder}: {INDEX_FILE} names files that are missing: {_some(missing)}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    other = sorted(
        path.name for suffix in ("bin", "pt", "pth", "gguf") for path in folder.glob(f"*.{suffix}")
    )
    if other:
        raise ModelFormatError(
            f"{folder}: only safetensors are loaded, and here are {_some(other)}; convert them "
            "(transformers: model.save_pretrained(folder, safe_serialization=True))"
        )
    raise ModelFormatError(
        f"{folder}: no weights; expected model.safetensors or {INDEX_FILE} with its shards"
    )


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(
            f"{file}: not a complete safetensors file ({error}); was it downloaded or written to the end?"
        ) from error


def _check(folder: Path, parameters: dict[str, Parameter], located: Located) -> None:
    missing = sorted(set(parameters) - set(located))
    extra = sorted(set(located) - set(parameters))
    shapes = [
        f"{name} is {list(shape)}, expected {list(parameters[name].shape)}"
        for name, (_, _, shape) in sorted(located.items())
        if name in parameters and shape != parameters[name].shape
    ]
    problems = []
    if missing:
        with_shapes = [f"{name} {list(parameters[name].shape)}" for name in missing]
        problems.append(f"missing: {_some(with_shapes)}")
    if extra:
        with_shapes = [f"{located[name][1]} {list(located[name][2])}" for name in extra]
        problems.append(f"unexpected: {_some(with_shapes)}")
    if shapes:
        problems.append(f"of another shape than config.json says: {_some(shapes)}")
    if problems:
        raise ModelFormatError(f"{folder}: weights do not fit config.json; {'; '.join(problems)}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    rest = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + rest
