"""Reads the engine's counters for metrics, the dashboard and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.engine.stats import Stats


def coarse(saturation: float) -> float:
    """Rounds `saturation` to halves: enough to tell an idle server from a busy and an overloaded one."""
    return round(2 * saturation) / 2


def load(stats: Stats) -> dict[str, float]:
    """Returns the engine's utilisation by the names in /dashboard/data."""
    return {name: getattr(stats, name) for name in ("kv_cache", "swap", "saturation", "fragmentation")} | {"slots": stats.batch_slots}


def increase(before: float, now: float) -> float:
    """Returns the increase of a counter; a lower value means that the engine restarted and counted from 0."""
    return now - before if now >= before else now
