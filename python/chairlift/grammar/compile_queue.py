"""Grammars that wait to be compiled, in an order that takes turns by tenant."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from chairlift.errors import QueueFull
from chairlift.sampling import StructuredOutput

if TYPE_CHECKING:
    from chairlift.grammar.grammar import Grammar

MAX_WAITING, MAX_WAITING_OF_TENANT = 1024, 64
"""Maximum number of grammars that wait, of all tenants and of one."""


class Work(NamedTuple):
    """A grammar to compile for a tenant. If the future is cancelled before that begins, the grammar leaves the queue."""

    structure: StructuredOutput
    tenant: str
    future: Future[Grammar]


class CompileQueue:
    """A queue that takes turns by tenant: each tenant's grammars come in order, and the tenants one after the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_tenant: OrderedDict[str, deque[Work]] = OrderedDict()  # the first tenant is next; none has an empty queue
        self._closed = False

    def put(self, work: Work) -> None:
        """Adds a grammar. Raises QueueFull."""
        with self._changed:
            self._drop_cancelled()
            mine = self._by_tenant.get(work.tenant, ())
            if len(mine) >= MAX_WAITING_OF_TENANT:
                raise QueueFull(f"{MAX_WAITING_OF_TENANT} of your grammars wait to be compiled, as many as may", retry_after=1.0)
            if sum(map(len, self._by_tenant.values())) >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} grammars wait to be compiled, as many as may", retry_after=1.0)
            self._by_tenant.setdefault(work.tenant, deque()).append(work)
            self._changed.notify()

    def get(self) -> Work | None:
        """Waits for the next grammar, whose future cannot be cancelled any more. Returns None if the queue is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._by_tenant or self._closed)
                if self._closed:
                    return None
                tenant, waiting = self._by_tenant.popitem(last=False)
                work = waiting.popleft()
                if waiting:
                    self._by_tenant[tenant] = waiting
                if work.future.set_running_or_notify_cancel():
                    return work

    def close(self) -> None:
        """Makes `get` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _drop_cancelled(self) -> None:
        remaining = {tenant: deque(work for work in queue if not work.future.cancelled()) for tenant, queue in self._by_tenant.items()}
        self._by_tenant = OrderedDict((tenant, queue) for tenant, queue in remaining.items() if queue)
