"""Every Triton kernel compiles for the GPU it is written for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity import NEEDS_TRITON

SCRIPT = Path(__file__).parent / "compile_for_gpu.py"


@NEEDS_TRITON
@pytest.mark.full
@pytest.mark.timeout(900)
def test_kernels_compile_for_an_h200(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    folder = SCRIPT.parents[2] / "python" / "flashspark" / "kernels" / "triton"
    kernels = {
        line.removeprefix("def ").split("(")[0]
        for path in folder.glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.split("(")[0].endswith("_kernel")
    }
    assert compiled == kernels
