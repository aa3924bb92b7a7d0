"""Whether the client is still there: work for one that has left is ended at once."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def while_present(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> bool:
    """Runs `app`, cancelled when its client leaves between the end of its request and the end of the answer.

    Before that the application hears of it as it reads the body. Returns whether the client stayed.
    """
    patience = asyncio.timeout(None)
    gone = asyncio.Event()
    watching: asyncio.Task[None] | None = None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        patience.reschedule(0)  # long ago: now

    async def received() -> Message:
        nonlocal watching
        if watching is not None:
            await gone.wait()
            return {"type": "http.disconnect"}
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            watching = asyncio.create_task(watch())
        return message

    async def sent(message: Message) -> None:
        if watching is not None and message["type"] == "http.response.body" and not message.get("more_body", False):
            watching.cancel()  # whoever has the answer may go
        await send(message)

    try:
        async with patience:
            await app(scope, received, sent)
    except TimeoutError:
        if not patience.expired():
            raise
        return False
    finally:
        if watching is not None:
            watching.cancel()
    return True
