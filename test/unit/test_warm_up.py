"""Trying what captured steps do not run leaves no trace."""

from __future__ import annotations

import pytest
import torch

from flashspark.speculative.adaptive import VerifyMode
from flashspark.speculative.tiers import TierGrid, TierRule
from flashspark.speculative.warm_up import KINDS, PREFILLS, warm_up
from harness import Harness, Job
from unit.test_lossless_adaptive import LINEAR, WIDTH, drafts  # noqa: F401 - fixtures
from unit.test_lossless_tiny import folders, plain, prompts  # noqa: F401 - fixtures
from unit.test_step_graphs import in_pieces

JOBS = [
    Job(p, 16, sampling=sampling)
    for p, sampling in zip(
        prompts(6), [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}] * 2, strict=True
    )
]


def build(folders, draft, pieces: bool) -> Harness:  # noqa: F811
    harness = Harness(folders["target"], draft)
    if draft is not None:
        adaptive = harness.make_adaptive(VerifyMode.COMPACT, LINEAR, TierGrid(TierRule(WIDTH, 48)))
        adaptive.source.num_refits = 100
    if pieces:
        in_pieces(harness)
    return harness


def state_of(harness: Harness) -> list[torch.Tensor]:
    runner = harness._worker.runner
    rows, pools = runner.request_rows, (runner.target_pool, runner.draft_pool)
    caches = [cache[rows.page_size :] for pool in pools if pool is not None for cache in (*pool.k, *pool.v)]
    return [rows.context_lens, rows.anchors, rows.page_table, rows.max_lens, *caches]


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("draft", ["dflash2", "dspark", None])
def test_nothing_is_as_it_would_not_have_been(folders, drafts, draft, pieces, monkeypatch):  # noqa: F811
    path = None if draft is None else drafts[draft]
    expected = build(folders, path, pieces).run(JOBS)
    harness = build(folders, path, pieces)
    worker, steps, chunks = harness._worker, [], []
    decode, prefill = worker.decode, worker.prefill
    monkeypatch.setattr(worker, "decode", lambda batch: steps.append(batch.cap_list) or decode(batch))
    monkeypatch.setattr(worker, "prefill", lambda found: chunks.append(found) or prefill(found))
    before = [tensor.clone() for tensor in state_of(harness)]
    warm_up(worker, 200, 100)
    assert sorted({(len(found), len(found[0].token_ids)) for found in chunks}) == [
        (1, 4),
        (1, 40),
        (1, 99),
        (2, 8),
        (4, 1),
        (4, 4),
        (16, 4),
        (32, 4),
    ]
    widths = {worker.width, 1}
    assert {tuple(caps) for caps in steps} == {(cap,) * n for cap in widths for n in (1, 2)}
    assert len(steps) == len(KINDS) * 2 * len(widths) and len(PREFILLS) > len(chunks)
    for tensor, kept in zip(state_of(harness), before, strict=True):
        assert torch.equal(tensor, kept)
    assert harness._worker.sampling.num_assigned == 0
    monkeypatch.undo()
    assert [result.tokens for result in harness.run(JOBS)] == [result.tokens for result in expected]
