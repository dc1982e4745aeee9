"""The log line of a busy engine, every ten seconds: what it did since the last one, and how it stands."""

import time
from collections.abc import Callable
from copy import copy

from octavo.log import logger
from octavo.messages import SchedulerStats

SECONDS = 10.0


class StatsLog:
    def __init__(self, stats: SchedulerStats, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told, self._told_at = copy(stats), clock()

    def turn(self, stats: SchedulerStats) -> None:
        """Called between steps, and when the engine has something to do again."""
        now = self._clock()
        if now - self._told_at < SECONDS:
            return
        if stats.generation_tokens + stats.prompt_tokens > self._told.generation_tokens + self._told.prompt_tokens:
            logger.info(_line(self._told, stats, now - self._told_at))
        self._told, self._told_at = copy(stats), now


def _line(before: SchedulerStats, now: SchedulerStats, seconds: float) -> str:
    usable = now.num_blocks - 1  # block 0 is the null block
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    return (
        f"Avg prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, Preemptions: {now.preemptions - before.preemptions}, "
        f"KV cache usage: {100 * (usable - now.free_blocks) / usable:.1f}%, "
        f"Prefix cache hit rate: {100 * hits / queries if queries else 0:.1f}%"
    )
