"""The order and the limits of grammars that wait to be compiled, without a compiler."""

from concurrent.futures import Future

import pytest

from chairlift.errors import QueueFull
from chairlift.grammar import compile_queue as module
from chairlift.grammar.compile_queue import CompileQueue, Work
from chairlift.sampling import StructuredOutput


def put(queue, tenant, name, group=None):
    work = Work(StructuredOutput("regex", name), tenant if group is None else group, tenant, Future())
    queue.put(work)
    return work.future


def order(queue, count):
    """Names of the next grammars that are compiled."""
    works = [queue.get() for _ in range(count)]
    assert all(work.future.running() for work in works)
    return [work.structure.text for work in works]


def test_tenants_take_turns_and_each_tenants_grammars_come_in_order():
    queue = CompileQueue()
    for number in range(4):
        put(queue, "eve", f"e{number}")
    for number in range(2):
        put(queue, "alice", f"a{number}")
    put(queue, "bob", "b0")
    assert order(queue, 7) == ["e0", "a0", "b0", "e1", "a1", "e2", "e3"]


def test_a_group_has_one_turn_and_its_tenants_take_turns_within_it(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_OF_GROUP", 5)
    queue = CompileQueue()
    for number in range(3):
        put(queue, "eve", f"e{number}", group="")
    for name in ("mallory", "victim"):
        put(queue, name, name, group="")
    with pytest.raises(QueueFull, match="5 of your grammars"):
        put(queue, "invented", "i", group="")
    for number in range(3):
        put(queue, "alice", f"a{number}")
    assert order(queue, 8) == ["e0", "a0", "mallory", "a1", "victim", "a2", "e1", "e2"]


def test_a_newcomer_waits_for_one_grammar_of_each_tenant():
    queue = CompileQueue()
    for number in range(3):
        put(queue, "eve", f"e{number}")
    assert order(queue, 1) == ["e0"]
    put(queue, "alice", "a0")
    assert order(queue, 3) == ["e1", "a0", "e2"]


def test_a_cancelled_grammar_is_not_compiled_and_takes_no_place(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_OF_GROUP", 3)
    queue = CompileQueue()
    futures = [put(queue, "eve", f"e{number}") for number in range(3)]
    with pytest.raises(QueueFull, match="3 of your grammars"):
        put(queue, "eve", "e3")
    assert futures[0].cancel()
    assert futures[1].cancel()
    put(queue, "eve", "e4")
    put(queue, "eve", "e5")
    with pytest.raises(QueueFull):
        put(queue, "eve", "e6")
    assert order(queue, 3) == ["e2", "e4", "e5"]


def test_one_tenant_cannot_fill_the_queue(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_OF_GROUP", 3)
    monkeypatch.setattr(module, "MAX_WAITING", 5)
    queue = CompileQueue()
    for number in range(3):
        put(queue, "eve", f"e{number}")
    put(queue, "alice", "a0")
    put(queue, "bob", "b0")
    with pytest.raises(QueueFull, match="5 grammars wait") as full:
        put(queue, "carol", "c0")
    assert full.value.retry_after > 0


def test_a_closed_queue_has_nothing_more():
    queue = CompileQueue()
    put(queue, "eve", "e0")
    queue.close()
    assert queue.get() is None
