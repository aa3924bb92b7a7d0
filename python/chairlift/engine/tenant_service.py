"""Reports tenants' service to the other engines of a process and to its parent, so that a tenant has one share of all engines.

The schedulers charge each tenant for its service at the others: see `Scheduler.charge_external`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

SHARE_US = 100_000
"""Interval in microseconds at which engines learn of the service at the others."""


class TenantService:
    """Tells engines what service tenants had at the others."""

    def __init__(self) -> None:
        self._due = 0
        self._for_parent: Counter[str] | None = None  # since the parent's last question; None before the first

    def share(self, engines: Iterable[Engine], now: int) -> None:
        """Tells each engine what tenants had at the others since the last time, if it is time. `now` is in microseconds."""
        if now >= self._due:
            self._due = now + SHARE_US
            self._share(list(engines))

    def exchange(self, engines: Iterable[Engine], external: Mapping[str, int]) -> dict[str, int]:
        """Charges the engines for service in other processes. Returns the service here since the last call; nothing at the first."""
        engines = list(engines)
        self._share(engines)
        for engine in engines:
            engine.charge_external(external)
        service, self._for_parent = self._for_parent, Counter()
        return dict(service or {})

    def _share(self, engines: list[Engine]) -> None:
        taken = [engine.take_service() for engine in engines]
        for at, engine in enumerate(engines):
            external: Counter[str] = Counter()
            for other in taken[:at] + taken[at + 1 :]:
                external.update(other)
            if external:
                engine.charge_external(external)
        if self._for_parent is not None:
            for service in taken:
                self._for_parent.update(service)
