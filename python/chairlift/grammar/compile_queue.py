"""Grammars that wait to be compiled, in an order that takes turns by group of tenants, and by tenant within a group."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from chairlift.errors import QueueFull
from chairlift.sampling import StructuredOutput

if TYPE_CHECKING:
    from chairlift.grammar.grammar import Grammar

MAX_WAITING, MAX_WAITING_OF_GROUP = 1024, 64
"""Maximum number of grammars that wait, of all tenants and of one group."""


class Work(NamedTuple):
    """A grammar to compile for a tenant. If the future is cancelled before that begins, the grammar leaves the queue.

    Tenants without a key of their own are one group, because clients invent their names.
    """

    structure: StructuredOutput
    group: str
    tenant: str
    future: Future[Grammar]


_Turns = OrderedDict[str, deque[Work]]
"""The grammars of a group's tenants. The first tenant is next; none has an empty queue."""


class CompileQueue:
    """A queue in which the groups come one after the other, and so do the tenants of a group. Each tenant's grammars come in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: OrderedDict[str, _Turns] = OrderedDict()  # the first group is next; none is empty
        self._closed = False

    def put(self, work: Work) -> None:
        """Adds a grammar. Raises QueueFull."""
        with self._changed:
            self._drop_cancelled()
            waiting = {name: sum(map(len, group.values())) for name, group in self._groups.items()}
            if waiting.get(work.group, 0) >= MAX_WAITING_OF_GROUP:
                raise QueueFull(f"{MAX_WAITING_OF_GROUP} of your grammars wait to be compiled, as many as may", retry_after=1.0)
            if sum(waiting.values()) >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} grammars wait to be compiled, as many as may", retry_after=1.0)
            self._groups.setdefault(work.group, OrderedDict()).setdefault(work.tenant, deque()).append(work)
            self._changed.notify()

    def get(self) -> Work | None:
        """Waits for the next grammar, whose future cannot be cancelled any more. Returns None if the queue is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._groups or self._closed)
                if self._closed:
                    return None
                name, group = self._groups.popitem(last=False)
                tenant, waiting = group.popitem(last=False)
                work = waiting.popleft()
                if waiting:
                    group[tenant] = waiting
                if group:
                    self._groups[name] = group
                if work.future.set_running_or_notify_cancel():
                    return work

    def close(self) -> None:
        """Makes `get` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _drop_cancelled(self) -> None:
        works = [work for group in self._groups.values() for queue in group.values() for work in queue if not work.future.cancelled()]
        self._groups.clear()
        for work in works:
            self._groups.setdefault(work.group, OrderedDict()).setdefault(work.tenant, deque()).append(work)
