"""Which session a request belongs to, by its headers and its body."""

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_here import serving

from chairlift.engine.frames import NoteSession
from chairlift.errors import InvalidRequest
from chairlift.server.session_name import SessionName, session_name

CLAUDE = {"x-claude-code-session-id": "c"}


def named(headers):
    return session_name([(name.encode(), value.encode("latin-1")) for name, value in headers.items()])


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, None),
        ({"user-agent": "codex"}, None),
        ({"x-session-id": ""}, None),
        ({"x-session-id": "s"}, SessionName("s")),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, SessionName("s", "p")),
        ({"x-parent-session-id": "p"}, None),
        (CLAUDE, SessionName("c")),
        (CLAUDE | {"x-claude-code-agent-id": "a"}, SessionName("c/a", "c")),
        (CLAUDE | {"x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "b"}, SessionName("c/a", "c/b")),
        ({"x-claude-code-agent-id": "a"}, None),
        ({"session-id": "x"}, SessionName("x")),
        ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "p"}, SessionName("d", "p")),
        ({"x-dynamo-session-id": "d", "x-dynamo-session-final": "True"}, SessionName("d", final=True)),
        ({"x-session-id": "s", "x-dynamo-session-final": "no"}, SessionName("s")),
        ({"session-id": "x", "x-dynamo-session-id": "d", **CLAUDE, "x-session-id": "s"}, SessionName("s")),
        ({"session-id": "x", "x-dynamo-session-id": "d", **CLAUDE}, SessionName("c")),
        ({"session-id": "x", "x-dynamo-session-id": "d", "x-parent-session-id": "p"}, SessionName("d")),
        ({"x-session-id": "s" * 256}, SessionName("s" * 256)),
    ],
    ids=lambda value: f"{value!r:.60}" if isinstance(value, dict) else "",
)
def test_headers_name_a_session(headers, session):
    assert named(headers) == session


@pytest.mark.parametrize("headers", [{"x-session-id": "s" * 257}, {"x-session-id": "s", "x-parent-session-id": "p" * 257}])
def test_names_that_are_too_long(headers):
    with pytest.raises(InvalidRequest, match="256"):
        named(headers)


@pytest.fixture(scope="module")
def keyed():
    engine = ScriptedEngine()
    run = engine.run
    engine.sessions = []

    def record(stream, **rest):
        engine.sessions.append(rest["session"])
        return run(stream, **rest)

    engine.run = record
    with serving(engine, "alice=sk-1,bob=sk-2") as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        yield engine, http, service


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
BODIES = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", CHAT),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 1}),
]


def post(http, path, body, key="sk-1", **headers):
    return http.post(path, json=body, headers={"authorization": f"Bearer {key}", **headers})


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_route_takes_the_session(keyed, path, body):
    engine, http, _ = keyed
    for fields, headers, session in (
        ({}, {}, None),
        ({"session_id": "b"}, {}, "b"),
        ({"session_id": "b"}, {"session-id": "h"}, "h"),
        ({"prompt_cache_key": "k", "metadata": {"user_id": "u"}, "user": "u"}, {}, None),
        ({}, {"x-session-id": "s", "x-parent-session-id": "p"}, "p"),  # a subagent runs where its parent does
    ):
        response = post(http, path, body | fields, **headers)
        assert response.status_code == 200, response.text
        assert engine.sessions[-1] == session
        scheduling = engine.scheduled[-1]
        assert (scheduling.session, scheduling.parent_session) == (("s", "p") if session == "p" else (session, None))
        assert "x-chairlift-ignored" not in response.headers


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_names_that_are_too_long_are_refused(keyed, path, body):
    _, http, _ = keyed
    refusals = post(http, path, body, **{"x-session-id": "s" * 257}), post(http, path, body | {"session_id": "s" * 257})
    for refusal, param in zip(refusals, ("x-session-id", "session_id"), strict=True):
        assert refusal.status_code == 400
        assert param in refusal.text
    assert post(http, path, body | {"session_id": ""}).status_code == 400


HINTS = {
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "nvext": {"agent_hints": {"priority": 3, "osl": 100}},
    "kv_hints": {"protocol_version": "0.1", "actions": [{"action_type": "kv.retain", "payload": {"directives": [{"start": 0}]}}]},
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
}


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, body in BODIES if path in ("/v1/chat/completions", "/v1/responses")])
def test_hints_change_nothing(keyed, path, body):
    _, http, _ = keyed
    plain, hinted = post(http, path, body), post(http, path, body | HINTS)
    assert hinted.status_code == 200, hinted.text
    assert "x-chairlift-ignored" not in hinted.headers
    assert hinted.json()["usage"] == plain.json()["usage"]


def test_a_session_is_ended_by_its_tenant_alone(keyed):
    _, http, service = keyed
    known = lambda: service.turns.latest("alice", "mine") is not None  # noqa: E731
    post(http, "/v1/chat/completions", CHAT, **{"x-session-id": "mine"})
    assert known()
    for key, name, remains in (("sk-2", "mine", True), ("sk-1", "other", True), ("sk-1", "mine", False), ("sk-1", "mine", False)):
        response = post(http, "/close_session", {"session_id": name}, key)
        assert (response.status_code, response.json()) == (200, {"session_id": name})
        assert known() == remains
    post(http, "/v1/chat/completions", CHAT, **{"x-session-id": "mine"})
    assert known()
    post(http, "/v1/chat/completions", CHAT, **{"x-session-id": "mine", "x-dynamo-session-final": "true"})
    assert not known()


def test_the_engine_is_told_when_a_session_waits_for_its_user_and_when_it_ends(keyed):
    engine, http, _ = keyed
    engine.frames.clear()
    post(http, "/v1/chat/completions", CHAT)
    assert engine.frames == []
    post(http, "/v1/chat/completions", CHAT, **{"x-session-id": "mine"})
    assert engine.frames == [NoteSession("alice", "mine", "awaits_user")]
    post(http, "/close_session", {"session_id": "mine"})
    assert engine.frames[1:] == [NoteSession("alice", "mine", "ended")]


@pytest.mark.parametrize("body", [{}, {"session_id": ""}, {"session_id": "s" * 257}, {"session_id": 1}])
def test_malformed_ends_are_refused(keyed, body):
    response = post(keyed[1], "/close_session", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id")
