"""SGLang's bench clients and DSPARK profiler, as they are on the package index, against a live demo server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import Server, running_server, speculative
from flashspark.demo import DEMO_MODELS
from flashspark.speculative.cost_table import SpsAdditiveCostTable, SpsCostTable, load_cost_table
from real_clients import RealClient, bench_clients, had, rust_bench_client

BACKENDS = ["sglang", "sglang-oai", "sglang-oai-chat"]
NEW, OLD = "0.5.23", "0.5.17"
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 24, 48, 32
PREPARING_S = 600  # the first run on a machine fetches the clients


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped pair, trimming what it verifies."""
    log = tmp_path_factory.mktemp("compact") / "log"
    flags = ["--max-running-requests", "16", "--ragged-verify-mode", "compact"]
    with running_server(*speculative("demo", "demo-dflash2"), *flags, log=log) as running:
        yield running


def bench(
    client: RealClient, module: str, server: Server, out: Path, *flags: str, num_prompts: int = NUM_PROMPTS
) -> dict[str, Any]:
    """Runs a bench, holds its report against the server's counters, and returns the report."""
    load = ["--num-prompts", str(num_prompts), "--max-concurrency", "8", "--seed", "3"]
    lengths = ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN)]
    lengths += ["--random-range-ratio", "1"]
    where = ["--host", "127.0.0.1", "--port", str(server.port), "--dataset-name", "random-ids"]
    report = ["--flush-cache", "--warmup-requests", "0", "--output-file", str(out), "--output-details"]
    before = server.wait_idle()
    done = client.run("-m", module, *where, *load, *lengths, *report, *flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    after = server.wait_idle()
    grown = {name: after[name] - before[name] for name in ("finished", "output_tokens", "verify_steps")}
    assert result["completed"] == grown["finished"] == num_prompts
    assert set(result["errors"]) == {""}
    assert result["output_lens"] == [OUTPUT_LEN] * num_prompts
    assert result["total_output_tokens"] == grown["output_tokens"] == num_prompts * OUTPUT_LEN
    assert result["accept_length"] == pytest.approx(after["avg_spec_accept_length"], rel=1e-12)
    assert after["avg_spec_accept_length"] == grown["output_tokens"] / grown["verify_steps"]
    assert result["accept_length"] > 1.2
    print(
        f"{module} {' '.join(flags)}: {result['completed']} of {num_prompts}, {result['accept_length']:.4f}"
    )
    return result


def bench_python(version: str, backend: str, server: Server, out: Path, **options: Any) -> None:
    client = had(bench_clients, version)
    bench(client, "sglang.bench_serving", server, out, "--backend", backend, "--disable-tqdm", **options)


def bench_rust(backend: str, server: Server, out: Path, **options: Any) -> None:
    prompts = ["--tokenize-prompt", "--vocab-size", "4096"]
    if backend == "sglang-oai-chat":
        prompts = ["--tokenizer", str(DEMO_MODELS["demo"])]
    client = had(rust_bench_client, NEW)
    bench(client, "sglang.benchmark.rust_client", server, out, "--backend", backend, *prompts, **options)


@pytest.mark.timeout(PREPARING_S)
def test_bench_serving_in_short(demo: Server, tmp_path: Path) -> None:
    bench_python(NEW, "sglang", demo, tmp_path / "report.jsonl", num_prompts=8)


@pytest.mark.timeout(PREPARING_S)
def test_rust_bench_in_short(demo: Server, tmp_path: Path) -> None:
    bench_rust("sglang-oai", demo, tmp_path / "report.jsonl", num_prompts=8)


@pytest.mark.full
@pytest.mark.timeout(PREPARING_S)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("version", [NEW, OLD])
def test_bench_serving(demo: Server, tmp_path: Path, version: str, backend: str) -> None:
    bench_python(version, backend, demo, tmp_path / "report.jsonl")


@pytest.mark.full
@pytest.mark.timeout(PREPARING_S)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rust_bench(demo: Server, tmp_path: Path, backend: str) -> None:
    bench_rust(backend, demo, tmp_path / "report.jsonl")


@pytest.mark.full
@pytest.mark.timeout(PREPARING_S)
def test_both_benches_on_trimmed_blocks(compact: Server, tmp_path: Path) -> None:
    bench_python(NEW, "sglang", compact, tmp_path / "python.jsonl")
    bench_rust("sglang", compact, tmp_path / "rust.jsonl")


# The profiler measures a DSPARK server alone, one that keeps records and accepts no drafts.

PROFILER = "sglang.benchmark.dspark_sps_profiler"


@pytest.mark.full
@pytest.mark.timeout(PREPARING_S)
@pytest.mark.parametrize("version", [NEW, OLD])
@pytest.mark.parametrize("mode", ["static", "compact"])
def test_dspark_profiler(tmp_path: Path, version: str, mode: str) -> None:
    batches, fractions = ("1 2 4", []) if mode == "static" else ("4 16 32", ["--fracs", "0.5", "1.0"])
    client, out = had(bench_clients, version), tmp_path / "sps.json"
    log = tmp_path / "log"
    pair = [*speculative("demo", "demo-dspark"), "--speculative-algorithm", "DSPARK"]
    pair += ["--ragged-verify-mode", mode, "--max-running-requests", "32"]
    sweep = ["--batch-size", *batches.split(), "--min-steady-steps", "16", "--min-steady-seconds", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DSPARK_ENABLE_SPS_RECORD", "1")
        patch.setenv("SGLANG_SIMULATE_ACC_LEN", "1.0")
        with running_server(*pair, "--speculative-cost-table", "none", log=log) as server:
            run = client.run(
                "-m", PROFILER, "run", "--base-url", server.url, "--out", str(out), *sweep, *fractions
            )
            assert run.returncode == 0, run.stdout + run.stderr
            width = server.state()["dspark_info_record"]["verify_num_draft_tokens"]
            server.wait_idle()
    fit = client.run("-m", PROFILER, "fit", "--out", str(out), "--no-plot")
    assert fit.returncode == 0, fit.stdout + fit.stderr
    rounds = [json.loads(line) for line in (tmp_path / "sps.rounds.jsonl").read_text().splitlines()]
    assert [one["batch_size"] for one in rounds[:: len(fractions) - 1 if fractions else 1]] == [
        int(batch) for batch in batches.split()
    ]
    table = load_cost_table(out)
    print(table)
    if mode == "static":
        assert isinstance(table, SpsCostTable)
        assert table.sample_batch_tokens == (width, 2 * width, 4 * width)
        return
    assert isinstance(table, SpsAdditiveCostTable)
    assert table.bs_probes == (4, 16, 32)
    assert len(table.m_probes) > 1
    # A table of two dimensions plans for a server here.
    with running_server(*pair, "--speculative-dspark-sps-table-path", str(out), log=log) as server:
        assert server.state()["speculative_dspark_sps_table_path"] == str(out)
        assert len(server.generate("def f(x):", max_new_tokens=32, ignore_eos=True)["output_ids"]) == 32
