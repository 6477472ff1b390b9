"""The real flashinfer, where it is installed, against the reference; and the shipped pair with prefill through it.

One type and one size of head, which are the shipped pair's too, so that one set of kernels is compiled.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import fields, replace

import pytest
import torch

from flashspark.attention.registry import make_backend
from gpu.setting import NEEDS_GPU, ON_GPU, assert_parts_at_near_ties, build, prompts, switch
from harness import Job
from paged import Pages
from parity import TOLERANCE, randn

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        not ON_GPU or importlib.util.find_spec("flashinfer") is None,
        reason="needs a GPU and flashinfer: pip install 'flashspark[flashinfer]'",
    ),
]
DIM, DTYPE, SCALE = 128, torch.bfloat16, 128**-0.5
NATIVE = make_backend("torch_native")


@pytest.fixture(scope="module")
def backend():
    started = time.monotonic()
    backend = make_backend("flashinfer", "cuda")
    backend.prepare(8, 2, DIM, DTYPE)
    print(f"flashinfer ready after {time.monotonic() - started:.1f} s")
    return backend


def on_gpu(queries, **changes):
    """The same queries on the GPU, not planned yet."""
    tensors = {f.name: v.cuda() for f in fields(queries) if torch.is_tensor(v := getattr(queries, f.name))}
    return replace(queries, plans={}, **tensors, **changes)


def caches(pages, num_kv_heads, spans):
    """Keys and values of the requests, and what none of them may count everywhere else."""
    written = torch.cat([pages.slots(r, torch.arange(start + count)) for r, start, count in spans])
    pair = []
    for seed in (1, 2):
        cache = torch.full((pages.num_slots, num_kv_heads, DIM), 1000.0)
        cache[written] = randn(len(written), num_kv_heads, DIM, seed=seed).cpu()
        pair.append(cache.to("cuda", DTYPE))
    return pair


def reference(q, k, v, queries):
    """In float32 on the CPU, from the same numbers."""
    return NATIVE.ragged(q.float().cpu(), k.float().cpu(), v.float().cpu(), replace(queries, plans={}), SCALE)


def host_lens(spans):
    return [count for _, _, count in spans], [start + count for _, start, count in spans]


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (5, 1)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 0, 1)],
        [(0, 0, 300), (2, 517, 64), (1, 31, 17)],
        [(1, 1000, 8), (0, 64, 8), (2, 15, 1), (3, 0, 8)],
    ],
    ids=["one row", "chunks", "verify windows"],
)
def test_chunks_and_windows(backend, heads, kv_heads, page_size, spans):
    """With lengths of the host, and with the device's and padding behind them."""
    pages = Pages(4, 1008, page_size=page_size)
    k, v = caches(pages, kv_heads, spans)
    queries = pages.ragged(spans)
    q = randn(len(queries.positions), heads, DIM, dtype=DTYPE)
    expected = reference(q, k, v, queries)
    got = backend.ragged(q, k, v, on_gpu(queries, host_lens=host_lens(spans)), SCALE)
    torch.testing.assert_close(got.float().cpu(), expected, atol=TOLERANCE[DTYPE], rtol=TOLERANCE[DTYPE])
    padded = torch.cat((q, q[:1].expand(3, -1, -1)))
    again = backend.ragged(padded, k, v, on_gpu(pages.ragged(spans, padding=3)), SCALE)
    assert torch.equal(again[:-3], got)
    assert not again[-3:].any()


def test_steps_are_queued_behind_a_busy_device(backend):
    """More of them than there are wrappers, each with a plan of its own; nothing that torch knows of waits."""
    pages = Pages(2, 400, page_size=16)
    k, v = caches(pages, 2, [(0, 0, 400), (1, 0, 400)])
    steps = [[(0, 40 * i, 30 + i), (1, 300 - 40 * i, 50)] for i in range(7)]
    queries = [pages.ragged(spans) for spans in steps]
    q = randn(90, 8, DIM, dtype=DTYPE)
    on_device = [on_gpu(x, host_lens=host_lens(s)) for x, s in zip(queries, steps, strict=True)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = [backend.ragged(q[: len(x.positions)], k, v, x, SCALE) for x in on_device]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, y in zip(queries, got, strict=True):
        expected = reference(q[: len(x.positions)], k, v, x)
        torch.testing.assert_close(y.float().cpu(), expected, atol=TOLERANCE[DTYPE], rtol=TOLERANCE[DTYPE])


def test_prefill_of_the_shipped_pair(backend):
    """Chunks of several prompts; decode steps run through triton either way."""
    engine = build(
        dtype="bfloat16",
        prefill_attention_backend="flashinfer",
        chunked_prefill_size=48,
        disable_cuda_graph=True,
    )
    runner = engine._worker.runner
    assert (runner.prefill_backend.name, runner.verify_backend.name) == ("flashinfer", "triton")
    jobs = [Job(prompt, 48) for prompt in prompts(16)]
    switch(engine, "static")
    got = [result.tokens for result in engine.run(jobs)]
    runner._prefill_backend = runner.verify_backend
    switch(engine, "static")
    expected = [result.tokens for result in engine.run(jobs)]
    assert all(len(tokens) == 48 for tokens in expected)
    assert_parts_at_near_ties(engine, jobs, expected, got, "prefill through flashinfer")
