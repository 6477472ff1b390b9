"""flashinfer's paged prefill kernels: planned on the host once per step, and run by every layer.

A plan needs every length on the host. Of prefill the host knows them; of a decode step the device does, so that
planning one waits for the device, and neither trimmed windows nor captured steps can be had.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashspark.attention.interface import (
    AttentionBackend,
    AttentionCapabilities,
    BlockQueries,
    RaggedQueries,
)
from flashspark.upload import upload

logger = logging.getLogger(__name__)

DTYPES, HEAD_DIMS = (torch.float16, torch.bfloat16), (64, 128, 256)
WORKSPACE_BYTES = 128 << 20  # of partial results where keys are split; what flashinfer recommends
# A plan is copied to the device from pinned memory of its wrapper, which the next plan overwrites.
NUM_WRAPPERS = 4


@dataclass(frozen=True)
class _Wrapper:
    """One of flashinfer's, with what says that its plan has left the host."""

    inner: Any
    planned: torch.cuda.Event | None


@dataclass(frozen=True)
class _Plan:
    """A step that a wrapper is ready for."""

    inner: Any
    num_rows: int  # of requests; the rest is padding


class FlashInferBackend(AttentionBackend):
    """`AttentionBackend` over flashinfer's `BatchPrefillWithPagedKVCacheWrapper`, its second generation of kernels:
    they compile in a quarter of the time that the third takes."""

    name = "flashinfer"
    capabilities = AttentionCapabilities(
        supports_ragged_verify=False, supports_ragged_verify_graph=False, supports_draft_block=False
    )

    def __init__(self, wrapper_class: Any, device: torch.device) -> None:
        """`wrapper_class`: flashinfer's. Takes `WORKSPACE_BYTES` of the device, and 8 MiB for each wrapper."""
        self._device, self._on_gpu = device, device.type == "cuda"
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrappers = [
            _Wrapper(
                wrapper_class(workspace, "NHD", backend="fa2"), torch.cuda.Event() if self._on_gpu else None
            )
            for _ in range(NUM_WRAPPERS)
        ]
        self._wrappers = itertools.cycle(wrappers)

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """See `AttentionBackend`. The first time on a machine, compiling takes half a minute."""
        if dtype not in DTYPES:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"has no kernels for {name}: give --dtype bfloat16 or float16, or use triton, which has"
            )
        if head_dim not in HEAD_DIMS:
            raise ValueError(
                f"has kernels for heads of {', '.join(map(str, HEAD_DIMS))}, not of {head_dim}: use triton"
            )
        logger.info("attention: flashinfer compiles its kernels if it has not yet; that takes half a minute")
        started = time.monotonic()
        numbers = torch.arange(2, device=self._device)
        zero, one = numbers[:1], numbers[1:]
        queries = RaggedQueries(zero, one, numbers, one, one[None], page_size=1, host_lens=((1,), (1,)))
        q = torch.zeros(1, num_heads, head_dim, dtype=dtype, device=self._device)
        caches = torch.zeros(2, 2, num_kv_heads, head_dim, dtype=dtype, device=self._device)
        try:
            self.ragged(q, caches[0], caches[1], queries, head_dim**-0.5)
            if self._on_gpu:
                torch.cuda.synchronize(self._device)
        except Exception as error:  # of a compiler that is missing, or does not suit: its message says which
            reason = " ".join(str(error).split())[-400:]
            raise ValueError(
                f"its kernels could not be compiled, which takes nvcc and ninja; or use triton ({reason})"
            ) from error
        logger.info("attention: flashinfer is ready after %.1f s", time.monotonic() - started)

    def ragged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: RaggedQueries, scale: float
    ) -> Tensor:
        """See `AttentionBackend`. Without `queries.host_lens` the first layer's call waits for the device."""
        plan: _Plan | None = queries.plans.get(self.name)
        if plan is None:
            plan = queries.plans[self.name] = self._plan(q, k_cache, queries, scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[plan.num_rows :].zero_()
        if plan.num_rows:
            paged = (-1, queries.page_size, *k_cache.shape[1:])
            plan.inner.run(
                q[: plan.num_rows], (k_cache.view(paged), v_cache.view(paged)), out=out[: plan.num_rows]
            )
        return out

    def block(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        queries: BlockQueries,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        """Refused, as start-up has it refused by its flag: K/V of a block lie beside the pages."""
        raise ValueError("flashinfer runs no draft blocks")

    def _plan(self, q: Tensor, k_cache: Tensor, queries: RaggedQueries, scale: float) -> _Plan:
        rows, keys = queries.host_lens or _read_lens(queries)
        num_rows, num_keys = np.asarray(rows, dtype=np.int64), np.asarray(keys, dtype=np.int64)
        present = np.flatnonzero(num_rows)
        num_rows, num_keys = num_rows[present], num_keys[present]
        wrapper = next(self._wrappers)
        if not len(present):
            return _Plan(wrapper.inner, 0)
        num_pages = -(-num_keys // queries.page_size)
        page_indptr = _indptr(num_pages)
        firsts = present * queries.page_table.shape[1] - page_indptr[:-1]
        places = np.repeat(firsts, num_pages) + np.arange(page_indptr[-1])
        indices = queries.page_table.reshape(-1).index_select(0, upload(places, self._device)).to(torch.int32)
        if wrapper.planned is not None:
            wrapper.planned.synchronize()  # of NUM_WRAPPERS plans ago: over long since
        wrapper.inner.plan(
            self._host(_indptr(num_rows)),
            self._host(page_indptr),
            indices,
            self._host(num_keys - (num_pages - 1) * queries.page_size),
            q.shape[1],
            k_cache.shape[1],
            q.shape[2],
            queries.page_size,
            causal=True,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
            seq_lens=self._host(num_keys),
            max_token_per_sequence=int(num_rows.max()),
        )
        if wrapper.planned is not None:
            wrapper.planned.record()
        return _Plan(wrapper.inner, int(num_rows.sum()))

    def _host(self, values: NDArray[np.int64]) -> Tensor:
        """int32 on the host; pinned for a GPU, so that flashinfer's own copies to it are queued."""
        tensor = torch.from_numpy(values.astype(np.int32))
        return tensor.pin_memory() if self._on_gpu else tensor


def _indptr(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 and the running sums."""
    return np.concatenate((np.zeros(1, dtype=np.int64), lens.cumsum()))


def _read_lens(queries: RaggedQueries) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and keys of the requests that are there, from the device."""
    count = queries.kv_lens.shape[0]
    parts = [queries.qo_indptr, queries.kv_lens]
    if queries.num_reqs is not None:
        parts.append(queries.num_reqs.reshape(1))
    numbers = torch.cat(parts).cpu().numpy()
    num_reqs = count if queries.num_reqs is None else int(numbers[-1])
    return np.diff(numbers[: num_reqs + 1]), numbers[count + 1 : count + 1 + num_reqs]
