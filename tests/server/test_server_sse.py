import json

import httpx
import pytest
from fake_async_engine import FakeEngine, wait_until

from chairlift.server.service import sse


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(sse, "PATIENCE", 0.05)
    monkeypatch.setattr(sse, "QUIET", 0.1)
    return FakeEngine()


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


def test_a_stream_that_flows_has_no_comments(monkeypatch, engine, base):
    monkeypatch.setattr(sse, "QUIET", 5.0)
    body = {"prompt": "a b c", "max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=30) as response:
        assert not [line for line in response.iter_lines() if line.startswith(":")]


def test_clients_pass_over_comments(engine, client):
    stream = client.completions.create(model="org/fake-model", prompt="held", max_tokens=3, stream=True)
    engine.released = True
    assert "".join(chunk.choices[0].text for chunk in stream) == "held held held "


def test_an_engine_that_dies_while_a_stream_waits_ends_it_with_an_error(engine, base, server):
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

    assert sse.Refill(data(sse.Refill.HOLE)).event(text) == sse.event(data(text))
