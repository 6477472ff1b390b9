"""The breakdown of a step: cells of a real scheduler, kernels of a trace, and the parts that have bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from flashspark.engine.graph_runner import EagerRunner
from flashspark.speculative.step_graphs import StepGraphs
from flashspark.speculative.tiers import TierGrid, TierRule
from tiny_models import write_dflash2, write_target

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import device_trace
import step_breakdown
import step_parts
from device_trace import Span
from engines import InProcessEngine
from step_breakdown import Breakdown, bars, parse

NVJET, NORM = "nvjet_tst_64x8_h_bz_TNT", "_add_rms_norm_kernel"
# Two steps of a graph's replay each, a copy before the second; microseconds 0-10, 12-15, 40-44 | 50-60, 62-65.
SPANS = [
    Span(NVJET, 0, 10_000, 1),
    Span(NORM, 12_000, 15_000, 1),
    Span("Memcpy HtoD (Pinned -> Device)", 40_000, 44_000, 2),
    Span(NVJET, 50_000, 60_000, 3),
    Span(NORM, 62_000, 65_000, 3),
]


def test_a_step_is_its_kernels_and_its_gaps():
    found = device_trace.summary(SPANS, num_steps=2, step_us=20.0)
    assert [(k["kernel"], k["kind"], k["us"], k["launches"], k["us_each"]) for k in found["kernels"]] == [
        (NVJET, "products", 10.0, 1.0, 10.0),
        (NORM, "other", 3.0, 1.0, 3.0),
        ("Memcpy HtoD (Pinned -> Device)", "copies", 2.0, 0.5, 4.0),
    ]
    assert (found["busy_us"], found["gap_us"], found["launches"]) == (15.0, 5.0, 2.5)
    assert found["kinds_us"] == {"products": 10.0, "other": 3.0, "copies": 2.0}
    traced = {"step_us": 32.5, "gaps_in_graphs_us": 2.0, "gaps_between_launches_us": 15.5}
    assert found["traced"] == traced
    text = device_trace.table("plain, 1 requests", found)
    assert "step 20.0 µs = kernels 15.0 + gaps 5.0; 2 launches" in text
    assert "10.0 µs     1.0 ×    10.00  nvjet_tst_64x8_h_bz_TNT" in text


def test_what_overlaps_is_busy_once():
    spans = [Span("a", 0, 10_000, 1), Span("b", 2_000, 4_000, 2), Span("c", 8_000, 12_000, 2)]
    assert device_trace.busy_us(spans) == 12.0
    found = device_trace.summary(spans, 1)
    assert {k["kernel"]: (k["us"], k["us_each"]) for k in found["kernels"]} == {
        "a": (10.0, 10.0),
        "c": (2.0, 4.0),
        "b": (0.0, 2.0),
    }
    assert found["gap_us"] is None and found["traced"]["gaps_in_graphs_us"] == 0.0


def test_kernels_are_told_by_their_names():
    for name, kind in (
        ("Memset (Device)", "copies"),
        ("_ragged_attention_kernel", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(int)", "products"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "other"),
    ):
        assert device_trace.kind_of(name) == kind
    assert device_trace.short("void at::native::(anonymous namespace)::fill<4>(int)") == "fill<4>(int)"


def test_the_profilers_events_become_spans():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    spans = device_trace.spans_of(profiler.profiler.kineto_results.events(), DeviceType.CPU)
    assert "aten::mm" in {span.name for span in spans}
    assert all(span.end_ns >= span.start_ns for span in spans)
    assert spans == sorted(spans, key=lambda span: span.start_ns)
    assert device_trace.spans_of(profiler.profiler.kineto_results.events()) == []


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    draft = write_dflash2(folder / "draft", target)
    flags = ["--model-path", str(target), "--speculative-draft-model-path", str(draft), "--device", "cpu"]
    flags += ["--speculative-algorithm", "DFLASH", "--ragged-verify-mode", "compact", "--random-seed", "1"]
    return InProcessEngine(
        [
            *flags,
            "--speculative-cost-table",
            "none",
            "--max-running-requests",
            "2",
            "--torch-threads",
            "1",
        ]
    )


def breakdown_of(engine, *flags):
    options, rest = parse(
        ["--requests", "1,2", "--steps", "5", "--warm-up", "2", "--traced-steps", "3", *flags]
    )
    assert rest == []
    breakdown = Breakdown(engine.scheduler, engine.info["context_length"], {}, options)
    breakdown._cells._prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    return breakdown


def test_cells_of_a_real_scheduler(engine, tmp_path):
    assert breakdown_of(engine, "--out", str(tmp_path)).run() == []
    content = json.loads((tmp_path / "step_breakdown.json").read_text())
    cells = {(c["mode"], c["num_reqs"]): c for c in content["cells"]}
    assert set(cells) == {(mode, n) for mode in ("plain", "static", "compact") for n in (1, 2)}
    width = engine.info["speculative_num_draft_tokens"]
    for (mode, num_reqs), found in cells.items():
        assert found["num_steps"] == 5
        assert found["rows_run"] == num_reqs * (1 if mode == "plain" else width)
        assert (found["host_ms"]["plan"] > 0) == (mode == "compact")
        assert found["accept_length"] == 1 if mode == "plain" else 1 <= found["accept_length"] <= width
    assert engine.scheduler._settings.verifier.source.is_ready  # settled before
    assert not engine.scheduler.has_work
    named = [bar["what"] for bar in content["bars"]]
    assert "idle share, compact, 2 requests" in named and "planning on the host, ms, most" in named
    assert "bars (at most)" in (tmp_path / "step_breakdown.txt").read_text()


def test_kernels_of_a_cells_steps(engine, monkeypatch):
    breakdown = breakdown_of(engine, "--requests", "1", "--modes", "plain")

    def trace(run):
        before = engine.scheduler.num_steps
        run()
        assert engine.scheduler.num_steps == before + 3
        return SPANS

    monkeypatch.setattr(device_trace, "trace", trace)
    breakdown._measure("plain", 1)
    breakdown._trace("plain:1")
    found = breakdown.content["traces"]["plain:1"]
    assert found["step_us"] == pytest.approx(breakdown.content["cells"][0]["step_ms"] * 1e3, abs=0.06)
    assert found["kernels"][0]["us"] == pytest.approx(20 / 3, abs=0.01)
    breakdown._trace("plain:2:1")
    assert breakdown.content["traces"]["plain:2:1"]["step_us"] > 0
    assert breakdown._cells.temperature == 1.0 and len(breakdown.content["cells"]) == 1
    assert step_breakdown.trace_of("static:8", 0.5) == ("static", 8, 0.5)


def test_what_fails_is_told_and_the_rest_is_measured(engine, tmp_path):
    breakdown = breakdown_of(engine, "--requests", "1,3", "--modes", "static", "--out", str(tmp_path))
    (failure,) = breakdown.run()
    assert failure.startswith("static, 3 requests: 3 requests do not run at once")
    assert json.loads((tmp_path / "step_breakdown.json").read_text())["failures"] == [failure]
    assert [c["num_reqs"] for c in breakdown.content["cells"]] == [1]
    assert not engine.scheduler.has_work


def test_the_parts_of_a_step(engine, monkeypatch):
    """On the bodies as a GPU captures them; times are whatever they are here."""
    worker = engine.scheduler._worker
    assert worker.graphs is None
    with pytest.raises(RuntimeError, match="no step of 2 requests"):
        step_parts.plan_and_pack_us(worker, 2)
    grid = TierGrid(TierRule(worker.width, 2))
    source = engine.scheduler._settings.verifier.source  # of compact, whatever the mode is
    worker.graphs = StepGraphs(
        *(worker.runner, worker.sampling, worker.drafter, source, grid, 0.01, EagerRunner(), worker.rule)
    )
    try:
        breakdown = breakdown_of(engine)
        monkeypatch.setattr(step_breakdown, "PRODUCT_ROWS", (8, 2 * worker.width + 1))
        breakdown._parts()
    finally:
        worker.graphs = None
    content = breakdown.content
    assert content["failures"] == []
    width = worker.width
    rows = [(c["mode"], c["num_reqs"], c["rows"], c["drafts"]) for c in content["chains"]]
    assert rows == [("plain", 1, 1, 0), ("static", 1, width, width - 1)]
    assert [c["rows"] for c in content["products"]] == [8]
    for found in content["chains"] + content["products"]:
        assert all(found[name] > 0 for name in ("chosen_ms", "same_layout_ms", "cublas_ms"))
    assert all(content["plan_and_pack_us"][n] > 0 for n in ("1", "2"))
    estimator = content["estimator_us"]["2"]
    assert estimator["total_us"] == pytest.approx(estimator["predict_us"] + estimator["observe_us"], abs=0.02)
    assert "verify" not in vars(worker.runner)

    monkeypatch.setattr(step_breakdown, "make_confidence_source", lambda *_: None)  # of DFlash's first kind
    breakdown = breakdown_of(engine, "--requests", "1")
    breakdown._parts()
    assert breakdown.content["estimator_us"] == {}
    assert all("estimator" not in failure for failure in breakdown.content["failures"])


def test_a_chain_multiplies_every_layer_and_the_heads(engine, monkeypatch):
    worker, bodies = engine.scheduler._worker, []
    target, draft = worker.runner.target, worker.runner.draft
    monkeypatch.setattr(step_parts, "time_graph", lambda calls, load_s: bodies.extend(calls) or 1000.0)
    assert step_parts.chain(worker, 6, 4)["cublas_ms"] == 1.0
    made = []

    def product(x, weight, out):
        made.append((len(x), tuple(weight.shape)))
        return torch.mm(x, weight)

    for name in ("matmul", "_usual"):
        monkeypatch.setattr(step_parts, name, product)
    del bodies[:]
    step_parts.chain(worker, 6, 4)
    bodies[0]()
    head = tuple(target.tables.head_weight.shape)
    expected = [(6, tuple(linear.weight.shape)) for linear in target.linears()] + [(6, head)]
    expected += [(6, tuple(linear.weight.shape)) for linear in draft.linears()]
    convolutions = [c.projection for layer in draft.layers for c in (layer.attention_conv, layer.mlp_conv)]
    expected += [(6, tuple(linear.weight.shape)) for linear in convolutions] + [(4, head)]
    assert made == expected and len(made) > 4 * 4
    context = list(draft.linears())[: step_parts.NUM_CONTEXT_PRODUCTS]
    assert context == [draft.fc, draft.context.linear]
    for num_drafts, count in ((0, len(context)), (None, 0)):
        del bodies[:], made[:]
        step_parts.chain(worker, 6, num_drafts)
        bodies[1]()
        assert made == expected[: 4 * 4 + 1 + count]


def test_products_over_weights_as_checkpoints_have_them():
    x, weight, transposed = torch.randn(3, 4), torch.randn(4, 5), step_parts._Transposed()
    for _ in range(2):
        torch.testing.assert_close(transposed.product(x, weight, None), x @ weight)
    (copy,) = transposed._copies.values()
    assert copy.shape == (5, 4) and copy.is_contiguous()


def test_bars():
    cell = {"mode": "static", "num_reqs": 1, "idle_share": 0.05, "step_ms": 6.0, "host_ms": {"plan": 0.0}}
    chain = {"mode": "static", "num_reqs": 1, "cublas_ms": 5.0}
    content = {
        "cells": [cell, {**cell, "mode": "compact", "idle_share": 0.01, "host_ms": {"plan": 0.1}}],
        "chains": [chain, {**chain, "num_reqs": 8}],
        "products": [{"rows": 160, "chosen_ms": 4.0, "cublas_ms": 5.0}],
        "plan_and_pack_us": {"128": 41.0},
        "estimator_us": {"128": {"total_us": 60.0}},
    }
    lines = bars(content)[1:]
    assert [line.split()[0] for line in lines] == ["MISSED", "met", "met", "MISSED", "met", "MISSED", "met"]
    assert "1.200 of  1.150  step over its products, static, 1 requests (6.00 / 5.00 ms)" in lines[5]
    assert "0.800 of  0.850  products of 160 rows over cuBLAS's (4.00 / 5.00 ms)" in lines[6]
    assert [bar["value"] for bar in content["bars"]] == pytest.approx([0.05, 0.01, 0.1, 41.0, 60.0, 1.2, 0.8])


def test_the_command_line():
    options, flags = parse(["--traces", "plain:1", "--model-path", "demo"])
    assert options.traces == ["plain:1"] and flags == ["--model-path", "demo"]
    assert parse([])[0].requests == [1, 8, 32, 128] and parse(["--traces", ""])[0].traces == []
    for wrong in (["--modes", "best"], ["--traces", "best:1"]):
        with pytest.raises(SystemExit):
            parse(wrong)
    assert set(step_breakdown.SWITCHES) == {"plain", "static", "cap-accept", "compact"}
