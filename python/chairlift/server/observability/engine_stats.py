"""Reads the engine's counters: usage as shares, and increases between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Stats = Mapping[str, Any]


def batch_slots(stats: Stats) -> float:
    """Share of the batch slots in use."""
    return _share(stats, "running", "slots")


def kv_cache(stats: Stats) -> float:
    """Share of the KV blocks that requests hold."""
    return _complement(stats, "free_blocks", "total_blocks")


def fragmentation(stats: Stats) -> float:
    """Share of the held KV slots without a token."""
    return _complement(stats, "used_tokens", "held_kv_slots")


def swap(stats: Stats) -> float:
    """Share of the host's KV blocks in use."""
    return _complement(stats, "free_host_blocks", "host_blocks")


def saturation(stats: Stats) -> float:
    """Work that arrived in the last ten seconds over the work that could be done: above 1 the queue grows."""
    saturation: float = stats.get("saturation", 0.0)
    return saturation


def coarse(saturation: float) -> float:
    """Rounds `saturation` to halves: enough to tell an idle server from a busy and an overloaded one."""
    return round(2 * saturation) / 2


def load(stats: Stats) -> dict[str, float]:
    """Returns all of the above by the names in /dashboard/data."""
    return {
        "slots": batch_slots(stats),
        "kv_cache": kv_cache(stats),
        "swap": swap(stats),
        "saturation": saturation(stats),
        "fragmentation": fragmentation(stats),
    }


def increase(before: Stats, now: Stats, key: str) -> float:
    """Returns the increase of a counter; a lower value means that the engine restarted and counted from 0."""
    value: float = now.get(key, 0)
    difference: float = value - before.get(key, 0)
    return value if difference < 0 else difference


def _share(stats: Stats, part: str, whole: str) -> float:
    total: float = stats.get(whole, 0)
    used: float = stats.get(part, 0)
    return used / total if total else 0.0


def _complement(stats: Stats, part: str, whole: str) -> float:
    return 1 - _share(stats, part, whole) if stats.get(whole) else 0.0
