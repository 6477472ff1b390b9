"""What the scheduler may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """What the scheduler may use. Tokens unless named otherwise."""

    context_length: int  # prompt + output of one request
    max_running_requests: int
    num_pages: int
    page_size: int
    chunked_prefill_size: int  # prefill tokens per loop turn; at least 1
    decode_log_interval: int = 40  # decode steps per log line; 0: none
    prefix_cache: bool = True

    @property
    def max_total_num_tokens(self) -> int:
        """KV capacity of the pool."""
        return self.num_pages * self.page_size
