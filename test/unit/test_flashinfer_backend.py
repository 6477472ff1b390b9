"""The flashinfer backend without flashinfer: what it is asked for, who may ask, and for which part of the work.

`FakeWrapper` stands for flashinfer's: it takes pages and lengths apart as flashinfer documents them and attends in
float64, so that a wrong layout, index or mask is a wrong number. The real one runs in `test/gpu/test_flashinfer.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.attention import flashinfer_paged
from flashspark.attention.flashinfer_paged import NUM_WRAPPERS, WORKSPACE_BYTES, FlashInferBackend
from flashspark.attention.interface import AttentionCapabilities
from flashspark.attention.registry import make_backend
from flashspark.attention.torch_native import TorchNativeBackend
from flashspark.engine import build
from flashspark.engine.build import EngineOptions
from flashspark.engine.graph_runner import EagerRunner
from flashspark.engine.model_runner import PrefillChunk
from flashspark.scheduler import graph_build
from harness import Harness, Job, count_excused
from paged import Pages
from tiny_models import write_dflash2, write_target

CPU = torch.device("cpu")
NATIVE = TorchNativeBackend()
HEADS, KV_HEADS, DIM = 4, 2, 8


class FakeWrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper` of 0.6.12, as far as it is used."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert (kv_layout, backend) == ("NHD", "fa2")
        assert (float_workspace_buffer.dtype, float_workspace_buffer.nbytes) == (torch.uint8, WORKSPACE_BYTES)
        self.num_plans = 0

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
             num_kv_heads, head_dim_qk, page_size, *, causal, sm_scale, q_data_type, kv_data_type,
             seq_lens, max_token_per_sequence):  # fmt: skip
        of_requests = qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens
        for tensor in (*of_requests, paged_kv_indices):
            assert (tensor.dtype, tensor.dim()) == (torch.int32, 1)
        starts, self._pages, last, lens = (tensor.tolist() for tensor in of_requests)
        assert len(starts) == len(self._pages) == len(last) + 1 == len(lens) + 1
        assert len(paged_kv_indices) == self._pages[-1]
        assert max_token_per_sequence == max(b - a for a, b in pairwise(starts))
        assert all(1 <= n <= page_size for n in last)
        whole = [b - a - 1 for a, b in pairwise(self._pages)]
        assert lens == [n * page_size + rest for n, rest in zip(whole, last, strict=True)]
        assert causal
        self._starts, self._lens, self._indices = starts, lens, paged_kv_indices.long()
        self._shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._scale, self._dtypes = sm_scale, (q_data_type, kv_data_type)
        self.num_plans += 1

    def run(self, q, paged_kv_cache, *, out):
        heads, kv_heads, dim, page_size = self._shape
        assert q.shape == out.shape == (self._starts[-1], heads, dim)
        assert (q.dtype, out.dtype) == (self._dtypes[0], self._dtypes[0])
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (page_size, kv_heads, dim)
            assert cache.dtype == self._dtypes[1]
        for r, num_keys in enumerate(self._lens):
            rows = slice(self._starts[r], self._starts[r + 1])
            pages = self._indices[self._pages[r] : self._pages[r + 1]]
            k, v = (
                cache[pages].flatten(0, 1)[:num_keys].double().repeat_interleave(heads // kv_heads, 1)
                for cache in paged_kv_cache
            )
            num_rows = rows.stop - rows.start
            hidden = torch.ones(num_rows, num_keys, dtype=torch.bool).triu(num_keys - num_rows + 1)
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * self._scale
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out


BACKEND = FlashInferBackend(FakeWrapper, CPU)


@pytest.fixture
def installed(monkeypatch):
    """As if flashinfer and a GPU for it were there: by name, the fake, in any type and for heads of any size."""

    def make(name, device_type, flag):
        return (
            FlashInferBackend(FakeWrapper, CPU) if name == "flashinfer" else make_backend(name, "cpu", flag)
        )

    monkeypatch.setattr(build, "make_backend", make)
    monkeypatch.setattr(flashinfer_paged, "DTYPES", (torch.float32,))
    monkeypatch.setattr(flashinfer_paged, "HEAD_DIMS", (16,))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("flashinfer")
    target = write_target(root / "target", num_hidden_layers=2)
    draft = write_dflash2(root / "draft", target, dflash_config={"target_layer_ids": [0, 1]})
    return target, draft


def filled(pages, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (pages.num_slots, KV_HEADS, DIM)
    return [torch.randn(*shape, generator=generator) for _ in range(2)]


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 4, 16]),
    padding=st.integers(0, 3),
    absent=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
def test_any_batch_is_the_references(spans, page_size, padding, absent, seed):
    """Chunks over any context, requests without rows, padding, and slots of nobody: with lengths of the host, and
    with the device's."""
    num_reqs = len(spans)
    pages = Pages(num_reqs, 61, seed, page_size)
    k, v = filled(pages, seed)
    packed = pages.ragged([(r, start, count) for r, (start, count) in enumerate(spans)], padding)
    num_rows = sum(count for _, count in spans)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows + padding, HEADS, DIM, generator=generator)
    expected = NATIVE.ragged(q, k, v, packed, 0.3)[:num_rows] if num_rows else q[:0]
    counts, keys = [count for _, count in spans], [start + count for start, count in spans]
    garbage = torch.full((absent,), 10**6)
    slots = replace(
        packed,
        plans={},
        qo_indptr=torch.cat((packed.qo_indptr, garbage)),
        kv_lens=torch.cat((packed.kv_lens, garbage)),
        page_table=torch.cat(
            (packed.page_table, garbage[:, None].expand(absent, packed.page_table.shape[1]))
        ),
        num_reqs=torch.tensor(num_reqs),
    )
    for queries in (replace(packed, plans={}), replace(packed, plans={}, host_lens=(counts, keys)), slots):
        got = BACKEND.ragged(q, k, v, queries, 0.3)
        assert got.shape == q.shape
        assert not got[num_rows:].any()
        torch.testing.assert_close(got[:num_rows], expected, atol=1e-5, rtol=0)


