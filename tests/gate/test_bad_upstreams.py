"""Upstreams that answer with anything, stall, leave, or are gates themselves."""

import asyncio
import base64
import contextlib
import signal

import httpx
import pytest
from gate_here import Server, gate_here, until

from chairlift.gate.whole_events import MAX_EVENT, WholeEvents

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\n"
BODY = b"content-length: 2\r\n\r\n{}"
EVENT = b"data: {}\n\n"
STREAM = OK + b"content-type: text/event-stream\r\nconnection: close\r\n\r\n"


@contextlib.asynccontextmanager
async def behind(answer, **settings):
    """A server, the address of a gate in front of it, and a client."""
    async with Server(answer).running() as server, gate_here(server.url, **settings) as base, httpx.AsyncClient(timeout=30) as client:
        yield server, base, client


PASS = {
    "a page with the status 200": OK + b"content-type: text/html\r\ncontent-length: 6\r\n\r\n<html>",
    "a page with the status 502": b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>",
    "a redirect": b"HTTP/1.1 308 Moved\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 6\r\n\r\n<html>",
    "a redirect to nowhere": b"HTTP/1.1 302 Found\r\nlocation: http://[\r\ncontent-length: 6\r\n\r\n<html>",
    "early hints first": b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + OK + b"content-length: 6\r\n\r\n<html>",
    "no length": OK + b"\r\n<html>",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\n<html>",
    "a page for all origins": OK + b"access-control-allow-origin: *\r\ncontent-length: 6\r\n\r\n<html>",
    "no content type": OK + b"content-type: ;;;/\xff\r\ncontent-length: 6\r\n\r\n<html>",
}
FAIL = {
    "nothing": b"",
    "no HTTP": b"\x00\x01 secret",
    "half a header": OK + b"x-secret: secr",
    "a long header": OK + b"x-secret: " + b"secret" * 2_000 + b"\r\n" + BODY,
    "many headers": OK + b"x-secret: secret\r\n" * 2_000 + BODY,
    "a long status line": b"HTTP/1.1 200 " + b"secret" * 2_000 + b"\r\n" + BODY,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nsecret",
    "a small status": b"HTTP/1.1 099 Odd\r\n" + BODY,
    "a large status": b"HTTP/1.1 999 Odd\r\n" + BODY,
    "a control character": OK + b"x-secret: se\x0bcret\r\n" + BODY,
    "a zero": OK + b"x-secret: se\x00cret\r\n" + BODY,
    "a space in a name": OK + b"x secret: secret\r\n" + BODY,
    "two lengths": OK + b"content-length: 3\r\n" + BODY,
    "no number as length": OK + b"content-length: secret\r\n\r\n{}",
    "a transfer coding": OK + b"transfer-encoding: gzip, chunked\r\n\r\n6\r\nsecret\r\n0\r\n\r\n",
    "a length and chunks": OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
}


def test_what_is_http_passes_and_all_else_is_a_bad_gateway(caplog):
    caplog.set_level("INFO", "chairlift")

    async def answer(request):
        await request.send_raw((PASS | FAIL)[request.headers["x-case"]])

    async def main():
        async with behind(answer) as (_, base, client):
            return {case: await client.post(base + PATH, json=CHAT, headers={"x-case": case}) for case in PASS | FAIL}

    for case, response in asyncio.run(main()).items():
        if case in PASS:
            assert response.content == b"<html>", case
            assert "access-control-allow-origin" not in response.headers, case
            assert response.status_code == int(PASS[case].rpartition(b"HTTP/1.")[2].split()[1]), case
        else:
            assert response.status_code == 502, case
            assert response.json()["error"]["code"] == "upstream_failed", case
            assert "secr" not in response.text, case
    assert "ready in" in caplog.text
    assert "chairlift-gate-" not in caplog.text, "its stand-in for a model is no news"
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n", b"ZZ\r\nsecret"),
        (b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n", b"5\r\nsec"),
        (b"content-length: 9\r\n\r\nok", b"secret"),
        (b"content-type: text/event-stream\r\ncontent-length: 9\r\n\r\nok", b"secret"),
        (b"content-type: text/event-stream\r\ncontent-encoding: x-any\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", b"x"),
    ],
)
def test_an_answer_that_breaks_in_the_middle_ends_there(head, rest):
    async def answer(request):
        await request.send_raw(OK + head)
        await broken.wait()
        await request.send_raw(rest)

    async def main():
        async with (
            behind(answer) as (_, base, client),
            asyncio.timeout(20),
            client.stream("POST", base + PATH, json=CHAT) as response,
        ):
            parts = response.aiter_bytes()
            assert await anext(parts) == b"ok"
            broken.set()
            with pytest.raises(httpx.RemoteProtocolError):
                await asyncio.wait_for(read(parts), 20)

    async def read(parts):
        async for _ in parts:
            pass

    broken = asyncio.Event()
    asyncio.run(main())


