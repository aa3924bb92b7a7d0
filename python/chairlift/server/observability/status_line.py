"""Logs one line about the engine's load every ten seconds, while it is busy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from chairlift.server.observability import engine_stats
from chairlift.server.observability.engine_stats import increase
from chairlift.timeline import PREEMPTION_REASONS

logger = logging.getLogger(__name__)

INTERVAL = 10.0

_ADVICE = {"kv_blocks": ": raise --kv-cache-memory-bytes or lower --max-num-seqs"}
"""Advice that the log adds to a preemption reason."""


def format_line(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> str | None:
    """Describes the change between two readings of the engine's counters, `seconds` apart; None if the engine was idle."""
    prompt, generated = increase(before, now, "prompt_tokens"), increase(before, now, "generated_tokens")
    running, waiting, swapped = now.get("running", 0), now.get("waiting", 0), now.get("swapped", 0)
    if not (prompt or generated or running or waiting or swapped):
        return None
    used = engine_stats.kv_cache(now)
    queries = now.get("prefix_queries", 0)
    hits = now.get("prefix_hits", 0) / queries if queries else 0.0
    text = f"running {running:.0f}, waiting {waiting:.0f}, "
    if swapped:
        text += f"swapped {swapped:.0f}, "
    text += f"KV cache {used:.1%}, prefix hits {hits:.1%}, "
    text += f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s"
    if preempted := increase(before, now, "preemptions"):
        reasons = {reason: increase(before, now, f"preemptions_for_{reason}") for reason in PREEMPTION_REASONS}
        why = ", ".join(f"{times:.0f} {PREEMPTION_REASONS[reason]}{_ADVICE.get(reason, '')}" for reason, times in reasons.items() if times)
        text += f", preemptions {preempted:.0f}" + (f" ({why})" if why else "")
    return text


async def report(stats: Callable[[], Mapping[str, Any]]) -> None:
    """Logs the line forever, with averages over the last interval."""
    before, since = dict(stats()), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL)
        now, at = dict(stats()), time.monotonic()
        if line := format_line(before, now, at - since):
            logger.info(line)
        before, since = now, at
