"""Lets a group of tenants wait that has taken more than its share of the server's own time, while requests of others are open.

The server parses, tokenizes, stores files and refuses on the same cores as the steps of an engine. What leads to a step is not counted:
the scheduler shares the steps. All other work of all groups together gets SHARE of the cores in the long run.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from chairlift.server.errors import ApiError, too_many
from chairlift.server.work import Work

SHARE = 0.05
"""Part of the cores that requests which no engine starts may take together, while requests of other groups are open."""

CREDIT = 1.0
"""Seconds after which a group's share must have paid for its requests, or its next one waits."""

MAX_COST = 60.0
"""Seconds that one request makes its group wait at most, however much work it was and however many groups share."""

MAX_WAITING = 64
"""Requests of a group that may wait. Further ones are refused."""

MAX_WAIT = 300.0
"""Seconds that a request waits at most, or it is refused: clients give up after some minutes, OpenAI's after ten."""

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
    """Requests that have had their turn and have not ended, but for background work."""
    waiting: int = 0
    users: int = 0
    """All requests that wait or have not ended."""
    look_at: float = math.inf
    """When to see whether its share has paid for its requests; infinite while it owes nothing."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The first of the waiting requests holds it."""


class Pacing:
    """The accounts of all groups that have open requests or used time that their share has not paid for."""

    def __init__(self, cores: float) -> None:
        self._rate = SHARE * cores
        self._accounts: dict[str, _Account] = {}
        self._debts: list[tuple[float, str]] = []
        """A heap of when to look at which account that owes. Of several times of an account, its own `look_at` counts."""
        self._owing = 0
        self._open = 0
        """Open requests of all groups, but for background work."""
        self._changed = asyncio.Event()
        """Set when a request has ended or an engine has started it, for those that wait."""

    def __len__(self) -> int:
        """Number of groups with open or waiting requests, or that owe time."""
        self._forget_paid()
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
    async def turn(self, group: str | None, work: Work, *, background: bool = False) -> AsyncIterator[Callable[[], None]]:
        """Lets a request of the group run in its turn, and counts its work when it has ended. One of no group neither waits nor is counted.

        The result is called when an engine starts the request, which then costs nothing: the scheduler shares the steps. Raises ApiError
        429 if too many requests of the group wait, or would for too long. Background work waits as long as it must, and no other group
        waits because of it.
        """
        account = _Account(0.0) if group is None else self._accounts.setdefault(group, _Account(_now()))
        account.users += 1
        try:
            if group is not None:
                await self._await_turn(account, background)
            account.open += not background
            self._open += not background
            try:
                async with self._counted(group, account, work) as settle:
                    yield settle
            finally:
                account.open -= not background
                self._open -= not background
                self._changed.set()
        finally:
            account.users -= 1
            if group is not None and not account.users and account.look_at == math.inf:
                del self._accounts[group]

    @contextlib.asynccontextmanager
    async def _counted(self, group: str | None, account: _Account, work: Work) -> AsyncIterator[Callable[[], None]]:
        """Lets the group pay for a request. The result is called when it costs nothing more."""
        # Until it ends it counts as much as the group's usual request: else all that are sent together would run together.
        expected = self._cost(account, account.usual)
        self._pay(group, account, expected)
        settled = False

        def settle(seconds: float = 0.0) -> None:
            nonlocal settled
            if not settled:
                settled = True
                account.usual += _SMOOTHING * (seconds - account.usual)
                self._pay(group, account, self._cost(account, seconds) - expected)
                self._changed.set()

        try:
            yield settle
        finally:
            settle(work.seconds)

    async def _await_turn(self, account: _Account, background: bool) -> None:
        """Waits until the group's share has paid for its earlier requests, or no requests of others are open."""
        if not background:
            self._check_wait(account)
        account.waiting += 1
        try:
            # What is expected is too little while the group's requests become longer.
            async with asyncio.timeout(None if background else MAX_WAIT) as longest, account.turn:
                while (seconds := self._wait(account)) > 0:
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await self._changed.wait()
        except TimeoutError:
            assert longest.expired()
            raise self._refusal(account, f"this request has waited {MAX_WAIT:g} s") from None
        finally:
            account.waiting -= 1

    def _check_wait(self, account: _Account) -> None:
        """Raises ApiError 429 if too many requests of the group wait, or if the next one would wait for too long."""
        wait = self._wait(account)
        expected = wait + account.waiting * self._cost(account, account.usual)
        if account.waiting >= MAX_WAITING:
            raise self._refusal(account, f"{MAX_WAITING} requests wait")
        if wait > 0 and expected > MAX_WAIT:
            raise self._refusal(account, f"this request would wait {expected:.0f} s")

    def _refusal(self, account: _Account, reason: str) -> ApiError:
        message = f"this tenant has used its share of the server's time ({reason}): send fewer requests at a time"
        return too_many(message, "rate_limit_exceeded", self._wait(account))

    def _wait(self, account: _Account) -> float:
        """Seconds that the group's next request has to wait if no other request ends."""
        return account.paid_at - CREDIT - _now() if self._open > account.open else 0.0

    def _cost(self, account: _Account, seconds: float) -> float:
        """Seconds in which the group's share pays for so much work."""
        self._forget_paid()
        owing = self._owing + (account.look_at == math.inf)
        return min(MAX_COST, seconds * owing / self._rate)

    def _pay(self, group: str | None, account: _Account, seconds: float) -> None:
        """Moves the time at which the group's share has paid; of less than no seconds, back."""
        if group is None or not seconds:
            return
        account.paid_at = max(account.paid_at, _now()) + seconds
        self._note_debt(group, account)

    def _note_debt(self, group: str, account: _Account) -> None:
        if account.paid_at < account.look_at:  # also if the group is given back what it has not used
            self._owing += account.look_at == math.inf
            account.look_at = account.paid_at
            heapq.heappush(self._debts, (account.paid_at, group))

    def _forget_paid(self) -> None:
        """Takes the accounts that owe nothing any longer from those that owe, and drops those that have no requests either."""
        while self._debts and self._debts[0][0] <= _now():
            at, group = heapq.heappop(self._debts)
            account = self._accounts.get(group)
            if account is None or account.look_at != at:
                continue
            account.look_at = math.inf
            self._owing -= 1
            if account.paid_at > _now():
                self._note_debt(group, account)
            elif not account.users:
                del self._accounts[group]


def _now() -> float:
    return asyncio.get_running_loop().time()
