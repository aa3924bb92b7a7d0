"""Requests of a tenant that has taken much of the server's own time wait in front of the application, in virtual time."""

import asyncio

import pytest
from fast_forward import FastForward
from scripted_engine import ScriptedEngine
from server_here import MODEL

from chairlift.server.keys import read_keys
from chairlift.server.middleware.access import AccessMiddleware, AccessPolicy
from chairlift.server.middleware.disconnect import AHEAD_BYTES
from chairlift.server.model import ServedModel
from chairlift.server.service import Service
from chairlift.server.work import CURRENT_WORK


async def received(receive):
    """The whole body; None if the client goes before."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body, more = body + message["body"], message["more_body"]
    return body


class Server:
    """The middleware before an application that works, or lasts, as long as a request's path says."""

    def __init__(self):
        self.service = Service([ServedModel(MODEL, ScriptedEngine())])
        policy = AccessPolicy(read_keys("alice=a,bob=b,carol=c", None, "operator"))
        self._middleware = AccessMiddleware(self._app, self.service, policy)
        self.contexts, self.bodies = [], []

    async def _app(self, scope, receive, send):
        kind, _, seconds = scope["path"].removeprefix("/").partition("/")
        self.contexts.append(scope["state"]["context"])
        self.bodies.append(await received(receive))
        if kind == "lasts":
            await asyncio.sleep(float(seconds))
        elif kind in ("works", "starts"):
            CURRENT_WORK.get().seconds += float(seconds)
        if kind == "starts":
            scope["state"]["ticket"].started()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, key, path, gone=None, parts=(b"body",), whole=True):
        """Sends a request, whose client goes at the event `gone`. Returns the first message of the answer and when it came.

        The body arrives in `parts`, each 0.5 s after the one before. Unless it is `whole`, more of it does not come.
        """
        pending, answers = list(parts), []

        async def receive():
            if pending:
                await asyncio.sleep(0.5 if len(pending) < len(parts) else 0)
                return {"type": "http.request", "body": pending.pop(0), "more_body": bool(pending) or not whole}
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            answers.append(message)

        headers = [(b"authorization", f"Bearer {key}".encode())]
        await self._middleware({"type": "http", "method": "POST", "path": path, "headers": headers, "app": None}, receive, send)
        return (answers[0] if answers else None), asyncio.get_running_loop().time()


def run(test):
    """Runs a test with a server, beside a request of bob's that lasts for 20 s, after one of alice's that works for long."""

    async def main():
        server = Server()
        other = asyncio.create_task(server.ask("b", "/lasts/20"))
        await asyncio.sleep(0.1)
        assert (await server.ask("a", "/works/1000"))[1] < 1
        await test(server)
        await other

    with asyncio.Runner(loop_factory=FastForward) as runner:
        runner.run(main())


def test_a_tenant_that_took_much_waits_and_its_timeline_says_so():
    async def test(server):
        assert (await server.ask("b", "/works/0"))[1] < 1
        assert "pace" not in server.contexts[-1].elapsed()
        assert (await server.ask("a", "/works/0"))[1] == 20
        spent = server.contexts[-1].elapsed()
        assert list(spent) == ["receive", "pace", "tokenize"]
        assert min(spent.values()) >= 0 < spent["pace"]

    run(test)


def test_what_an_engine_starts_costs_nothing():
    async def test(server):
        for _ in range(3):
            assert (await server.ask("c", "/starts/1000"))[1] < 1

    run(test)


@pytest.mark.parametrize(("key", "path"), [("operator", "/works/1000"), ("none", "/live"), ("none", "/ready"), ("none", "/health")])
def test_operators_and_probes_never_wait(key, path):
    async def test(server):
        for _ in range(2):
            assert (await server.ask(key, path))[1] < 1

    run(test)


PARTS = [(b"body",), (b"x" * AHEAD_BYTES * 3,), (b"x", b"y")]


@pytest.mark.parametrize(("parts", "whole"), [*((parts, True) for parts in PARTS), ((), False), ((b"x",), False), ((b"x", b"y"), False)])
def test_a_client_that_goes_leaves_its_place(parts, whole):
    async def test(server):
        gone = asyncio.Event()
        left = asyncio.create_task(server.ask("a", "/works/0", gone, parts, whole))
        await asyncio.sleep(1)
        assert (server.service.pacing.waiting, server.service.open) == (1, 2)
        gone.set()
        answer, when = await left
        assert (answer, round(when), server.service.pacing.waiting, server.service.open, len(server.contexts)) == (None, 1, 0, 1, 2)

    run(test)


@pytest.mark.parametrize("parts", [*PARTS, (b"x" * AHEAD_BYTES, b"y", b"z"), (b"x",) * 100])
def test_a_body_that_arrives_before_and_in_its_turn_is_whole(parts):
    async def test(server):
        answer, when = await server.ask("a", "/works/0", parts=parts)
        assert (answer["status"], when >= 20, server.bodies[-1]) == (200, True, b"".join(parts))

    run(test)


def test_little_of_a_body_is_received_before_its_turn():
    async def test(server):
        gone = asyncio.Event()
        gone.set()
        answer, when = await server.ask("a", "/works/0", gone, (b"x" * AHEAD_BYTES, b"y"), whole=False)
        assert (answer["status"], when, server.bodies[-1]) == (200, 20.5, None)

    run(test)


def test_too_many_that_wait_are_refused(monkeypatch):
    monkeypatch.setattr("chairlift.server.pacing.MAX_WAITING", 1)

    async def test(server):
        first = asyncio.create_task(server.ask("a", "/works/0"))
        await asyncio.sleep(0.1)
        refused, _ = await server.ask("a", "/works/0")
        headers = dict(refused["headers"])
        assert (refused["status"], headers[b"connection"]) == (429, b"close")
        assert int(headers[b"retry-after"]) > 1
        assert (await first)[0]["status"] == 200

    run(test)
