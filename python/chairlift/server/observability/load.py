"""The engine's counters read: how full it is, as shares, and what has grown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Stats = Mapping[str, Any]


def rows(stats: Stats) -> float:
    """Of the batch's places, those taken."""
    return _part(stats, "running", "slots")


def kv_cache(stats: Stats) -> float:
    """Of the KV blocks, those that requests hold."""
    return _rest(stats, "free_blocks", "total_blocks")


def fragmentation(stats: Stats) -> float:
    """Of the KV slots that requests hold, those without a token."""
    return _rest(stats, "used_tokens", "held_kv_slots")


def swap(stats: Stats) -> float:
    """Of the host's KV blocks, those in use."""
    return _rest(stats, "free_host_blocks", "host_blocks")


def saturation(stats: Stats) -> float:
    """Work that arrived in the last ten seconds over work that could be served: 1 and more when the queue grows."""
    share: float = stats.get("saturation", 0.0)
    return share


def grown(before: Stats, now: Stats, key: str) -> float:
    """By how much a counter grew; one that is less than before has begun anew, and counted from 0."""
    value: float = now.get(key, 0)
    more: float = value - before.get(key, 0)
    return value if more < 0 else more


def _part(stats: Stats, some: str, all: str) -> float:
    """How much of one number another is."""
    whole: float = stats.get(all, 0)
    part: float = stats.get(some, 0)
    return part / whole if whole else 0.0


def _rest(stats: Stats, some: str, all: str) -> float:
    """How much of one number another leaves."""
    return 1 - _part(stats, some, all) if stats.get(all) else 0.0
