"""The held sequences of an engine: their tenants, limits and leases."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chairlift import _core
from chairlift.errors import SequenceBusy, SequenceDropped, TooManySequences

MAX_PER_TENANT = 1024
"""Most held sequences of one tenant."""


@dataclass(slots=True)
class _Held:
    tenant: str
    lease: int
    """Microseconds after its last use at which it is dropped."""
    expires: float
    """Infinite while a request continues it."""


class HeldSequences:
    """Opens, forks and drops held sequences. A handle belongs to one tenant. Times are microseconds.

    A sequence that was not used for the length of its lease is dropped. Every method raises SequenceDropped for a handle that was dropped.
    """

    def __init__(self, scheduler: _core.Scheduler) -> None:
        self._scheduler = scheduler
        self._held: dict[int, _Held] = {}
        self._counts: dict[str, int] = {}
        self._expires = math.inf  # no lease ends earlier

    def open(self, tenant: str, salt: bytes, lease: int, now: int) -> int:
        """Opens an empty sequence and returns its handle. Raises TooManySequences."""
        self._check_limit(tenant, now)
        return self._enter(self._scheduler.open(tenant, salt, now), _Held(tenant, lease, now + lease))

    def fork(self, handle: int, now: int) -> int:
        """Opens a sequence with the same blocks. Raises TooManySequences."""
        held = self._use(handle, now)
        self._check_limit(held.tenant, now)
        fork = self._scheduler.fork_held(handle, now)
        assert fork is not None  # only this class drops sequences
        return self._enter(fork, _Held(held.tenant, held.lease, now + held.lease))

    def begin(self, handle: int, now: int) -> None:
        """Begins a request that continues a sequence. Raises SequenceBusy if another one does."""
        held = self._use(handle, now)
        if held.expires == math.inf:
            raise SequenceBusy("another request continues this sequence: wait until it has ended, or continue a fork")
        held.expires = math.inf

    def end(self, handle: int, now: int) -> None:
        """Ends the request that continues a sequence, which may have been dropped."""
        if (held := self._held.get(handle)) is not None:
            held.expires = now + held.lease
            self._expires = min(self._expires, held.expires)

    def drop(self, handle: int, now: int) -> None:
        """Drops a sequence. Its blocks are free in the next step."""
        held = self._held.pop(handle, None)
        if held is None:
            return
        self._counts[held.tenant] -= 1
        if not self._counts[held.tenant]:
            del self._counts[held.tenant]
        self._scheduler.drop_held(handle, now)

    def expire(self, now: int) -> None:
        """Drops the sequences whose leases have ended. O(1) if there is none."""
        if now < self._expires:
            return
        for handle in [handle for handle, held in self._held.items() if held.expires <= now]:
            self.drop(handle, now)
        self._expires = min((held.expires for held in self._held.values()), default=math.inf)

    def _enter(self, handle: int, held: _Held) -> int:
        self._held[handle] = held
        self._counts[held.tenant] = self._counts.get(held.tenant, 0) + 1
        self._expires = min(self._expires, held.expires)
        return handle

    def _use(self, handle: int, now: int) -> _Held:
        self.expire(now)
        held = self._held.get(handle)
        if held is None:
            raise SequenceDropped("this sequence was dropped, or its lease has ended: open a new one")
        held.expires = max(held.expires, now + held.lease)
        return held

    def _check_limit(self, tenant: str, now: int) -> None:
        self.expire(now)
        if self._counts.get(tenant, 0) >= MAX_PER_TENANT:
            raise TooManySequences(f"a tenant may hold {MAX_PER_TENANT} sequences: drop some first")
