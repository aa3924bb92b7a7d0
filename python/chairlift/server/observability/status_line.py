"""One line of the log that says how the engine is doing, every ten seconds that it does something."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from chairlift.server.observability import load
from chairlift.server.observability.load import grown

logger = logging.getLogger(__name__)

INTERVAL = 10.0

_PREEMPTED_FOR = {
    "kv_blocks": "because the KV cache is too small: raise --kv-cache-memory-bytes or lower --max-num-seqs",
    "priority": "for requests of higher priority",
    "fairness": "for tenants that were served less",
    "shortest": "for requests with less work left",
}
"""What the log says of each reason for a preemption."""


def line(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> str | None:
    """Tells what happened between two readings of the engine's counters, `seconds` apart; None if nothing did."""
    prompt, generated = grown(before, now, "prompt_tokens"), grown(before, now, "generated_tokens")
    running, waiting, swapped = now.get("running", 0), now.get("waiting", 0), now.get("swapped", 0)
    if not (prompt or generated or running or waiting or swapped):
        return None
    used = load.kv_cache(now)
    queries = now.get("prefix_queries", 0)
    hits = now.get("prefix_hits", 0) / queries if queries else 0.0
    told = f"running {running:.0f}, waiting {waiting:.0f}, "
    if swapped:
        told += f"swapped {swapped:.0f}, "
    told += f"KV cache {used:.1%}, prefix hits {hits:.1%}, "
    told += f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s"
    if preempted := grown(before, now, "preemptions"):
        reasons = {reason: grown(before, now, f"preemptions_for_{reason}") for reason in _PREEMPTED_FOR}
        why = ", ".join(f"{times:.0f} {_PREEMPTED_FOR[reason]}" for reason, times in reasons.items() if times)
        told += f", preemptions {preempted:.0f}" + (f" ({why})" if why else "")
    return told


async def report(stats: Callable[[], Mapping[str, Any]]) -> None:
    """Logs the line for ever, with averages over the time since the last look."""
    before, since = dict(stats()), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL)
        now, at = dict(stats()), time.monotonic()
        if text := line(before, now, at - since):
            logger.info(text)
        before, since = now, at
