"""Who may wait: every request's place in the queue, from its acceptance until the engine starts it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chairlift.server.errors import ApiError, unavailable
from chairlift.server.keys import Tenant
from chairlift.server.lifecycle import Lifecycle

_SMOOTHING = 0.1
"""What one request weighs in the mean time that requests stay."""


@dataclass(slots=True)
class _Count:
    waiting: int = 0
    open: int = 0


class Admission:
    """Counts the requests of one server, and turns away those that are too many.

    Everything happens in one event loop without waiting, so that no burst gets in more than the limit.
    """

    def __init__(self, max_queued: int | None, stats: Callable[[], Mapping[str, Any]], lifecycle: Lifecycle) -> None:
        """`max_queued` requests may wait, any number if it is None; `stats` gives the engine's newest counters."""
        self._max_queued = max_queued
        self._lifecycle = lifecycle
        self._stats = stats
        self._all = _Count()
        self._tenants: dict[str, _Count] = {}
        self._stay = 0.0

    @property
    def waiting(self) -> int:
        """Requests that were accepted and not yet started."""
        return self._all.waiting

    @property
    def open(self) -> int:
        """Requests that were accepted and have not ended."""
        return self._all.open

    def ticket(self, tenant: Tenant) -> Ticket:
        """A place for a request of `tenant`, which is not taken yet."""
        return Ticket(self, tenant)

    def _check(self, tenant: Tenant, more: int, new: int) -> None:
        """Raises ApiError 429 or 503 unless `more` may wait and `new` may come in."""
        own = self._tenants.get(tenant.name, _Count())
        if tenant.max_requests is not None and own.open + new > tenant.max_requests:
            # One of them is through after this time, if they began one after the other.
            after = self._stay / max(1, own.open)
            raise _too_many(f"{tenant.name} has as many requests in flight as it may, {own.open}: wait for one to end", after)
        if tenant.max_queued is not None and own.waiting + more > tenant.max_queued:
            raise _too_many(f"{tenant.name} has as many requests waiting as may, {own.waiting}: try again later", self._wait())
        if self._max_queued is not None and self._all.waiting + more > self._max_queued:
            message = f"{self._all.waiting} requests are waiting, and {self._max_queued} may (--max-num-queued-reqs)"
            raise unavailable(message, "queue_full", _whole(self._wait()))

    def _wait(self) -> float:
        """Seconds that a request would wait now: until the engine is there, its prediction, and what was accepted since that came."""
        stats = self._stats()
        since = (self._all.waiting + 1) / (stats.get("waiting", 0) + 1)
        return float(stats.get("predicted_wait_us", 0) / 1e6 * max(1.0, since)) + self._lifecycle.ready_in

    def _count(self, tenant: Tenant, waiting: int, open: int = 0) -> None:
        own = self._tenants.setdefault(tenant.name, _Count())
        for count in (self._all, own):
            count.waiting += waiting
            count.open += open
        if not own.open:
            del self._tenants[tenant.name]

    def _left(self, seconds: float) -> None:
        self._stay += _SMOOTHING * (seconds - self._stay) if self._stay else seconds


class Ticket:
    """One request's place in the queue, or as many as it has prompts; given back once, however the request ends."""

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._waiting = 0
        self._since: float | None = None

    def take(self) -> None:
        """Accepts the request; raises ApiError 429 for its tenant's own limit, 503 for a full server."""
        self._admission._check(self._tenant, 1, 1)
        self._admission._count(self._tenant, 1, 1)
        self._waiting, self._since = 1, time.monotonic()

    def widen(self, prompts: int) -> None:
        """Says of how many prompts it turned out to be, each of which waits; raises ApiError as `take` does."""
        more = prompts - self._waiting
        if more > 0:
            self._admission._check(self._tenant, more, 0)
            self._admission._count(self._tenant, more)
            self._waiting += more

    def started(self) -> None:
        """Called when the engine begins one of its prompts. What loses its blocks later does not wait again."""
        if self._waiting:
            self._waiting -= 1
            self._admission._count(self._tenant, -1)

    def release(self) -> None:
        """Called when the request is over, accepted or not."""
        if self._since is not None:
            self._admission._count(self._tenant, -self._waiting, -1)
            self._admission._left(time.monotonic() - self._since)
            self._waiting, self._since = 0, None


def _too_many(message: str, seconds: float) -> ApiError:
    headers = {"retry-after": str(_whole(seconds))}
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def _whole(seconds: float) -> int:
    return max(1, math.ceil(seconds))