def test_layers_share_a_plan_and_steps_do_not():
    pages, made = Pages(1, 20), []

    class Noted(FakeWrapper):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    backend = FlashInferBackend(Noted, CPU)
    steps = [pages.ragged([(0, start, 2)]) for start in range(NUM_WRAPPERS + 1)]
    q = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(7))
    for step in steps:
        for layer in range(3):
            k, v = filled(pages, layer)
            fresh = NATIVE.ragged(q, k, v, replace(step, plans={}), 1.0)
            torch.testing.assert_close(backend.ragged(q, k, v, step, 1.0), fresh, atol=1e-5, rtol=0)
    assert [wrapper.num_plans for wrapper in made] == [2] + [1] * (NUM_WRAPPERS - 1)


def test_prefill_plans_without_the_device(folders, installed, monkeypatch):
    """The chunks' K/V are those that the reference leaves; their lengths come from the host."""
    monkeypatch.setattr(flashinfer_paged, "_read_lens", lambda queries: pytest.fail("read from the device"))
    pools = []
    for name in ("torch_native", "flashinfer"):
        harness = Harness(*folders, device="cpu", page_size=4, max_running_requests=3, max_total_tokens=96,
                          prefill_attention_backend=name)  # fmt: skip
        runner = harness._worker.runner
        assert (runner.prefill_backend.name, runner.verify_backend.name) == (name, "torch_native")
        for row, ids in enumerate([[5, 3], [1, 2, 6], [4]]):
            runner.request_rows.set_pages(row, ids)
        with torch.inference_mode():
            runner.prefill([PrefillChunk(0, 0, range(20, 25)), PrefillChunk(1, 0, range(40, 51))])
            chunks = [PrefillChunk(1, 11, [7]), PrefillChunk(2, 0, [9, 8]), PrefillChunk(0, 5, [3, 2, 1])]
            hidden = runner.prefill(chunks, reads_hidden=True)
        assert runner.draft_pool is not None
        pools.append([hidden, *runner.target_pool.k, *runner.target_pool.v, *runner.draft_pool.v])
    for expected, got in zip(*pools, strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "args",
    [
        {"prefill_attention_backend": "flashinfer", "ragged_verify_mode": "compact"},
        {"attention_backend": "flashinfer", "speculative_draft_attention_backend": "torch_native"},
    ],
    ids=["prefill alone", "target"],
)
def test_greedy_output_is_that_of_the_reference(folders, installed, args):
    target, draft = folders
    jobs = [Job(range(40, 59), 8), Job([9] * 3, 9), Job(range(70, 61, -1), 5)]
    plain = Harness(target, device="cpu", attention_backend="torch_native")
    expected = [result.tokens for result in plain.run(jobs)]
    harness = Harness(target, draft, device="cpu", page_size=4, chunked_prefill_size=7,
                      speculative_cost_table="none", **args)  # fmt: skip
    got = [result.tokens for result in harness.run(jobs)]
    assert [len(tokens) for tokens in got] == [8, 9, 5]
    assert count_excused(plain, jobs, expected, got) <= 1


