"""Why a turn found less in its upstream's cache than the turn before it had left there."""

import json

import pytest

from chairlift.gate import conversations
from chairlift.gate.answer import UpstreamUsage
from chairlift.gate.conversations import Conversations
from chairlift.gate.prompt import MAX_PARTS, read_prompt

TOOLS = [{"type": "function", "function": {"name": "f"}}]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which lifts run?"},
    {"role": "assistant", "content": "Two of them."},
    {"role": "user", "content": "Which ones?"},
]
NEXT = [{"role": "assistant", "content": "The long ones."}, {"role": "user", "content": "Since when?"}]
BODY = {"model": "m", "tools": TOOLS, "messages": MESSAGES}
AFTER = BODY | {"messages": MESSAGES + NEXT}


def turn(known, body, prompt=2000, cached=None, *, session="s", tenant="t", token_seconds=None):
    return known.add(tenant, session, read_prompt(json.dumps(body).encode()), UpstreamUsage(prompt, cached, 10), token_seconds)


def messages(change):
    return AFTER | {"messages": change(json.loads(json.dumps(AFTER["messages"])))}


def edited(index):
    def change(history):
        history[index]["content"] += " Now."
        return history

    return messages(change)


@pytest.mark.parametrize(
    ("body", "reason", "field"),
    [
        (AFTER, "upstream_missed", None),
        (AFTER | {"temperature": 0.5}, "upstream_missed", None),
        (AFTER | {"model": "n"}, "model_changed", "model"),
        (AFTER | {"cache_salt": "x"}, "cache_salt_changed", "cache_salt"),
        (AFTER | {"tools": TOOLS * 2}, "tools_changed", "tools"),
        ({name: AFTER[name] for name in ("model", "messages")}, "tools_changed", "tools"),
        (AFTER | {"chat_template_kwargs": {"x": 1}}, "settings_changed", "chat_template_kwargs"),
        (AFTER | {"system": "Be brief."}, "system_changed", "system"),
        (edited(0), "system_changed", "messages[0]"),
        (edited(1), "history_edited", "messages[1]"),
        (messages(lambda history: [history[0], *history[4:]]), "history_shortened", "messages[1]"),
    ],
)
def test_the_reason_and_the_field_are_those_of_the_first_difference(body, reason, field):
    known = Conversations()
    assert turn(known, BODY) is None
    miss = turn(known, body, 2100, 100, token_seconds=0.001)
    assert (str(miss.reason), miss.difference.field) == (reason, field)
    assert (miss.missed_tokens, miss.reusable_tokens, miss.seconds) == (1900, 2000, 1.9)
    assert miss.openai()["type"] in ("cache_miss", "unavailable")
    assert miss.summary().startswith("Cache miss: ")


@pytest.mark.parametrize("cached", [None, 1600, 2000])
def test_what_is_found_or_not_told_is_no_miss(cached):
    known = Conversations()
    turn(known, BODY)
    assert turn(known, AFTER, 2100, cached) is None


def test_a_short_prompt_misses_nothing():
    known = Conversations()
    turn(known, BODY, 256)
    assert turn(known, AFTER, 300, 0) is None


def test_other_requests_of_a_session_and_other_sessions_are_not_compared():
    known = Conversations()
    title = {"model": "m", "tools": TOOLS, "messages": [{"role": "user", "content": "A title, please"}]}
    turn(known, BODY)
    for _ in range(conversations.MAX_TURNS - 1):
        title["messages"][0]["content"] += "."
        assert turn(known, title, cached=0) is None
    assert turn(known, AFTER, 2100, 2000) is None
    assert turn(known, AFTER, 2100, 0, session="other") is None
    assert turn(known, AFTER, 2100, 0, tenant="other") is None
    assert turn(known, {"prompt": "one"}, session="raw") is None
    assert turn(known, {"prompt": "one and two"}, cached=0, session="raw") is None
    assert turn(known, AFTER, 2100, 0).reason == "upstream_missed"


def test_sessions_that_end_and_old_ones_are_forgotten(monkeypatch):
    known = Conversations()
    turn(known, BODY)
    known.end("t", "s")
    known.end("t", "unknown")
    assert turn(known, AFTER, 2100, 0) is None
    monkeypatch.setattr(conversations, "MAX_PARTS", 60)
    for number in range(100):
        turn(known, BODY, session=str(number))
    assert turn(known, AFTER, 2100, 0) is None
    assert turn(known, AFTER, 2100, 0, session="0") is None
    assert turn(known, AFTER, 2100, 0, session="99") is not None


def test_of_a_prompt_with_many_messages_the_first_are_compared():
    body = {"messages": [{"role": "user", "content": str(number)} for number in range(2 * MAX_PARTS)]}
    assert len(read_prompt(json.dumps(body).encode()).parts) == MAX_PARTS
