"""One line of the log that says how the engine is doing, every ten seconds that it does something."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

INTERVAL = 10.0


def line(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> str | None:
    """Tells what happened between two readings of the engine's counters, `seconds` apart; None if nothing did."""
    prompt = now.get("prompt_tokens", 0) - before.get("prompt_tokens", 0)
    generated = now.get("generated_tokens", 0) - before.get("generated_tokens", 0)
    running, waiting = now.get("running", 0), now.get("waiting", 0)
    if not (prompt or generated or running or waiting):
        return None
    total = now.get("total_blocks", 0)
    used = 1 - now.get("free_blocks", 0) / total if total else 0.0
    queries = now.get("prefix_queries", 0)
    hits = now.get("prefix_hits", 0) / queries if queries else 0.0
    return (
        f"running {running:.0f}, waiting {waiting:.0f}, KV cache {used:.1%}, prefix hits {hits:.1%}, "
        f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s"
    )


async def report(stats: Callable[[], Mapping[str, float]]) -> None:
    """Logs the line for ever, with averages over the time since the last look."""
    before, since = dict(stats()), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL)
        now, at = dict(stats()), time.monotonic()
        if text := line(before, now, at - since):
            logger.info(text)
        before, since = now, at
