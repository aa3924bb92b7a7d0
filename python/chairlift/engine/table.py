"""Start-up logs: the table of decisions, and a warning if the context is too short."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.config import EngineConfig

log = logging.getLogger("chairlift")

SHORT_CONTEXT = 512
"""Tokens. A chat template and a short conversation need about as many."""


def log_decisions(model: str, decisions: Sequence[Sequence[str]]) -> None:
    """Logs the model and each decision (what, value, reason) in columns."""
    rows = [("model", model, ""), *decisions]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for what, value, reason in rows:
        log.info("%s", f"{what:{widths[0]}}  {value:{widths[1]}}  {reason}".rstrip())


def warn_of_short_context(config: EngineConfig, facts: Mapping[str, Any]) -> None:
    """Logs a warning if the KV cache, rather than the model or --max-model-len, limits the context to fewer than SHORT_CONTEXT tokens."""
    context = facts["max_model_len"]
    if context >= SHORT_CONTEXT or context != facts["num_kv_blocks"] * facts["block_size"] or config.max_model_len is not None:
        return
    if config.num_kv_blocks is not None:
        remedy = f"raise --num-kv-blocks, which is {config.num_kv_blocks}"
    elif config.kv_cache_memory_bytes is not None:
        remedy = f"raise --kv-cache-memory-bytes, which is {config.kv_cache_memory_bytes}"
    else:
        remedy = "free some memory, or choose a smaller model"
    log.warning("the KV cache holds only %d tokens, which limits prompt and output together: %s", context, remedy)
