"""What captured steps do not run, run once before anybody waits for it: prefill, and the judging of sampled requests.

On a GPU a kernel is compiled when it is first called. That takes a second or more, and would hold up every request that
is running when the first long prompt, or the first sampled request, comes along.
"""

from __future__ import annotations

import logging
import time

import torch

from flashspark.engine.model_runner import PrefillChunk
from flashspark.upload import upload

from .sampling import RowSampling
from .types import StepBatch
from .worker import SpeculativeWorker

logger = logging.getLogger(__name__)

# Prompts and tokens of each: by both, prefill attention has tiles of rows and shares of keys of different sizes, and by
# their product it is launched early.
PREFILLS = (
    *((1, 4), (2, 8), (4, 1), (4, 4), (16, 4), (32, 4), (64, 4)),
    *((1, 40), (1, 100), (1, 200), (16, 40)),
)
# One of each kind that is judged by kernels of its own.
KINDS = (
    RowSampling(seed=1, temperature=1.0),
    RowSampling(seed=2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    RowSampling(seed=3, temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.1),
)


def warm_up(worker: SpeculativeWorker, max_prefill_tokens: int, context_length: int) -> None:
    """Runs it all on the scratch page, in rows that nobody owns yet; leaves them, and all other pages, as they were.

    Args:
        max_prefill_tokens: of a prefill; larger ones are left out.
        context_length: of the server; longer prompts are cut to it.
    """
    started = time.monotonic()
    runner = worker.runner
    for num_prompts, num_tokens in PREFILLS:
        size = min(num_tokens, context_length - 1)
        if size > 0 and num_prompts * size <= max_prefill_tokens:
            _prefill(worker, num_prompts, size)
    max_reqs = runner.request_rows.scratch_row
    for kind in KINDS:
        for row_list in ([0], list(range(min(2, max_reqs)))):
            for cap in {worker.width, 1}:
                _decode(worker, kind, row_list, min(cap, context_length))
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    logger.info("prefill and sampling: tried in %.1f s", time.monotonic() - started)


def _prefill(worker: SpeculativeWorker, num_prompts: int, num_tokens: int) -> None:
    scratch = worker.runner.request_rows.scratch_row
    worker.prefill([PrefillChunk(scratch, 0, [0] * num_tokens)] * num_prompts)


def _decode(worker: SpeculativeWorker, kind: RowSampling, row_list: list[int], cap: int) -> None:
    """A step of requests without pages, in which nobody verifies more than `cap` rows."""
    runner = worker.runner
    state, device = runner.request_rows, runner.device
    kept = state.context_lens.clone(), state.anchors.clone()
    for row in row_list:
        worker.assign(row, kind, [0], [], 0, speculates=True)
    caps = [cap] * len(row_list)
    worker.decode(StepBatch(upload(row_list, device), row_list, upload(caps, device), caps))
    for row in row_list:
        worker.release(row)
    for tensor, values in zip((state.context_lens, state.anchors), kept, strict=True):
        tensor.copy_(values)
