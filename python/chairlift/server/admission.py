"""Admission control: limits the requests that wait, for the server and for each tenant."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chairlift.server.errors import ApiError, too_many, unavailable
from chairlift.server.keys import Tenant

if TYPE_CHECKING:
    from chairlift.engine.stats import Stats

_SMOOTHING = 0.1
"""Weight of the newest request in the moving average of request durations."""


@dataclass(slots=True)
class _Counts:
    waiting: int = 0
    open: int = 0


class Admission:
    """Counts waiting and open requests, and rejects those above a limit.

    All methods run in one event loop without awaiting, so a burst cannot exceed a limit.
    """

    def __init__(self, max_queued: int | None, stats: Callable[[], Stats], seconds_until_ready: Callable[[], float] = lambda: 0.0) -> None:
        """At most `max_queued` requests may wait (None: no limit).

        `stats` returns the engine's newest counters, `seconds_until_ready` the expected time until it accepts requests.
        """
        self._max_queued = max_queued
        self._seconds_until_ready = seconds_until_ready
        self._stats = stats
        self._all = _Counts()
        self._tenants: dict[str, _Counts] = {}
        self._mean_duration = 0.0

    @property
    def waiting(self) -> int:
        """Requests that were accepted and have not started."""
        return self._all.waiting

    @property
    def open(self) -> int:
        """Requests that were accepted and have not ended."""
        return self._all.open

    def ticket(self, tenant: Tenant) -> Ticket:
        """Returns a ticket for a request of `tenant`, which is not admitted yet."""
        return Ticket(self, tenant)

    def _check(self, tenant: Tenant, more: int, new: int, *, queued: bool = True) -> None:
        """Raises ApiError 429 or 503 unless `more` prompts may wait, in the queue if `queued`, and `new` requests may open."""
        own = self._tenants.get(tenant.name, _Counts())
        if tenant.max_requests is not None and own.open + new > tenant.max_requests:
            # The time until the next of them ends, if they started evenly spaced.
            after = self._mean_duration / max(1, own.open)
            message = f"tenant {tenant.name} has {own.open} requests in flight, its limit: wait for one to end"
            raise too_many(message, "rate_limit_exceeded", after)
        if tenant.max_queued is not None and own.waiting + more > tenant.max_queued:
            message = f"tenant {tenant.name} has {own.waiting} requests waiting, its limit: try again later"
            raise too_many(message, "rate_limit_exceeded", self._predicted_wait())
        if queued and self._max_queued is not None and self._all.waiting + more > self._max_queued:
            message = f"{self._all.waiting} requests are waiting, the limit is {self._max_queued} (--max-num-queued-reqs)"
            raise unavailable(message, "queue_full", self._predicted_wait())

    def _check_possible(self, tenant: Tenant, prompts: int, *, queued: bool) -> None:
        """Raises ApiError 400 for a request with more prompts than may ever wait."""
        limits = (tenant.max_queued, self._max_queued if queued else None)
        most = min((limit for limit in limits if limit is not None), default=prompts)
        if prompts > most:
            raise ApiError(400, f"{prompts} prompts in one request, at most {most} may wait: send fewer")

    def _predicted_wait(self) -> float:
        """Seconds that a request arriving now would wait: engine start-up, the engine's prediction, and requests accepted since it."""
        stats = self._stats()
        since = (self._all.waiting + 1) / (stats.waiting + 1)
        return stats.predicted_wait_us / 1e6 * max(1.0, since) + self._seconds_until_ready()

    def _count(self, tenant: Tenant, waiting: int, open: int = 0, *, queued: bool = True) -> None:
        own = self._tenants.setdefault(tenant.name, _Counts())
        own.waiting += waiting
        own.open += open
        self._all.open += open
        if queued:
            self._all.waiting += waiting
        if not own.open:
            del self._tenants[tenant.name]

    def _record_duration(self, seconds: float) -> None:
        self._mean_duration += _SMOOTHING * (seconds - self._mean_duration) if self._mean_duration else seconds


class Ticket:
    """One request's entry in the queue, with a count of its waiting prompts; released once, when the request ends."""

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._waiting = 0
        self._queued = True
        self._admitted_at: float | None = None
        self._releases: list[Callable[[], None]] = []
        self._starts: list[Callable[[], None]] = []

    @property
    def tenant(self) -> Tenant:
        """Who sent the request."""
        return self._tenant

    def on_start(self, call: Callable[[], None]) -> None:
        """Adds something to call when the engine starts the first of the prompts."""
        self._starts.append(call)

    def on_release(self, call: Callable[[], None]) -> None:
        """Adds something to call when the request is over."""
        self._releases.append(call)

    def admit(self, *, queued: bool = True) -> None:
        """Admits the request; raises ApiError 429 at its tenant's limit, 503 if the queue is full.

        A request that is not `queued` never waits for the engine, so it takes no place in the queue. Among its tenant's requests it counts
        as waiting.
        """
        self._admission._check(self._tenant, 1, 1, queued=queued)
        self._admission._count(self._tenant, 1, 1, queued=queued)
        self._queued = queued
        self._waiting, self._admitted_at = 1, time.monotonic()

    def add_prompts(self, prompts: int) -> None:
        """Sets the number of prompts, each of which waits on its own; raises ApiError as `admit` does, and 400 if they never may wait."""
        more = prompts - self._waiting
        if more > 0:
            self._admission._check_possible(self._tenant, prompts, queued=self._queued)
            self._admission._check(self._tenant, more, 0, queued=self._queued)
            self._admission._count(self._tenant, more, queued=self._queued)
            self._waiting += more

    def started(self) -> None:
        """Called when the engine starts one of the prompts. A preempted request does not count as waiting again."""
        while self._starts:
            self._starts.pop()()
        if self._waiting:
            self._waiting -= 1
            self._admission._count(self._tenant, -1, queued=self._queued)

    def release(self) -> None:
        """Called when the request is over, admitted or not."""
        if self._admitted_at is not None:
            self._admission._count(self._tenant, -self._waiting, -1, queued=self._queued)
            self._admission._record_duration(time.monotonic() - self._admitted_at)
            self._waiting, self._admitted_at = 0, None
        while self._releases:
            self._releases.pop()()
