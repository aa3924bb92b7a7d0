"""Questions to an engine that wait for their answers, and the requests that can be asked about."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from chairlift.checks import text
from chairlift.engine.frames import Frame
from chairlift.errors import EngineDead
from chairlift.outputs import Timeline

T = TypeVar("T")

REMEMBERED = 10_000
"""Maximum number of request ids that `explain` knows. The engine remembers as many ended sequences."""

MAX_ID = 256
"""Most characters of a request id."""


class Questions:
    """The questions that were sent and not answered. `send` sends one."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, question: Callable[[int], Frame]) -> Any:
        """Sends a question with a new number and waits for the answer. Raises EngineDead."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(number))
            return await self._answers[number]
        finally:
            del self._answers[number]

    def answer(self, number: int, answer: Any) -> None:
        """Resolves a question, unless its caller was cancelled."""
        if (asking := self._answers.get(number)) is not None and not asking.done():
            asking.set_result(answer)

    def fail(self, death: EngineDead) -> None:
        """Ends all questions with an error."""
        for asking in self._answers.values():
            if not asking.done():
                asking.set_exception(type(death)(str(death)))


class RememberedRequest(NamedTuple):
    """A request that `explain` knows."""

    tags: range
    ended: list[Timeline]
    """The timelines of choices that ended in an earlier engine."""


class Remembered(Generic[T]):
    """Something about each of the newest requests, by id."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, T] = OrderedDict()  # a dict searches past all that left for its first entry

    def add(self, request_id: str, request: T) -> None:
        """Remembers a request, and forgets the oldest beyond the limit. Raises InvalidRequest for an id that is no text or is too long."""
        text("request_id", request_id, 1, MAX_ID)
        self._requests.pop(request_id, None)  # keeps the newest last
        self._requests[request_id] = request
        if len(self._requests) > REMEMBERED:
            self._requests.popitem(last=False)

    def get(self, request_id: str) -> T | None:
        """What is remembered of a request; None if it is unknown."""
        return self._requests.get(request_id)

    def forget(self, request: T) -> None:
        """Forgets all requests of which this is remembered."""
        self._requests = OrderedDict((request_id, other) for request_id, other in self._requests.items() if other is not request)
