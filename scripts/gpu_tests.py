"""Everything that a GPU has to say about right and wrong, in one command: logs, JUnit files and a table in a folder.

    python scripts/gpu_tests.py --out FOLDER [kernels] [memcheck] [engine] [suite] [soak]

- `kernels`: the parity tests of `test/kernels`, which the interpreter runs elsewhere, with kernels that are compiled.
- `memcheck`: `scripts/gpu_memcheck.py`.
- `engine`: `test/gpu`, captured decode steps of the shipped pair.
- `suite`: what the CPU suite says of losslessness, greedy and sampled, in float32 on the GPU.
- `soak`: `test/gpu/soak.py`, 2,000 requests.

Without a name, all of them, one after the other. Needs torch, triton, pytest and hypothesis; with pytest-xdist tests
run side by side, which matters for the first, where compiling takes the time. Exit code 0 if everything passed.

With FLASHSPARK_GPU_TESTS_ON_CPU=1 in the environment the tests of `engine` and `suite` can be tried on a CPU: they are
not skipped there, and engines are built as a GPU's (`test/harness.py:as_on_gpu`): overlapped, and steps in the same
pieces, called one by one instead of captured.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS_S = {"kernels": 300, "memcheck": 400, "engine": 400, "suite": 500, "soak": 500}


def pytest_command(out: Path, name: str, workers: int, *patterns: str) -> list[str]:
    """pytest over files with the plugins that are there, whatever pyproject.toml asks of others. In one process, what
    tests print is shown: near-ties."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-ra" if workers > 1 else "-raP",
        "--show-capture=stdout",
        "--durations=8",
        "--import-mode=importlib",
    ]
    command += ["-o", "addopts=", "-m", "not full", f"--junitxml={out / f'{name}.xml'}"]
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(workers)]
    return command + sorted(str(path) for pattern in patterns for path in (ROOT / "test").glob(pattern))


def commands(out: Path, workers: int) -> dict[str, list[str]]:
    """What each name runs."""
    suite = (
        "unit/test_lossless_*.py",
        "unit/test_exact_*.py",
        "unit/test_step_graphs.py",
        "unit/test_overlap.py",
    )
    return {
        "kernels": pytest_command(
            out, "kernels", workers, "kernels/test_triton_[!c]*.py", "kernels/test_matmul.py"
        ),
        "memcheck": [sys.executable, str(ROOT / "scripts" / "gpu_memcheck.py"), "--out", str(out)],
        "engine": pytest_command(out, "engine", 1, "gpu/test_*.py"),
        "suite": pytest_command(out, "suite", workers, *suite),
        "soak": [sys.executable, str(ROOT / "test" / "gpu" / "soak.py"), "--out", str(out / "soak.json")],
    }


def run(name: str, command: list[str], log: Path) -> tuple[int, float, str]:
    """Exit code, seconds and last line of a command whose output is shown and written to `log`."""
    paths = [str(ROOT / folder) for folder in ("python", "test", "scripts")]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    print(f"== {name}: {' '.join(command)}", flush=True)
    started, last = time.monotonic(), ""
    with log.open("w") as file:
        limited = ["timeout", "--signal=INT", "--kill-after=20", str(LIMITS_S[name]), *command]
        process = subprocess.Popen(
            limited, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            last = line.strip() or last
    return process.wait(), time.monotonic() - started, last


def device() -> str:
    """What is tested: GPU and versions."""
    import torch
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}, Python {sys.version.split()[0]}"


def main() -> int:
    """Exit code 0 where all that was asked for passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(LIMITS_S)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and results")
    parser.add_argument("--workers", type=int, default=8, help="processes of `kernels` and `suite`")
    options = parser.parse_args()
    unknown = set(options.names) - set(LIMITS_S)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(LIMITS_S)}")
    options.out.mkdir(parents=True, exist_ok=True)
    where = device()
    print(where, flush=True)
    table = []
    for name in options.names or LIMITS_S:
        log = options.out / f"{name}.log"
        code, seconds, last = run(name, commands(options.out, options.workers)[name], log)
        verdict = "PASS" if code == 0 else "timed out" if code == 124 else f"FAIL ({code})"
        table.append((verdict, name, seconds, last))
    report = [where, *(f"{v:10} {name:9} {seconds:6.1f} s  {last[:120]}" for v, name, seconds, last in table)]
    (options.out / "gpu_tests.txt").write_text("\n".join(report) + "\n")
    print("\n".join(report))
    return 0 if all(verdict == "PASS" for verdict, *_ in table) else 1


if __name__ == "__main__":
    sys.exit(main())
