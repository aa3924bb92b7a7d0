"""Cancels a request when its client disconnects."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def run_until_disconnect(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> bool:
    """Runs `app` and cancels it if the client disconnects before the response is complete.

    A disconnect while the body is still being read reaches `app` as usual. Returns False if the client disconnected.
    """
    deadline = asyncio.timeout(None)
    disconnected = asyncio.Event()
    watcher: asyncio.Task[None] | None = None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()
        deadline.reschedule(0)  # expire immediately

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
    return True
