"""Cancels a request when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

AHEAD_BYTES = 1 << 16
"""Bytes of an incomplete body after which no more is received ahead."""


async def run_until_disconnect(app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, ahead: bool = False) -> bool:
    """Runs `app` and cancels it if the client disconnects before the response is complete.

    A disconnect while the body is still being read reaches `app` as usual. With `ahead`, messages are received before `app` asks for the
    first one, and a disconnect until then cancels it. Returns False if the client disconnected.
    """
    deadline = asyncio.timeout(None)
    disconnected = asyncio.Event()
    watcher: asyncio.Task[None] | None = None

    def leave() -> None:
        disconnected.set()
        deadline.reschedule(0)  # expire immediately

    early = _Ahead(receive, leave) if ahead else None
    receive = receive if early is None else early.receive

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    async def received() -> Message:
        nonlocal watcher
        if watcher is not None:
            await disconnected.wait()
            return {"type": "http.disconnect"}
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            watcher = asyncio.create_task(watch())
        return message

    async def sent(message: Message) -> None:
        nonlocal watcher
        if message["type"] == "http.response.body":
            if message.get("more_body", False):
                watcher = watcher or asyncio.create_task(watch())  # `app` answers without reading the body, as it does for GET
            elif watcher is not None:
                watcher.cancel()  # the response is complete; a disconnect no longer matters
        await send(message)

    try:
        async with deadline:
            await app(scope, received, sent)
    except TimeoutError:
        if not deadline.expired():
            raise
        return False
    finally:
        if watcher is not None:
            watcher.cancel()
        if early is not None:
            early.close()
    return True


class _Ahead:
    """Receives messages before an application asks for the first one, and calls `leave` if one of these is a disconnect."""

    def __init__(self, receive: Receive, leave: Callable[[], None]) -> None:
        self._receive, self._leave = receive, leave
        self._messages = asyncio.Queue[Message]()
        self._asked = False
        self._task = asyncio.create_task(self._read())

    async def receive(self) -> Message:
        """Returns the next message."""
        self._asked = True
        # The task ends right after its last message.
        return await (self._receive() if self._task.done() and self._messages.empty() else self._messages.get())

    def close(self) -> None:
        """Receives no more."""
        self._task.cancel()

    async def _read(self) -> None:
        size, more = 0, True
        while size < AHEAD_BYTES or not more:
            message = await self._receive()
            gone = message["type"] == "http.disconnect"
            if gone and not self._asked:
                self._leave()
            else:
                self._messages.put_nowait(message)
            if gone:
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
