"""The soak of benches/soak.py sees what it is there to see; its hostile tenants send all they have."""

import asyncio
import json
import math
import os
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import hostile_tenants as hostile
import pytest
import soak
from local_server import Handler, local_server
from prometheus_client import generate_latest

from chairlift.server.observability.loop_monitor import LoopMonitor


@contextmanager
def answering(reply):
    """A server that answers everything with the status and the document, or the events, of `reply(path)`."""
    asked = []

    class Answer(Handler):
        def do_POST(self):
            self.body()
            asked.append(self.path)
            status, content = reply(self.path)
            events = "".join(f"data: {json.dumps(one)}\n\n" for one in content) + "data: [DONE]\n\n" if isinstance(content, list) else None
            self.reply((json.dumps(content) if events is None else events).encode(), status)

        do_GET = do_DELETE = do_POST

    with local_server(Answer) as url:
        yield int(url.rpartition(":")[2]), asked


def streamed(*texts, logprob=-0.5):
    parts = [{"choices": [{"text": text, "logprobs": {"token_logprobs": [logprob]}, "finish_reason": None}]} for text in texts]
    return 200, [*parts, {"choices": [{"text": "", "finish_reason": "length"}]}]


@pytest.mark.parametrize(
    ("later", "fault"),
    [
        (streamed("a", "b"), None),
        (streamed("ab", logprob=-0.5), "other bits"),  # a log-probability is missing
        (streamed("a", "c"), "other bits"),
        (streamed("a", "b", logprob=-0.25), "other bits"),
        ((200, [{"error": {"message": "it failed"}}]), "other bits"),
        ((503, {"error": {}}), "503"),
    ],
)
def test_an_answer_with_other_bits_or_none_is_a_fault(later, fault):
    replies = [streamed("a", "b")] * len(soak.HONEST["alice"])
    with answering(lambda path: replies.pop() if replies else later) as (port, _):
        alice = soak.Honest("alice", port, "key")
        alice.learn()
        assert not alice.left_out
        alice.run(0.0, 0.0)
    assert alice.answers == 1
    assert [fault in one for one in alice.faults] == ([] if fault is None else [True])


def test_what_the_server_refuses_alone_is_left_out():
    with answering(lambda path: (400, {}) if path == "/v1/embeddings" else (200, {"choices": [1]})) as (port, asked):
        carol = soak.Honest("carol", port, "key")
        carol.learn()
        carol.run(0.0, 0.0)
    assert carol.left_out == ["carol's /v1/embeddings: 400"]
    assert not carol.faults
    assert asked.count("/v1/embeddings") == 1


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
def test_only_a_refusal_of_the_request_is_left_out(status):
    with answering(lambda path: (status, {}) if path == "/v1/embeddings" else (200, {"choices": [1]})) as (port, _):
        carol = soak.Honest("carol", port, "key")
        carol.learn()
    assert (len(carol.faults), len(carol.left_out)) == ((0, 1) if status == 400 else (1, 0))


def test_a_server_that_cannot_be_reached_is_a_fault():
    with answering(lambda path: (200, {})) as (port, _):
        pass
    alice = soak.Honest("alice", port, "key")
    alice.learn()
    assert len(alice.faults) == len(soak.HONEST["alice"])


REACHED = {"files": Counter({"200": 1, "403": 5}), "left_alone": Counter(left=3), "sockets": Counter(opened=2), "slow": Counter({"504": 1})}


@pytest.mark.parametrize(
    ("callback", "silent", "lag", "hostile", "alive", "fault"),
    [
        ((0.02, "a"), 0, 0.1, REACHED, True, None),
        ((0.0, ""), 0, 0.001, REACHED, True, None),
        ((0.021, "a"), 0, 0.1, REACHED, True, "the longest callback"),
        (None, 0, 0.1, REACHED, True, "were not measured"),
        ((0.0, ""), 0, None, REACHED, True, "were not measured"),
        ((0.0, ""), 1, 0.1, REACHED, True, "got no answer"),
        ((0.0, ""), 0, 0.25, REACHED, True, "the lag"),
        ((0.0, ""), 0, 0.1, REACHED, False, "the server ended"),
        ((0.0, ""), 0, 0.1, {"files": Counter({"401": 9, "403": 1, "TimeoutError": 5})}, True, "files did not reach the server"),
        ((0.0, ""), 0, 0.1, {"files": Counter()}, True, "files did not reach the server"),
    ],
)
def test_bounds_of_the_whole_run(callback, silent, lag, hostile, alive, fault):
    watch = soak.Watch(0, "key", 0)
    watch.longest_callback, watch.silent = callback, silent
    found = soak.broken(watch, lag, hostile, alive)
    assert [fault in one for one in found] == ([] if fault is None else [True])


