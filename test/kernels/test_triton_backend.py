"""Whole decode steps through the Triton attention backend, and who must not need it."""

import subprocess
import sys

from harness import Harness, Job, count_excused
from parity import DEVICE, NEEDS_TRITON
from tiny_models import write_dflash2, write_target

pytestmark = NEEDS_TRITON


def test_greedy_output_is_that_of_the_reference_backend(tmp_path):
    """Two requests, drafted and verified through `triton`, against plain decoding through `torch_native`."""
    target = write_target(tmp_path / "target", num_hidden_layers=2)
    draft = write_dflash2(tmp_path / "draft", target, dflash_config={"target_layer_ids": [0, 1]})
    jobs = [Job(range(40, 47), 6), Job([9] * 3, 5)]
    plain = Harness(target, device="cpu", attention_backend="torch_native")
    expected = [result.tokens for result in plain.run(jobs)]
    args = {"device": DEVICE, "attention_backend": "triton"}
    harness = Harness(target, draft, page_size=8, **args)
    assert harness._worker.runner.verify_backend.name == "triton"
    got = [result.tokens for result in harness.run(jobs)]
    assert [len(tokens) for tokens in got] == [6, 5]
    assert count_excused(plain, jobs, expected, got) == 0


def test_a_cpu_engine_imports_no_triton():
    code = "import sys, flashspark.scheduler.process; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
