"""What memcheck looks at is every Triton kernel; whether it finds anything is for a GPU to say."""

import importlib
from pathlib import Path

import pytest

from parity import IS_INTERPRETED, NEEDS_TRITON

KERNELS = Path(__file__).parents[2] / "python" / "flashspark" / "kernels" / "triton"


class Recorder:
    """A kernel that notes that it was launched."""

    def __init__(self, kernel, name: str, launched: set[str]) -> None:
        self._kernel, self._name, self._launched = kernel, name, launched

    def __getitem__(self, grid):
        self._launched.add(self._name)
        return self._kernel[grid]


@NEEDS_TRITON
@pytest.mark.full
@pytest.mark.skipif(not IS_INTERPRETED, reason="runs under Triton's interpreter, with tensors on the CPU")
def test_every_kernel_is_looked_at(monkeypatch, capsys):
    import gpu_memcheck

    kernels, launched = set(), set()
    for path in sorted(KERNELS.glob("*.py")):
        module = importlib.import_module(f"flashspark.kernels.triton.{path.stem}")
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            kernels.add(name)
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), name, launched))
    gpu_memcheck.run_kernels()
    assert launched == kernels
    assert "ran verify_attention torch.bfloat16" in capsys.readouterr().out