@pytest.mark.parametrize("rest", [b"", b"half", b"event: half\n"])
def test_a_stream_that_breaks_off_ends_with_an_error_of_its_api(rest):
    kinds = {
        PATH: (b"text/event-stream", EVENT),
        "/v1/messages": (b"text/event-stream", EVENT),
        "/api/chat": (b"application/x-ndjson", b"{}\n"),
    }

    async def answer(request):
        kind, event = kinds[request.target]
        head, data = b"content-type: %s\r\ntransfer-encoding: chunked" % kind, event + rest
        await request.send_raw(OK + b"%s\r\n\r\n%x\r\n%s\r\n" % (head, len(data), data))

    async def main():
        async with behind(answer) as (_, base, client):
            answers = [await client.post(base + path, json=CHAT | {"stream": True}, headers={"x-request-id": path}) for path in kinds]
            explained = [await client.get(f"{base}/v1/requests/{path}/explain") for path in kinds]
            return [one.text for one in answers], [one.json()["sequences"][0]["finish"] for one in explained]

    (chat, messages, ollama), finish = asyncio.run(main())
    assert chat.startswith(EVENT.decode() + '\n\ndata: {"error":{"message":"the upstream')
    assert messages.startswith(EVENT.decode() + '\n\nevent: error\ndata: {"type":"error",')
    assert ollama.startswith("{}\n" + ("event: half\n" if rest.endswith(b"\n") else "") + '{"error":"the upstream')
    assert finish == ["abort"] * 3


@pytest.mark.parametrize(
    ("kind", "pieces", "passed"),
    [
        ("text/event-stream", [b"data: 1\n\nda", b"ta: 2\n", b"\ndata: 3"], [b"data: 1\n\n", b"", b"data: 2\n\n"]),
        ("text/event-stream", [b"data: 1\r\n\r\nevent: a\r\n", b"data: 2\r\n\r\n"], [b"data: 1\r\n\r\n", b"event: a\r\ndata: 2\r\n\r\n"]),
        ("text/event-stream", [b"data: 1\r\rdata"], [b"data: 1\r\r"]),
        ("text/event-stream", [b": ping\n", b": ping\n\n:", b"\n"], [b": ping\n", b": ping\n\n", b":\n"]),
        ("text/event-stream", [b"data: " + b"x" * MAX_EVENT, b"y", b"\n\nz"], [b"data: " + b"x" * MAX_EVENT, b"", b"y\n\n"]),
        ("application/x-ndjson", [b"{}\n{", b"}", b"\n"], [b"{}\n", b"", b"{}\n"]),
        ("application/json", [b"{", b"}"], [b"{", b"}"]),
    ],
)
def test_events_pass_whole(kind, pieces, passed):
    events = WholeEvents(kind)
    assert [events.feed(piece) for piece in pieces] == passed
    assert b"".join(passed) + events.begun == b"".join(pieces)


def test_an_answer_that_is_no_http_takes_no_upstream_out():
    async def answer(request):
        await request.send_raw(FAIL["a control character"] if request.headers.get("x-case") else OK + BODY)

    async def main():
        async with (
            Server(answer).running() as one,
            Server(answer).running() as other,
            gate_here(one.url, other.url) as base,
            httpx.AsyncClient(timeout=30) as client,
        ):
            assert (await client.post(base + PATH, json=CHAT, headers={"x-case": "yes"})).status_code == 502
            assert sum("x-case" in request.headers for request in one.received + other.received) == 1
            await asyncio.gather(*(client.post(base + PATH, json=CHAT) for _ in range(8)))
            assert all(any(request.target == PATH for request in server.received) for server in (one, other))

    asyncio.run(main())


class Endless:
    """Answers with a part again and again, and counts the bytes."""

    def __init__(self, head, part):
        self.head, self.part, self.sent = head, part, 0

    async def __call__(self, request):
        await request.send_raw(self.head)
        while True:
            await request.send_raw(self.part)
            self.sent += len(self.part)


def test_headers_without_end_are_not_read_to_their_end():
    answer = Endless(OK, b"x: " + b"a" * 4000 + b"\r\n")

    async def main():
        async with behind(answer) as (_, base, client):
            assert (await client.post(base + PATH, json=CHAT)).status_code == 502

    asyncio.run(main())
    assert answer.sent < 10 << 20


async def stall(request):
    """Begins a stream, and waits until the client of this connection is gone."""
    await request.send_raw(STREAM + EVENT)
    await request.reader.read()
    request.headers["gone"] = "yes"


def gone(server):
    return [request for request in server.received if "gone" in request.headers]


def test_a_stream_that_stalls_holds_up_no_other_and_ends_with_its_client():
    async def answer(request):
        await (stall(request) if request.body.endswith(b"true}") else request.send("200 OK", b"{}"))

    async def main():
        async with behind(answer) as (server, base, client):
            async with client.stream("POST", base + PATH, json=CHAT | {"stream": True}) as stream:
                id, parts = stream.headers["x-request-id"], stream.aiter_bytes()
                assert await anext(parts) == EVENT
                assert (await client.post(base + PATH, json=CHAT)).content == b"{}"
                assert not gone(server)
            await until(lambda: gone(server))
            assert (await client.get(f"{base}/v1/requests/{id}/explain")).json()["sequences"][0]["finish"] == "abort"

    asyncio.run(main())


