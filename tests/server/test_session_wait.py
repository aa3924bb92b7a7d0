"""What a client is told while its request waits for the session's turn, and when the request is refused instead."""

import asyncio
from dataclasses import replace

import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine
from server_here import wait_until

from chairlift.errors import EngineDead, InvalidRequest, RequestMoved
from chairlift.server import session_wait, streaming
from chairlift.server.session_wait import preferred_wait

HELD = {"model": "org/fake-model", "messages": [{"role": "user", "content": "held back"}], "max_tokens": 3}
NAMED = {"x-session-id": "s"}


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(streaming, "FIRST_EVENT_TIMEOUT", 0.05)
    monkeypatch.setattr(session_wait, "FIRST_CHECK_SECONDS", 0.01)
    engine = ScriptedEngine()
    engine.expected_wait_ms = 41_200
    return engine


def streamed(base, engine, path, body, **headers):
    """The headers of a stream that waits, which is read to its end."""
    with httpx.stream("POST", f"{base}{path}", json=body | {"stream": True}, headers=headers, timeout=30) as response:
        engine.released = True
        response.read()
        assert response.status_code == 200
        return response.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/api/chat"])
def test_a_stream_that_waits_says_for_how_long(engine, base, path):
    body = HELD if path not in ("/v1/responses", "/v1/completions") else {"model": "org/fake-model", "input": "held back", "prompt": "held"}
    body = {name: value for name, value in body.items() if (name == "input") <= (path == "/v1/responses")}
    body = {name: value for name, value in body.items() if (name == "prompt") <= (path == "/v1/completions")}
    assert streamed(base, engine, path, body, **NAMED)["x-chairlift-expected-wait"] == "42"


def test_a_stream_whose_session_is_known_by_its_prompt_says_so_too(engine, base):
    engine.config = replace(engine.config, session_turns="all")
    assert streamed(base, engine, "/v1/chat/completions", HELD)["x-chairlift-expected-wait"] == "42"


def test_other_streams_say_nothing(engine, base):
    assert "x-chairlift-expected-wait" not in streamed(base, engine, "/v1/chat/completions", HELD), "it has no session"
    assert "x-chairlift-expected-wait" not in streamed(base, engine, "/v1/chat/completions", HELD, **NAMED), "it does not wait"
    engine.released, engine.expected_wait_ms = False, None
    assert "x-chairlift-expected-wait" not in streamed(base, engine, "/v1/chat/completions", HELD, **NAMED), "it waits for something else"


@pytest.mark.parametrize("dies", [False, True])
def test_a_stream_goes_on_without_the_engines_answer(engine, base, monkeypatch, dies):
    async def explain(request_id):
        if dies:
            raise EngineDead("the engine's process ended")
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "explain", explain)
    monkeypatch.setattr(session_wait, "ANSWER_SECONDS", 0.01)
    assert "x-chairlift-expected-wait" not in streamed(base, engine, "/v1/chat/completions", HELD, **NAMED)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_want_to_wait_is_told_when_to_return(engine, base, server, stream, monkeypatch):
    monkeypatch.setattr(streaming, "FIRST_EVENT_TIMEOUT", 30)
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError, match=r"about 42 s more, .*at most 41 s in all") as raised:
        client.chat.completions.create(
            **HELD, stream=stream, extra_headers=NAMED | {"prefer": "respond-async, wait=41", "x-request-id": "r"}
        )
    assert (raised.value.code, raised.value.response.headers["retry-after"]) == ("session_wait", "42")
    wait_until(lambda: not server[1].admission.open)
    assert engine.left_early == 1
    assert httpx.get(f"{base}/v1/requests/r/explain").json()["refused"]["code"] == "session_wait"
    assert 'rejections_total{engine="0",model_name="org/fake-model",reason="session_wait"} 1' in httpx.get(f"{base}/metrics").text


def test_a_request_that_has_waited_for_as_long_as_its_client_wants_is_refused(engine, base):
    engine.expected_wait_ms = 500  # less than a second at the first check
    answer = httpx.post(f"{base}/v1/chat/completions", json=HELD, headers=NAMED | {"prefer": "wait=1"}, timeout=30)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_a_request_that_reaches_the_scheduler_after_the_first_check_is_refused(engine, base, monkeypatch):
    waits, checks = engine.explain, []

    async def explain(request_id):
        checks.append(request_id)
        return [] if len(checks) == 1 else await waits(request_id)

    monkeypatch.setattr(engine, "explain", explain)
    answer = httpx.post(f"{base}/v1/chat/completions", json=HELD, headers=NAMED | {"prefer": "wait=0"}, timeout=10)
    assert (answer.status_code, len(checks)) == (429, 2)


def test_a_request_that_moves_to_another_engine_is_refused_there(engine, base, monkeypatch):
    engine.expected_wait_ms, run, ran = None, engine.run, []

    async def moving(stream, **arguments):
        ran.append(stream)
        if len(ran) == 1:
            await asyncio.sleep(0.05)
            engine.expected_wait_ms = 41_200
            raise RequestMoved("it runs in another engine")
        async for output in run(stream, **arguments):
            yield output

    monkeypatch.setattr(engine, "run", moving)
    answer = httpx.post(f"{base}/v1/chat/completions", json=HELD, headers=NAMED | {"prefer": "wait=41"}, timeout=10)
    assert (answer.status_code, len(ran)) == (429, 2)


def test_a_request_that_would_not_wait_for_too_long_is_served(engine, base):
    for headers in (NAMED | {"prefer": "wait=60"}, {"prefer": "wait=0"}):
        engine.released = False
        assert streamed(base, engine, "/v1/chat/completions", HELD, **headers)


@pytest.mark.parametrize(
    ("header", "seconds"), [("wait=10", 10), ('Wait="5"', 5), ("respond-async, wait = 7; x=1", 7), ("", None), ("return=minimal", None)]
)
def test_the_header(header, seconds):
    assert preferred_wait({"prefer": header}) == seconds


@pytest.mark.parametrize("header", ["wait=", "wait=-1", "wait=1.5", "wait=" + "9" * 5000, "wait=\u0663"])
def test_a_wait_that_is_no_number_is_refused(header):
    with pytest.raises(InvalidRequest, match="whole number of seconds"):
        preferred_wait({"prefer": header})
