"""Upstreams that are left out while they are down or not ready, and what the gate believes of their caches after that."""

import asyncio
import contextlib
import json

import httpx
import pytest
from gate_here import Server, gate_here, until

PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def probes(monkeypatch):
    monkeypatch.setattr("chairlift.gate.upstream.PROBE_SECONDS", 0.02)


class Chats(Server):
    """Answers chats. One whose content is `wait` is a stream that ends after `go.set()`."""

    def __init__(self, number):
        super().__init__(self._chat, kv_blocks=512 + number)
        usage = {"prompt_tokens": 4000, "prompt_tokens_details": {"cached_tokens": number}}
        self._answer_body = json.dumps({"usage": usage}).encode()
        self.go = asyncio.Event()

    async def _chat(self, request):
        content = json.loads(request.body or b"{}").get("messages", [{"content": ""}])[0]["content"]
        if content == "drop":
            return  # the connection is closed
        if content == "busy":
            await request.send("503 Service Unavailable", b'{"error":{"message":"the queue is full"}}', "retry-after: 1")
        elif not self.ready and request.target == PATH:
            await request.send("503 Service Unavailable", b'{"error":{"message":"Loading model"}}')
        elif content == "wait":
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            await request.send_raw(head + b"9\r\ndata: 1\n\n\r\n")
            await self.go.wait()
            await request.send_raw(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            await asyncio.sleep(0.01)
            await request.send("200 OK", self._answer_body)


class Client:
    """Sends chats to a gate."""

    def __init__(self, base):
        self.base, self._http = base, httpx.AsyncClient(timeout=30)

    async def post(self, path, **body):
        return await self._http.post(self.base + path, json=body)

    async def chat(self, content="hello", **headers):
        return await self._http.post(self.base + PATH, json={"messages": [{"content": content}]}, headers=headers)

    async def chats(self, count):
        return [(await self.chat(f"hello {number}")).status_code for number in range(count)]

    async def explained(self, name):
        return (await self._http.get(f"{self.base}/v1/requests/{name}/explain")).json()["sequences"][0]


def run(test, *, servers=2, routing="round-robin", **settings):
    """Runs a test with a client of a gate before some servers."""

    async def main():
        upstreams = [Chats(number) for number in range(servers)]
        async with contextlib.AsyncExitStack() as stack:
            stops = [await stack.enter_async_context(contextlib.AsyncExitStack()) for _ in upstreams]
            for upstream, stop in zip(upstreams, stops, strict=True):
                await stop.enter_async_context(upstream.running())
                upstream.stop = stop.aclose
            base = await stack.enter_async_context(gate_here(*(one.url for one in upstreams), routing=routing, **settings))
            await test(Client(base), *upstreams)

    asyncio.run(main())


def test_an_upstream_that_is_not_ready_is_left_out_until_it_is(caplog):
    caplog.set_level("INFO")

    async def test(client, first, second):
        busy = await client.chat("busy")  # which says nothing of other requests
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        first.received.clear()
        second.received.clear()
        assert await client.chats(4) == [200] * 4
        assert len(first.chats) == len(second.chats) == 2
        first.ready = False
        assert await client.chats(4) == [200] * 4
        assert len(second.chats) == 6
        second.ready = False
        loading = await client.chat()
        assert (loading.status_code, loading.json()) == (503, {"error": {"message": "Loading model"}})
        first.ready = True
        await until(lambda: f"{first.url} is ready again" in caplog.text)
        before = len(first.chats)
        assert await client.chats(4) == [200] * 4
        assert len(first.chats) == before + 4

    run(test)


def test_an_upstream_that_is_gone_is_left_out_until_it_is_back(caplog):
    caplog.set_level("INFO")

    async def test(client, first, second):
        await first.stop()
        assert await client.chats(4) == [200] * 4
        assert len(second.chats) == 4
        await second.stop()
        gone = await client.chat()
        assert gone.status_code == 502
        assert gone.json()["error"]["code"] == "upstream_failed"
        async with first.running():
            await until(lambda: f"{first.url} is ready again" in caplog.text)
            assert await client.chats(4) == [200] * 4
            assert len(first.chats) == 4

    run(test)


def test_one_dropped_connection_takes_no_upstream_out(caplog, monkeypatch):
    monkeypatch.setattr("chairlift.gate.upstream.PROBE_SECONDS", 1000)
    caplog.set_level("INFO")

    async def test(client, first, second):
        assert (await client.chat("drop")).status_code == 502
        for one in (first, second):
            assert len(one.chats) == 1
            await until(lambda one=one: f"{one.url} is ready again" in caplog.text)
        assert await client.chats(4) == [200] * 4
        assert (len(first.chats), len(second.chats)) == (3, 3)

    run(test)


def test_another_upstream_gets_a_request_that_failed_also_if_the_first_is_ready_again(monkeypatch):
    monkeypatch.setattr("chairlift.gate.gate.Gate._leave_out", lambda *failed: None)  # as if a probe had found it ready at once

    async def test(client, *upstreams):
        for path, sent in ((PATH, [1, 1, 1]), ("/v1/embeddings", [2, 2, 2]), ("/wake_up", [3, 2, 2])):
            assert (await client.post(path, messages=[{"content": "drop"}])).status_code == 502
            assert [len(one.chats) for one in upstreams] == sent
        await upstreams[0].stop()
        assert (await client.post("/v1/embeddings")).status_code == 200
        assert [len(one.chats) for one in upstreams] == [3, 3, 2]

    run(test, servers=3, routing="predicted")


def test_a_restart_under_a_stream_is_noticed(caplog, monkeypatch):
    monkeypatch.setattr("chairlift.gate.upstream.PROBE_SECONDS", 1000)

    async def test(client, first, second):
        streams = [asyncio.create_task(client.chat("wait")) for _ in range(2)]
        await until(lambda: first.chats and second.chats)
        await first.stop()
        await until(lambda: f"{first.url} cannot be reached" in caplog.text)
        second.go.set()
        assert sorted("upstream_failed" in one.text for one in await asyncio.gather(*streams)) == [False, True]

    run(test)


def test_no_request_is_needed_to_find_that_an_upstream_is_down(caplog):
    async def test(client, first, second):
        first.ready = False
        await until(lambda: f"{first.url} is not ready" in caplog.text)
        first.received.clear()
        assert await client.chats(4) == [200] * 4
        assert (await client.post("/v1/embeddings")).status_code == 200
        assert (len(first.received), len(second.received)) == (0, 5)
        assert (await client.post("/wake_up")).status_code == 200  # which may be what makes it ready
        assert len(first.received) == 1

    run(test)


def test_requests_of_an_upstream_that_drains_end_there_and_its_sessions_go_on_elsewhere(caplog):
    async def test(client, first, second):
        running = asyncio.create_task(client.chat("wait", **{"x-session-id": "s"}))
        await until(lambda: first.chats or second.chats)
        drained, other = (first, second) if first.chats else (second, first)
        drained.ready = False
        await until(lambda: f"{drained.url} is not ready" in caplog.text)
        for _ in range(4):
            assert (await client.chat(**{"x-session-id": "s"})).status_code == 200
        assert (len(drained.chats), len(other.chats)) == (1, 4)
        drained.go.set()
        assert (await running).text.endswith("data: [DONE]\n\n")

    run(test, routing="predicted")


def test_a_session_is_closed_elsewhere_if_its_upstream_is_down(caplog):
    async def test(client, *upstreams):
        for name in ("s0", "s1"):  # in turn
            assert (await client.chat(**{"x-session-id": name})).status_code == 200
        await upstreams[1].stop()
        await until(lambda: f"{upstreams[1].url} cannot be reached" in caplog.text)
        assert [(await client.post("/close_session", session_id=name)).status_code for name in ("s0", "s1")] == [200, 200]

    run(test)


def test_a_session_is_closed_at_the_upstream_that_it_ran_at():
    async def test(client, *upstreams):
        for number in range(len(upstreams)):  # in turn
            assert (await client.chat(**{"x-session-id": f"s{number}"})).status_code == 200
        ran_at = next(one for one in upstreams[1:] if one.chats)
        others = [one for one in upstreams if one is not ran_at]
        name = f"s{upstreams.index(ran_at)}"
        for one in upstreams:
            one.received.clear()
        assert (await client.post("/close_session", session_id=name)).status_code == 200
        assert (len(ran_at.received), *(len(one.received) for one in others)) == (1, 0, 0)
        await client.post("/close_session", session_id=name)  # which is not known any more
        assert len(upstreams[0].received) == 1

    run(test, servers=3)


def test_an_upstream_that_the_operator_takes_out_gets_no_requests_until_it_is_back(tmp_path):
    async def test(client, first, second):
        async def ask(method, path, **body):
            return await admin.request(method, f"http://admin{path}", json=body)

        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(tmp_path / "admin"))) as admin:
            running = asyncio.create_task(client.chat("wait"))
            await until(lambda: first.chats or second.chats)
            drained, other = (first, second) if first.chats else (second, first)
            answer = (await ask("POST", "/upstreams/drain", upstream=drained.url)).json()
            states = {one.pop("url"): one for one in answer["upstreams"]}
            ready = {"drained": False, "ready": True, "sequences": 0}
            assert states == {drained.url: ready | {"drained": True, "sequences": 1}, other.url: ready}
            await asyncio.sleep(0.1)  # its health changes nothing
            assert await client.chats(4) == [200] * 4
            assert (len(drained.chats), len(other.chats)) == (1, 4)
            drained.go.set()
            assert (await running).text.endswith("data: [DONE]\n\n")
            await ask("POST", "/upstreams/resume", upstream=drained.url.replace("http", "HTTP") + "/v1/")
            assert not any(one["drained"] for one in (await ask("GET", "/upstreams")).json()["upstreams"])
            assert await client.chats(4) == [200] * 4
            assert len(drained.chats) == 3
            assert (await ask("POST", "/upstreams/drain", upstream="http://unknown")).status_code == 404
            assert (await ask("POST", "/upstreams/drain")).status_code == 400

    run(test, admin_socket=str(tmp_path / "admin"))