def test_a_gate_that_is_ended_cancels_the_requests_at_the_upstream(monkeypatch):
    monkeypatch.setattr("chairlift.server.supervisor.FLUSH_SECONDS", 0)

    async def main():
        async with (
            behind(stall, shutdown_timeout="0") as (server, base, client),
            client.stream("POST", base + PATH, json=CHAT | {"stream": True}) as stream,
        ):
            parts = stream.aiter_bytes()
            assert await anext(parts) == EVENT
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                assert b"[DONE]" not in b"".join([part async for part in parts])
            await until(lambda: gone(server))

    asyncio.run(main())


def test_a_client_that_does_not_read_stops_the_upstream():
    answer = Endless(STREAM, EVENT * 10_000)

    async def main():
        async with behind(answer) as (_, base, client), client.stream("POST", base + PATH, json=CHAT | {"stream": True}):
            await until(lambda: answer.sent)
            before = 0
            while before < answer.sent:  # what the system and the gate take
                before = answer.sent
                await asyncio.sleep(0.1)

    asyncio.run(main())
    assert answer.sent < 32 << 20


def test_a_gate_behind_itself_answers_and_a_gate_behind_another_passes():
    base = None

    async def relay(request):
        """A proxy that sends back to the first gate what is for `/loop`."""
        if not request.target.startswith("/loop"):
            return await request.send("200 OK", request.headers["x-chairlift-gate"].encode())
        async with httpx.AsyncClient() as client:
            headers = [(name, value) for name, value in request.headers.items() if name not in ("host", "content-length")]
            answer = await client.request(request.method, base + PATH, headers=headers, content=request.body)
            await request.send(f"{answer.status_code} {answer.reason_phrase}", answer.content)

    async def main():
        nonlocal base
        async with behind(relay) as (server, base, client), gate_here(base) as outer:
            loop = await client.post(base + "/loop", json=CHAT)
            assert (loop.status_code, loop.json()["error"]["code"]) == (508, "loop")
            assert len(server.chats) == 1
            assert (await client.post(outer + PATH, json=CHAT)).status_code == 200

    asyncio.run(main())


def test_header_values_pass_unchanged_in_any_encoding():
    values = ["caf\u00e9".encode(), "caf\u00e9".encode("latin-1"), b"\xc3\xff\xed\xa0\x80", b"a\x01\x7f\tb"]

    async def answer(request):
        got.extend(value.encode("latin-1") for name, value in request.headers.items() if name.startswith("x-value"))
        await request.send_raw(OK + b"".join(b"x-value: %s\r\n" % value for value in values) + BODY)

    async def main():
        async with behind(answer) as (_, base, client):
            return await client.get(base + "/v1/other", headers=[(f"x-value-{index}".encode(), one) for index, one in enumerate(values)])

    got = []
    response = asyncio.run(main())
    assert got == values
    assert [value for name, value in response.headers.raw if name == b"x-value"] == values


def test_a_websocket_is_refused():
    async def answer(request):
        await request.send("200 OK", b"{}")

    async def main():
        async with behind(answer) as (server, base, client):
            headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "AA=="}
            return await client.get(base + "/v1/realtime", headers=headers), server.received

    refused, received = asyncio.run(main())
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "websocket_unsupported")
    assert not received


def test_secrets_of_the_upstream_reach_no_client_and_no_other_server(caplog):
    async def answer(request):
        if request.target == "/redirect":
            await request.send("307 Temporary Redirect", b"", f"location: {elsewhere.url}/")
        else:
            await request.send_raw(b"\x00")

    async def steal(request):
        await request.send("200 OK", b"{}")

    elsewhere = Server(steal)

    async def main():
        server = Server(answer)
        async with elsewhere.running(), server.running():
            secret = server.url.replace("//", "//user:secret@")
            async with gate_here(secret, api_key="of-the-gate") as base, httpx.AsyncClient() as client:
                headers = {"authorization": "Bearer of-the-gate", "x-api-key": "of-the-gate"}
                failed = await client.post(base + PATH, json=CHAT, headers=headers)
                redirect = await client.post(base + "/redirect", headers=headers)
        return server.received, failed, redirect

    received, failed, redirect = asyncio.run(main())
    assert (failed.status_code, redirect.status_code) == (502, 307)
    assert not elsewhere.received
    basic = "Basic " + base64.b64encode(b"user:secret").decode()
    assert [one.headers["authorization"] for one in received] == [basic] * 2
    assert not any("of-the-gate" in str(one.headers) for one in received)
    for text in (failed.text, str(failed.headers), str(redirect.headers), caplog.text):
        assert "secret" not in text
        assert basic not in text