@pytest.mark.parametrize(
    ("chosen", "prefill", "decode", "draft"),
    [
        ({}, "auto", "auto", "auto"),
        ({"attention_backend": "triton"}, "triton", "triton", "triton"),
        ({"prefill": "flashinfer"}, "flashinfer", "auto", "auto"),
        ({"attention_backend": "flashinfer", "decode": "triton"}, "flashinfer", "triton", "triton"),
        ({"attention_backend": "flashinfer", "draft": "triton"}, "flashinfer", "flashinfer", "triton"),
        ({"draft": "torch_native"}, "auto", "auto", "torch_native"),
    ],
    ids=str,
)
def test_each_part_has_the_backend_that_was_asked_for(monkeypatch, chosen, prefill, decode, draft):
    able = AttentionCapabilities(True, True, True)
    monkeypatch.setattr(build, "make_backend", lambda name, *_: SimpleNamespace(name=name, capabilities=able))
    chosen = {key if "backend" in key else f"{key}_attention_backend": name for key, name in chosen.items()}
    options = EngineOptions("target", "draft", 4, **chosen)
    backends = build._make_backends(options, CPU)
    got = [part.backend for part in (backends.prefill, backends.decode, backends.draft)]
    assert [backend.name for backend in got] == [prefill, decode, draft]
    assert len({id(backend) for backend in got}) == len({prefill, decode, draft})


FLASHINFER = {"attention_backend": "flashinfer"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (FLASHINFER, "^--attention-backend flashinfer cannot run a draft's attention: "
                     "give --speculative-draft-attention-backend triton$"),
        ({"decode_attention_backend": "flashinfer"}, "^--decode-attention-backend flashinfer cannot run a draft"),
        ({"speculative_draft_attention_backend": "flashinfer"},
         "^--speculative-draft-attention-backend flashinfer cannot run a draft"),
        *(({**FLASHINFER, "speculative_draft_attention_backend": "torch_native", "ragged_verify_mode": mode},
           f"{mode}: the attention backend flashinfer cannot verify .*--decode-attention-backend.*or static")
          for mode in ("cap-accept", "compact")),
    ],
)  # fmt: skip
def test_parts_that_it_cannot_do_are_refused(folders, installed, args, words):
    with pytest.raises(ValueError, match=words):
        Harness(*folders, device="cpu", speculative_cost_table="none", **args)


@pytest.mark.parametrize("decode", [None, "flashinfer"])
def test_it_cannot_be_captured(monkeypatch, decode):
    """Refused by the flag that asked for it."""
    monkeypatch.setattr(graph_build, "make_step_runner", lambda device, captures: EagerRunner())
    args = SimpleNamespace(disable_cuda_graph=False, decode_attention_backend=decode)
    runner = SimpleNamespace(draft=None, verify_backend=BACKEND, device=torch.device("cuda"))
    flag = "--attention-backend" if decode is None else "--decode-attention-backend"
    with pytest.raises(ValueError, match=rf"^{flag} flashinfer cannot be captured.*"
                                         r"--decode-attention-backend triton\), or --disable-cuda-graph$"):  # fmt: skip
        graph_build.build_graphs(args, SimpleNamespace(runner=runner), None, None, None)


def test_types_and_heads_that_it_cannot_run_are_refused(folders, monkeypatch):
    monkeypatch.setattr(build, "make_backend", lambda *_: BACKEND)
    with pytest.raises(ValueError, match=r"^--prefill-attention-backend flashinfer has no kernels for float32: "
                                         r"give --dtype bfloat16"):  # fmt: skip
        Harness(folders[0], device="cpu", prefill_attention_backend="flashinfer")
    with pytest.raises(ValueError, match=r"^has kernels for heads of 64, 128, 256, not of 16: use triton$"):
        BACKEND.prepare(4, 2, 16, torch.float16)
    BACKEND.prepare(5, 1, 128, torch.bfloat16)


def test_kernels_that_do_not_compile_are_refused_at_start_up():
    class Broken(FakeWrapper):
        def run(self, q, paged_kv_cache, *, out):
            raise RuntimeError("ninja:\n  nvcc not found")

    with pytest.raises(ValueError, match=r"nvcc and ninja; or use triton \(ninja: nvcc not found\)$"):
        FlashInferBackend(Broken, CPU).prepare(4, 2, 128, torch.bfloat16)


def test_where_it_is_not_there_the_extra_is_named(monkeypatch):
    flag = "--prefill-attention-backend"
    with pytest.raises(ValueError, match=rf"^{flag} flashinfer needs a GPU: use torch_native on a CPU$"):
        make_backend("flashinfer", "cpu", flag)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=rf"^{flag} flashinfer: the flashinfer package is not installed; "
                                         r"install flashspark\[flashinfer\], or use triton$"):  # fmt: skip
        make_backend("flashinfer", "cuda", flag)
