import asyncio
import json

import httpx
import openai
import pytest
from fast_forward import FastForward
from scripted_engine import ScriptedEngine
from server_here import wait_until

from chairlift.server import streaming


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(streaming, "FIRST_EVENT_TIMEOUT", 0.05)
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.1)
    return ScriptedEngine()


def test_a_stream_that_waits_shows_that_it_lives(engine, base, server):
    body = {"prompt": "held back", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        assert server[1].admission.waiting == 1  # its headers came all the same
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        engine.released = True
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest[:-1]) == "held back held "


def lines_of(gaps):
    """The lines of a stream of events with so many seconds before each."""

    async def events():
        for number, gap in enumerate(gaps):
            await asyncio.sleep(gap)
            yield streaming.event({"event": number})

    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    with asyncio.Runner(loop_factory=FastForward) as runner:
        runner.run(streaming.EventStream(events(), {})({"type": "http", "path": "/v1/completions"}, None, send))
    return [line for line in b"".join(sent).decode().splitlines() if line]


@pytest.mark.parametrize(
    ("gaps", "comments"),
    [([9] * 50, 0), ([12] * 50, 50), ([9, 35, 9], 3)],
)
def test_comments_come_where_a_stream_is_quiet_and_only_there(gaps, comments):
    lines = lines_of(gaps)
    assert lines.count(": keep-alive") == comments
    assert [line for line in lines if not line.startswith(":")] == [f'data: {{"event":{number}}}' for number in range(len(gaps))]


def test_clients_pass_over_comments(engine, base):
    """The engine goes on once the client has read a comment, and no sooner."""

    class Transport(httpx.HTTPTransport):
        def handle_request(self, request):
            response = super().handle_request(request)
            response.stream = Watched(response.stream)
            return response

    class Watched(httpx.SyncByteStream):
        def __init__(self, stream):
            self.stream = stream

        def __iter__(self):
            for data in self.stream:
                yield data
                engine.released |= data.startswith(b": keep-alive")

        def close(self):
            self.stream.close()

    transport = httpx.Client(transport=Transport(), timeout=30)
    with openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0, http_client=transport) as client:
        stream = client.completions.create(model="org/fake-model", prompt="held", max_tokens=3, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "held held held "


def test_an_engine_that_dies_while_a_stream_waits_ends_it_with_an_error(engine, base, server, monkeypatch):
    monkeypatch.setattr("chairlift.server.lifecycle.MIN_HOLD_SECONDS", 0.0)  # nobody starts another engine
    body = {"prompt": "held die", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        engine.released = True
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
    wait_until(lambda: server[1].admission.open == 0)


@pytest.mark.parametrize("text", ["", "plain", 'a "quoted" \\ text\n', "\0", "größer 🚡", "\u2028"])
def test_a_refilled_event_is_what_it_would_be_written_anew(text):
    def data(content):
        return {"id": "x", "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}

    assert streaming.EventTemplate(data(streaming.EventTemplate.PLACEHOLDER)).fill(text) == streaming.event(data(text))
