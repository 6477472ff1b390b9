"""What step times depend on, beside the flags: the models' shapes, the device, the versions."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch

import flashspark

_MAX_HEADER_BYTES = 100 << 20


def folder_fingerprint(folder: str | Path) -> str:
    """Digest of a model folder: config.json, and names, sizes and headers of the weight files.

    The weights themselves are not read: how fast a model runs depends on their shapes and types, which the headers
    tell, and reading gigabytes would take longer than measuring.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(_safetensors_header(path) if path.suffix == ".safetensors" else path.read_bytes())
    return digest.hexdigest()[:16]


def device_fingerprint(device: torch.device) -> str:
    """The device by its name: a GPU's, or the processor's with the number of its cores and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def version_fingerprint() -> str:
    """FlashSpark's and torch's versions."""
    return f"flashspark {flashspark.__version__}, torch {torch.__version__}"


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        return file.read(min(num_bytes, _MAX_HEADER_BYTES))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
