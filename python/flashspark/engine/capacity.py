"""How many KV tokens the pools hold."""

from __future__ import annotations

import os
from dataclasses import dataclass

CPU_MEMORY_SHARE = 0.25
DEFAULT_MEM_FRACTION = 0.88  # of a GPU: weights and KV; the rest is for prefill's activations
# Captured graphs, their intermediates and the libraries' workspaces: the 1,136 of Qwen3-8B's size took 2 GiB.
GRAPH_BYTES = 3 << 30


@dataclass(frozen=True)
class KVMemory:
    """Bytes that the KV pools may take, and why so many."""

    num_bytes: int
    reason: str
    remedy: str  # where they are too few for anything


def cpu_memory(num_bytes: int) -> KVMemory:
    """A share of the machine's memory."""
    reason = f"{CPU_MEMORY_SHARE:.0%} of {num_bytes / 2**30:.1f} GiB memory"
    return KVMemory(
        int(num_bytes * CPU_MEMORY_SHARE), reason, "give --max-total-tokens, or use a smaller model"
    )


def gpu_memory(free_bytes: int, total_bytes: int, fraction: float, logits_bytes: int) -> KVMemory:
    """What is left of `fraction` of a GPU once the weights are there, and room is kept for graphs and their logits."""
    num_bytes = free_bytes - int(total_bytes * (1 - fraction)) - GRAPH_BYTES - logits_bytes
    reason = (
        f"--mem-fraction-static {fraction:g} of {total_bytes / 2**30:.1f} GiB, less weights and "
        f"{(GRAPH_BYTES + logits_bytes) / 2**30:.1f} GiB for graphs"
    )
    remedy = "raise --mem-fraction-static, lower --max-running-requests, or use --device cpu"
    return KVMemory(max(num_bytes, 0), reason, remedy)


@dataclass(frozen=True)
class KVCapacity:
    """Pages of the pools and why there are that many."""

    num_pages: int
    page_size: int
    bytes_per_token: int
    reason: str

    @property
    def num_tokens(self) -> int:
        """Positions that requests can use together."""
        return self.num_pages * self.page_size

    @property
    def num_slots(self) -> int:
        """Slots to allocate: the usable pages and the scratch page."""
        return (self.num_pages + 1) * self.page_size


def available_memory_bytes() -> int:
    """Physical memory this process may use: the machine's, or the control group's limit if lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def decide_capacity(
    max_total_tokens: int | None,
    context_length: int,
    max_running_requests: int,
    page_size: int,
    bytes_per_token: int,
    memory: KVMemory,
) -> KVCapacity:
    """KV pages of the pools.

    Args:
        max_total_tokens: the flag; rounded down to whole pages. None: as much as all requests can use
            together, but at most what `memory` allows.
        bytes_per_token: target and draft K/V of one position.

    Raises:
        ValueError: not even one page.
    """
    wanted = max_running_requests * context_length
    affordable = memory.num_bytes // bytes_per_token
    remedy = "raise --max-total-tokens or lower --page-size"
    if max_total_tokens is not None:
        tokens, reason = max_total_tokens, "--max-total-tokens"
    elif wanted <= affordable:
        tokens, reason = wanted, "every running request at full context"
    else:
        tokens, reason, remedy = affordable, memory.reason, memory.remedy
    num_pages = tokens // page_size if max_total_tokens is not None else -(-tokens // page_size)
    if num_pages < 1:
        raise ValueError(
            f"the KV pool would hold {tokens} tokens ({reason}), less than one page of {page_size}: {remedy}"
        )
    return KVCapacity(num_pages, page_size, bytes_per_token, reason)
