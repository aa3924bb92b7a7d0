"""Logs: JSON records with the id of the request, access logs without secrets, and a line about the engine's load every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping

from chairlift import process_log
from chairlift.engine.stats import Stats
from chairlift.server.observability.engine_stats import increase
from chairlift.server.observability.request_context import CURRENT_REQUEST
from chairlift.timeline import PREEMPTION_REASONS

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds between two lines about the load."""

_ACCESS = ("client", "method", "path", "http_version", "status")
"""The arguments of a record of uvicorn's access log."""
_QUERY_VALUE = re.compile(r"(?<=[?&])([A-Za-z_]{1,32}=)?[^&]+")
_MAX_PATH = 1024
"""Characters of a path, and of a method, in the access log: clients may send many kilobytes, without a key."""
_ADVICE = {"kv_blocks": ": raise --kv-cache-memory-bytes or lower --max-num-seqs"}
"""Advice that the log adds to a preemption reason."""


def redact_query(record: logging.LogRecord) -> bool:
    """Log filter that hides the values of a URL's query, where a client may have put its API key, and cuts long paths and methods."""
    if isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
        client, method, path, *rest = record.args
        redacted = _QUERY_VALUE.sub(lambda match: f"{match[1] or ''}[redacted]", str(path))
        record.args = (client, str(method)[:_MAX_PATH], redacted[:_MAX_PATH], *rest)
    return True


class JsonFormatter(process_log.JsonFormatter):
    """Formats a record as one line, with the request that it is about."""

    def more(self, record: logging.LogRecord) -> dict[str, object]:
        """The id of the request, and the parts of a line of the access log."""
        line: dict[str, object] = {}
        if (context := CURRENT_REQUEST.get()) is not None:
            line["request_id"] = context.request_id
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
            line |= zip(_ACCESS, record.args, strict=True)
        return line


def load_line(earlier: Mapping[int, Stats], later: Mapping[int, Stats], seconds: float) -> str | None:
    """Describes the change between two readings of the engines' counters by number, `seconds` apart; None if all were idle."""
    now = Stats.merged([*later.values()])

    def since(key: str) -> float:  # of each engine: one that was restarted counts from 0, beside others that go on
        return sum(increase(getattr(earlier.get(number, Stats()), key), getattr(stats, key)) for number, stats in later.items())

    prompt, generated = since("computed_prompt_tokens"), since("generated_tokens")
    if not (prompt or generated or now.running or now.waiting or now.swapped):
        return None
    hits = now.prefix_hits / now.prefix_queries if now.prefix_queries else 0.0
    text = f"running {now.running}, waiting {now.waiting}, "
    if now.swapped:
        text += f"swapped {now.swapped}, "
    text += f"KV cache {now.kv_cache:.1%}, prefix hits {hits:.1%}, "
    if lost := since("lost_hit_tokens"):
        text += f"cached without a state {lost:.0f} tokens, "
    text += f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s"
    read, written, evicted = (since(f"disk_blocks_{what}") for what in ("read", "written", "evicted"))
    if read or written or evicted:
        text += f", KV blocks on disk: {read:.0f} read, {written:.0f} written, {evicted:.0f} evicted"
    if preempted := since("preemptions"):
        reasons = {reason: since(f"preemptions_for_{reason}") for reason in PREEMPTION_REASONS}
        why = ", ".join(f"{times:.0f} {PREEMPTION_REASONS[reason]}{_ADVICE.get(reason, '')}" for reason, times in reasons.items() if times)
        text += f", preemptions {preempted:.0f}" + (f" ({why})" if why else "")
    return text


async def log_load(stats: Callable[[], Mapping[int, Stats]], label: str = "") -> None:
    """Logs the line forever, after `label`, with averages over the last interval. `stats` returns the stats of each engine by number."""
    before, since = stats(), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL)
        now, at = stats(), time.monotonic()
        if line := load_line(before, now, at - since):
            logger.info("%s%s", label, line)
        before, since = now, at
