"""The engine's statistics lines: one for each prefill, one for every 20 decode steps.

Owned by the ModelTpServer; only rank 0 writes.
"""

from __future__ import annotations

import logging
import time

from ...memory_pool import TokenToKVPool
from ...support.engine_stats import EngineStats

logger = logging.getLogger(__name__)

DECODE_LOG_INTERVAL = 20
"""Decode steps between two lines."""


class StatsLog:
    """Writes what a reader of the log wants to know: how full the pool is, how long the queue, how fast."""

    def __init__(self, enabled: bool, stats: EngineStats, pool: TokenToKVPool) -> None:
        self.enabled = enabled
        self.stats = stats
        self.pool = pool
        self._then = time.monotonic()
        self._steps_then = self._tokens_then = 0

    def prefill(
        self, num_seq: int, num_cached: int, num_new: int, num_waiting: int, num_running: int
    ) -> None:
        """Call for every batch that is admitted. The hit rate is that of all prompts so far."""
        if not self.enabled:
            return
        cached, computed = self.stats.cached_tokens + num_cached, self.stats.prefill_tokens + num_new
        logger.info(
            f"Prefill batch. #new-seq: {num_seq}, #new-token: {num_new}, #cached-token: {num_cached}, "
            f"cache hit rate: {100 * cached / (cached + computed):.2f}%, #running-req: {num_running}, "
            f"#queue-req: {num_waiting}"
        )

    def decode(self, num_running: int, num_waiting: int) -> None:
        """Call after every decode step; most calls write nothing."""
        if not self.enabled or self.stats.decode_steps - self._steps_then < DECODE_LOG_INTERVAL:
            return
        now = time.monotonic()
        throughput = (self.stats.generated_tokens - self._tokens_then) / (now - self._then)
        self._then, self._steps_then = now, self.stats.decode_steps
        self._tokens_then = self.stats.generated_tokens
        logger.info(
            f"Decode batch. #running-req: {num_running}, #token: {self.pool.used_size}, "
            f"token usage: {self.pool.used_size / self.pool.size:.2f}, "
            f"gen throughput (token/s): {throughput:.2f}, #queue-req: {num_waiting}"
        )
