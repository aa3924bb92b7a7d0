"""The memory of turns is bounded, and shared equally by groups of tenants."""

from array import array

from chairlift.server.turns import MAX_GROUPS, MAX_MISSES, Anchor, Answer, Scope, Turn, Turns

SCOPE = Scope("m", None, None, "", None)


def turn(number, tenant="", group="", tokens=1000, thread=None):
    return Turn(tenant, group, f"id-{tenant}-{number}", thread, SCOPE, (), array("I", range(tokens)), Anchor(0, b"", 0), 0)


def test_the_oldest_turns_are_forgotten_with_their_names():
    turns = Turns(100_000)
    for number in range(100):
        one = turn(number, thread=f"t{number}")
        turns.add(one)
        turns.add_answer(one, 0, Answer(array("I", [1]), ()), [b"key%d" % number])
        assert turns.size <= 100_000
    assert turns.with_id("", "id--0") is turns.latest("", "t0") is turns.with_answer("", b"key0") is None
    assert turns.with_id("", "id--99").turn is turns.latest("", "t99").turn is turns.with_answer("", b"key99").turn is one


def test_superseded_turns_go_first():
    turns = Turns(30_000)
    first, second = turn(1), turn(2)
    turns.add(first)
    turns.add(second)
    turns.supersede(second, first)
    number = 3
    while turns.with_id("", "id--1"):
        turns.add(turn(number := number + 1))
    assert turns.with_id("", "id--2") is None


def test_a_group_cannot_take_the_memory_of_others():
    turns = Turns(1_000_000)
    turns.add(turn(0, "alice", "alice"))
    for number in range(1000):
        turns.add(turn(number, f"invented{number}"))
    assert turns.with_id("alice", "id-alice-0") is not None
    for number in range(MAX_GROUPS + 5):
        turns.add(turn(0, f"k{number}", f"k{number}", tokens=1))
    known = [f"k{number}" for number in range(MAX_GROUPS + 5) if turns.with_id(f"k{number}", f"id-k{number}-0")]
    assert known == [f"k{number}" for number in range(5, MAX_GROUPS + 5)]


def test_a_turn_that_is_larger_than_its_share_is_not_kept():
    turns = Turns(10_000)
    turns.add(one := turn(1, tokens=10_000))
    turns.add_answer(one, 0, Answer(array("I"), ()), [b"key"])
    assert turns.size == 0
    assert turns.with_id("", "id--1") is turns.with_answer("", b"key") is None


def test_a_session_that_ends_is_forgotten_by_its_name():
    turns = Turns()
    turns.add(turn(1, thread="t"))
    turns.end_thread("other", "t")
    assert turns.latest("", "t") is not None
    turns.end_thread("", "t")
    turns.end_thread("", "t")
    assert turns.latest("", "t") is None


def test_misses_are_bounded():
    turns = Turns()
    for number in range(MAX_MISSES + 1):
        turns.add_miss(str(number), None, None)
    assert turns.miss("0") is None
    assert turns.miss("1") is not None
