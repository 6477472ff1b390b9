"""Settings every test runs under: fixed thread counts, and markers that follow from the folder."""

from __future__ import annotations

import os
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis  # noqa: E402 - after the thread counts, which torch reads once
import pytest  # noqa: E402
import torch  # noqa: E402

if (
    not torch.cuda.is_available()
):  # Triton reads it once, when it is first imported; servers of tests inherit it
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)  # float sums do not depend on the machine's core count

# A landing is judged on the same examples every time; the full suite looks for new ones.
hypothesis.settings.register_profile("same-examples", derandomize=True)

E2E_DIR = Path(__file__).parent / "e2e"


def pytest_configure(config: pytest.Config) -> None:
    if "(full or" not in config.getoption("-m"):
        hypothesis.settings.load_profile("same-examples")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Forced onto a CPU they try themselves out (`gpu/setting.py`).
    runs_gpu_tests = torch.cuda.is_available() or os.environ.get("FLASHSPARK_GPU_TESTS_ON_CPU") == "1"
    for item in items:
        if E2E_DIR in item.path.parents:
            item.add_marker(pytest.mark.e2e)
        if not runs_gpu_tests and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
