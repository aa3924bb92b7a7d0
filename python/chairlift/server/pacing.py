"""Lets a group of tenants wait that has taken more than its share of the server's own time, while requests of others are open.

The server parses, tokenizes, stores files and refuses on the same cores as the steps of an engine. What leads to a step is not counted:
the scheduler shares the steps. All other work of all groups together gets SHARE of the cores in the long run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from chairlift.server.errors import too_many
from chairlift.server.work import Work

SHARE = 0.05
"""Part of the cores that requests which no engine starts may take together, while requests of other groups are open."""

CREDIT = 1.0
"""Seconds after which a group's share must have paid for its requests, or its next one waits."""

MAX_COST = 60.0
"""Seconds that one request makes its group wait at most, however much work it was and however many groups share."""

MAX_WAITING = 64
"""Requests of a group that may wait. Further ones are refused."""

_SMOOTHING = 0.25
"""Weight of the newest request in the moving average of a group's requests."""


@dataclass(slots=True)
class _Account:
    """What a group has used."""

    paid_at: float
    """When its share has paid for its requests, in seconds of the event loop's clock."""
    usual: float = 0.0
    """Seconds of work of a request: a moving average."""
    open: int = 0
    """Requests that have had their turn and have not ended."""
    waiting: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The first of the waiting requests holds it."""

    def pay(self, seconds: float) -> None:
        """Moves the time at which the share has paid; of less than no seconds, back."""
        if seconds:
            self.paid_at = max(self.paid_at, _now()) + seconds


class Pacing:
    """The accounts of all groups that have open requests or used time that their share has not paid for."""

    def __init__(self, cores: float) -> None:
        self._rate = SHARE * cores
        self._accounts: dict[str, _Account] = {}
        self._open = 0
        """Open requests of all groups."""
        self._changed = asyncio.Event()
        """Set when a request has ended or an engine has started it, for those that wait."""

    def __len__(self) -> int:
        """Number of groups with open or waiting requests, or that owe time."""
        return len(self._accounts)

    @property
    def waiting(self) -> int:
        """Requests of all groups that wait for their turn."""
        return sum(account.waiting for account in self._accounts.values())

    def must_wait(self, group: str | None) -> bool:
        """Whether a request of the group would wait now."""
        account = None if group is None else self._accounts.get(group)
        return account is not None and (account.waiting > 0 or self._wait(account) > 0)

    @contextlib.asynccontextmanager
    async def turn(self, group: str | None, work: Work) -> AsyncIterator[Callable[[], None]]:
        """Lets a request of the group run in its turn, and counts its work when it has ended. One of no group neither waits nor is counted.

        The result is called when an engine starts the request, which then costs nothing: the scheduler shares the steps. Raises ApiError
        429 if too many requests of the group wait.
        """
        account = _Account(0.0) if group is None else self._accounts.setdefault(group, _Account(_now()))
        if group is not None:
            await self._await_turn(account)
        account.open += 1
        self._open += 1
        # Until it ends it counts as much as the group's usual request: else all that are sent together would run together.
        expected = self._cost(account, account.usual)
        account.pay(expected)
        settled = False

        def settle(seconds: float = 0.0) -> None:
            nonlocal settled
            if not settled:
                settled = True
                account.usual += _SMOOTHING * (seconds - account.usual)
                account.pay(self._cost(account, seconds) - expected)
                self._changed.set()

        try:
            yield settle
        finally:
            account.open -= 1
            self._open -= 1
            settle(work.seconds)
            self._changed.set()
            self._forget_idle()

    async def _await_turn(self, account: _Account) -> None:
        """Waits until the group's share has paid for its earlier requests, or no requests of others are open."""
        if account.waiting >= MAX_WAITING:
            message = f"{MAX_WAITING} requests of this tenant wait for their share of the server's time: send fewer at a time"
            raise too_many(message, "rate_limit_exceeded", self._wait(account))
        account.waiting += 1
        try:
            async with account.turn:
                while (seconds := self._wait(account)) > 0:
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await self._changed.wait()
        finally:
            account.waiting -= 1

    def _wait(self, account: _Account) -> float:
        """Seconds that the group's next request has to wait if no other request ends."""
        return account.paid_at - CREDIT - _now() if self._open > account.open else 0.0

    def _cost(self, account: _Account, seconds: float) -> float:
        """Seconds in which the group's share pays for so much work."""
        now = _now()
        owing = sum(one.paid_at > now for one in self._accounts.values() if one is not account) + 1
        return min(MAX_COST, seconds * owing / self._rate)

    def _forget_idle(self) -> None:
        """Drops the accounts of groups that have no requests and owe nothing."""
        now = _now()
        self._accounts = {group: one for group, one in self._accounts.items() if one.open or one.waiting or one.paid_at > now}


def _now() -> float:
    return asyncio.get_running_loop().time()
