"""Poisoned requests in the middle of live load: each is refused by itself, and nobody else notices."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from events import objects
from poison import Poison, poisoned
from served import Served, bare, served, until

pytestmark = pytest.mark.slow

AT_ONCE = 8

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo 🙂, how are you?"}]
TOOL = {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}
HEALTHY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}),
    ("/v1/completions", {"prompt": ["one", "two", "three"], "max_tokens": 20, "n": 2, "seed": 5}),
    ("/v1/completions", {"prompt": "word " * 500, "max_tokens": 20, "logit_bias": {"5": 3}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/chat/completions", {"messages": CONVERSATION, "max_tokens": 50, "seed": 7}),
    ("/v1/chat/completions", {"messages": CONVERSATION, "max_tokens": 50, "tools": [{"type": "function", "function": TOOL}]}),
    ("/v1/messages", {"messages": CONVERSATION[1:], "system": "Be brief.", "max_tokens": 30}),
    ("/v1/responses", {"input": CONVERSATION, "max_output_tokens": 30}),
)


def ask(server: Served, which: int, stream: bool) -> Any:
    """One healthy request's answer, or the text and the end of every choice of its stream."""
    path, body = HEALTHY[which]
    reply = server.http.post(path, json={**body, "stream": stream})
    assert reply.status_code == 200, reply.text
    if not stream:
        return bare(reply.json())
    events = objects(reply.text)
    texts: dict[Any, str] = {}
    ends: dict[Any, Any] = {}
    for event in events:
        assert "error" not in event or event["error"] is None, event
        for choice in event.get("choices", [event]):
            delta = choice.get("delta") or choice
            said = delta if isinstance(delta, str) else delta.get("text") or delta.get("content") or ""
            index = choice.get("index", 0)
            texts[index] = texts.get(index, "") + (said if isinstance(said, str) else "")
            ends[index] = choice.get("finish_reason") or ends.get(index)
    return texts, ends, events[-1].get("type")


def refused(server: Served, poison: Poison) -> str | None:
    """What is wrong with how a poisoned request was answered; None if nothing is."""
    headers = {"content-type": "application/json", **poison.headers}
    reply = server.http.post(poison.path, content=poison.content(), headers=headers)
    fault = None
    if reply.status_code not in poison.statuses:
        fault = f"{reply.status_code} instead of {poison.statuses}"
    elif reply.status_code != 200:
        error = reply.json()["error"]
        if not (error.keys() == {"message", "type", "param", "code"} and error["message"] and len(reply.content) < 2000):
            fault = "not the envelope, or too long"
    return fault and f"{poison.path} {poison.content()[:150]!r}: {fault}: {reply.text[:300]}"


def test_poisoned_requests_fail_alone_in_live_load():
    with served("--max-num-seqs", "16", "--max-num-batched-tokens", "256") as server, ThreadPoolExecutor(AT_ONCE + 4) as threads:
        healthy = [(which, stream) for which in range(len(HEALTHY)) for stream in (False, True)]
        clean = {one: ask(server, *one) for one in healthy}
        engine, before = server.engine(), {**server.state(), "sockets": 0}
        over = threading.Event()

        def live(seed: int) -> int:
            dice, requested = random.Random(seed), 0
            while not over.is_set() or requested < 8:
                one = dice.choice(healthy)
                assert ask(server, *one) == clean[one], one
                assert server.status("/health") == 200
                requested += 1
            return requested

        load = [threads.submit(live, seed) for seed in range(4)]
        bad = poisoned()
        random.Random(3).shuffle(bad)
        assert len(bad) >= 200
        try:
            faults = list(threads.map(lambda poison: refused(server, poison), bad))
        finally:
            over.set()
        assert not list(filter(None, faults))
        assert all(one.result() >= 8 for one in load)
        assert server.engine() == engine
        until(lambda: {**server.state(), "sockets": 0} == before)
        assert "Traceback" not in server.log()