def test_the_memory_has_a_bound():
    watch = soak.Watch(0, "key", 0)
    watch.longest_callback = (0.0, "")
    for memory, found in ((soak.MEMORY, []), (soak.MEMORY + 1, ["the memory"])):
        watch.memories = [memory]
        assert soak.broken(watch, 0.0, REACHED, True) == found


@pytest.mark.parametrize(
    ("descriptors", "threads", "requests", "found"),
    [(66, 36, 0, []), (67, 37, 2, ["2 requests are left", "17 descriptors are left", "17 threads are left"])],
)
def test_nothing_may_be_left_when_the_tenants_have_gone(descriptors, threads, requests, found):
    assert soak.left(soak.Held(50, 20, 0), soak.Held(descriptors, threads, requests)) == found


def test_what_the_server_holds_is_read(monkeypatch):
    """From /proc, and from metrics whose names exist."""
    watch = soak.Watch(0, "key", os.getpid())
    lines = "".join(f'chairlift_{name}{{engine="0"}} 2.0\n' for name in soak.REQUESTS)
    monkeypatch.setattr(watch, "metrics", lambda: lines)
    before = watch.held()
    assert before.requests == 2 * len(soak.REQUESTS)
    with open(os.devnull, "rb"):
        assert watch.held().descriptors == before.descriptors + 1
    documented = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert all(f"`{name}" in documented for name in soak.REQUESTS)


def test_the_monitors_metrics_are_read(monkeypatch):
    """A name that changes must not let the soak pass."""
    monitor = LoopMonitor({"model_name": "m", "engine": "0"})

    def burn():
        ends = time.thread_time() + 0.01
        while time.thread_time() < ends:
            pass

    async def main():
        monitor.start()
        asyncio.get_running_loop().call_later(0, burn)
        await asyncio.sleep(0.001)
        monitor.stop()

    asyncio.run(main())
    watch = soak.Watch(0, "key", os.getpid())
    monkeypatch.setattr(watch, "metrics", lambda: generate_latest(monitor).decode())
    looks = iter([False, False, True])
    watch.run(SimpleNamespace(wait=lambda seconds: next(looks)))
    assert watch.silent == 0
    seconds, name = watch.longest_callback
    assert seconds >= 0.01
    assert name == burn.__qualname__
    assert soak.late({}, watch.lag()) is not None


def test_the_lag_is_that_between_two_looks():
    before = {0.01: 1000.0, 0.1: 1000.0, math.inf: 1000.0}
    assert soak.late(before, {0.01: 1098.0, 0.1: 1099.0, math.inf: 1100.0}) == 0.1
    assert soak.late(before, before) is None
    assert soak.late({}, {}) is None


def test_each_hostile_kind_sends_what_it_is_named_for(monkeypatch):
    monkeypatch.setattr(hostile, "IDLE_SOCKETS", 4)
    monkeypatch.setattr(hostile.time, "sleep", lambda seconds: None)
    sent = {}
    for kind in {kind for kinds in hostile.TENANTS for kind in kinds}:
        with answering(lambda path: (200, {"id": "x"})) as (port, asked):
            attacker = hostile.Attacker(port, "key", 1)
            kind(attacker)
            assert set(attacker.statuses) <= {"200", "left", "opened"}
            sent[kind.__name__] = (sum(attacker.statuses.values()), asked[:])
    assert all(count for count, _ in sent.values())
    assert sent["files"][1] == ["/v1/files"] + ["/v1/files/x"] * 8
    assert sent["batches"][1] == ["/v1/files", "/v1/batches", "/v1/batches/x/cancel"]
    assert sent["live_sequences"][1] == ["/v1/sequences", "/v1/sequences/x/fork", "/v1/sequences/x/generate"]