@pytest.mark.parametrize("servers", [1, 2])
def test_an_upstream_that_was_down_is_believed_to_have_nothing_cached(caplog, monkeypatch, servers):
    caplog.set_level("INFO")
    for name in ("chairlift.engine.estimated_engine", "chairlift.gate.estimates"):  # of a fast upstream
        monkeypatch.setattr(f"{name}.STEP_SECONDS", 0.001)
        monkeypatch.setattr(f"{name}.TOKEN_SECONDS", 1e-6)

    async def test(client, first, *others):
        for one in others:
            await one.stop()
        content = "a long prompt " * 100

        async def found():
            """The cached tokens that the gate expects, of all times that it takes until they are some."""
            while not found.tokens or found.tokens[-1] <= 300:
                name = f"prompt-{len(found.tokens)}"
                assert (await client.chat(content, **{"x-request-id": name})).status_code == 200
                found.tokens.append((await client.explained(name))["cached_tokens"])
            return found.tokens

        found.tokens = []
        assert (await found())[0] == 0
        await first.stop()
        assert (await client.chat(content)).status_code == 502
        async with first.running():
            await until(lambda: f"{first.url} is ready again" in caplog.text)
            found.tokens = []
            assert (await found())[0] == 0

    run(test, servers=servers)


def test_what_an_upstream_reports_to_have_found_counts_for_that_upstream(monkeypatch):
    seen = set()

    def observe(estimates, answer, prompt, cached):
        seen.add((estimates.frame().blocks, answer.usage.cached))

    monkeypatch.setattr("chairlift.gate.estimates.Estimates.observe", observe)

    async def test(client, *upstreams):
        assert await client.chats(4) == [200] * 4

    run(test, servers=3)
    assert seen == {(512, 0), (513, 1), (514, 2)}
