"""The page that steps write to where a request has none: whatever it holds, nobody's output depends on it."""

from __future__ import annotations

from collections import Counter

import torch

from harness import Job
from unit.test_lossless_adaptive import drafts  # noqa: F401 - fixture
from unit.test_lossless_tiny import folders, plain, prompts  # noqa: F401 - fixtures
from unit.test_overlap import seen, twins
from unit.test_step_graphs import in_pieces


def test_nobody_looks_at_the_scratch_page(folders, drafts):  # noqa: F811
    """Full of noise whenever it could be read, it changes nothing: only who has ended meanwhile reads it."""
    reference, noisy = twins({**folders, "dspark": drafts["dspark"]}, "dspark", page_size=4)
    in_pieces(noisy)
    worker, runner, rng = noisy._worker, noisy._worker.runner, torch.Generator().manual_seed(0)
    decode, ragged, where = worker.decode, runner.verify_backend.ragged, Counter()

    def add_noise(*caches):
        for cache in caches:
            cache[:4].copy_(10 * torch.randn(cache[:4].shape, generator=rng))

    def decode_with_noise(batch):
        state = runner.request_rows
        n = state.context_lens[batch.rows]
        reads_scratch, goes_on = state.slots(batch.rows, n) < 4, n + 1 < state.max_lens[batch.rows]
        where["ended"] += int((reads_scratch & ~goes_on).sum())
        where["going on"] += int((reads_scratch & goes_on).sum())
        add_noise(*runner.draft_pool.k, *runner.draft_pool.v)
        return decode(batch)

    def ragged_with_noise(q, k_cache, v_cache, *others):
        add_noise(k_cache, v_cache)  # rows of this step have written there just now
        return ragged(q, k_cache, v_cache, *others)

    worker.decode, runner.verify_backend.ragged = decode_with_noise, ragged_with_noise
    jobs = [Job(p, 40 - i, arrive=i // 2) for i, p in enumerate(prompts(12))]
    expected, got = reference.run(jobs), noisy.run(jobs)
    assert [seen(r) for r in got] == [seen(r) for r in expected]
    assert where["ended"] > 0 and where["going on"] == 0
