"""Which models are loaded, and when, without engines, tasks or a clock."""

import math
import random

import pytest

from chairlift.server.load_policy import MAX_WAIT, Action, LoadPolicy, Stage


def policy(*names, max_loaded=None, max_bytes=None, **settings):
    made = LoadPolicy(max_loaded, max_bytes)
    for name in names:
        made.add(name, **settings)
    return made


def loaded(made, name, now, seconds=1.0, num_bytes=None, shared_bytes=0):
    """Loads a model that there is room for."""
    made.want(name)
    assert Action("load", name) in made.decide(now)
    made.loaded(name, now, seconds, num_bytes, shared_bytes)
    made.decide(now)


def kinds(actions):
    return [(action.kind, action.model) for action in actions]


def test_a_request_loads_its_model_and_waits_for_it():
    made = policy("a", "b")
    assert not made.arrive("a", 1, 0.0)
    assert kinds(made.decide(0.0)) == [("load", "a")]
    assert not made.arrive("a", 2, 0.5)
    assert made.decide(0.5) == []
    made.loaded("a", 1.0, 1.0)
    assert made.decide(1.0) == [Action("admit", "a", (1, 2))]
    assert made.arrive("a", 3, 1.5)
    assert made.uses("a") == 3


def test_a_b_a_a_c_is_served_as_a_a_a_b_c():
    made = policy("a", "b", "c", max_loaded=1)
    loaded(made, "a", 0.0)
    assert made.arrive("a", 1, 1.0)
    assert not made.arrive("b", 2, 1.1)
    assert made.arrive("a", 3, 1.2)
    assert made.arrive("a", 4, 1.3)
    assert not made.arrive("c", 5, 1.4)
    assert made.decide(1.4) == []
    for _ in range(2):
        made.release("a", 2.0)
        assert made.decide(2.0) == []
    made.release("a", 2.0)
    assert kinds(made.decide(2.0)) == [("unload", "a")]
    made.unloaded("a")
    assert kinds(made.decide(2.1)) == [("load", "b")]
    made.loaded("b", 3.0, 1.0)
    assert made.decide(3.0) == [Action("admit", "b", (2,))]
    made.release("b", 4.0)
    assert kinds(made.decide(4.0)) == [("unload", "b")]
    made.unloaded("b")
    assert kinds(made.decide(4.0)) == [("load", "c")]


def test_a_model_that_waited_too_long_gets_its_turn():
    made = policy("a", "b", max_loaded=1)
    loaded(made, "a", 0.0)
    assert made.arrive("a", 1, 0.0)
    assert not made.arrive("b", 2, 0.0)
    made.decide(0.0)
    assert made.wake_at(0.0) == MAX_WAIT
    assert made.arrive("a", 3, MAX_WAIT - 0.1)
    assert made.decide(MAX_WAIT) == []
    assert made.stage("a") is Stage.DRAINING
    assert not made.arrive("a", 4, MAX_WAIT)
    for _ in range(2):
        made.release("a", MAX_WAIT + 1)
    assert kinds(made.decide(MAX_WAIT + 1)) == [("unload", "a")]
    made.unloaded("a")
    assert kinds(made.decide(MAX_WAIT + 1)) == [("load", "b")]
    made.loaded("b", MAX_WAIT + 2, 1.0)
    # It serves before the room goes back, although "a" has waiting requests too.
    assert made.decide(2 * MAX_WAIT + 1) == [Action("admit", "b", (2,))]


def test_nobody_is_turned_away_for_a_request_that_has_left():
    made = policy("a", "b", max_loaded=1)
    loaded(made, "a", 0.0)
    assert made.arrive("a", 1, 0.0)
    made.arrive("b", 2, 0.0)
    made.decide(MAX_WAIT)
    assert not made.arrive("a", 3, MAX_WAIT)
    made.give_up("b", 2)
    assert made.decide(MAX_WAIT) == [Action("admit", "a", (3,))]
    assert made.stage("a") is Stage.LOADED


def test_an_idle_model_is_unloaded_when_its_time_is_over():
    made = policy("a", "b", keep_alive=300.0)
    loaded(made, "a", 0.0)
    assert made.arrive("a", 1, 10.0)
    assert made.decide(1000.0) == []
    made.release("a", 1000.0)
    assert made.decide(1000.0) == []
    assert made.wake_at(1000.0) == 1300.0
    assert made.decide(1299.0) == []
    assert kinds(made.decide(1300.0)) == [("unload", "a")]


@pytest.mark.parametrize(("keep_alive", "expires"), [(0.0, 5.0), (7.0, 12.0), (math.inf, math.inf), (None, 305.0)])
def test_a_request_says_how_long_its_model_stays(keep_alive, expires):
    made = policy("a", keep_alive=300.0)
    loaded(made, "a", 0.0)
    made.arrive("a", 1, 1.0, keep_alive)
    assert made.expires_at("a") == math.inf
    made.release("a", 5.0)
    assert made.expires_at("a") == expires
    assert (kinds(made.decide(5.0)) == [("unload", "a")]) == (keep_alive == 0)


def test_a_stopped_model_goes_when_it_is_idle_and_comes_back():
    made = policy("a")
    loaded(made, "a", 0.0)
    made.arrive("a", 1, 1.0)
    made.stop("a")
    assert made.decide(1.0) == []
    made.release("a", 2.0)
    assert kinds(made.decide(2.0)) == [("unload", "a")]
    assert not made.arrive("a", 2, 2.1)
    assert made.decide(2.1) == []
    made.unloaded("a")
    assert kinds(made.decide(2.2)) == [("load", "a")]


def test_a_model_that_the_operator_loads_after_a_stop_stays():
    made = policy("a", keep_alive=60.0)
    loaded(made, "a", 0.0)
    made.stop("a")
    assert kinds(made.decide(1.0)) == [("unload", "a")]
    made.unloaded("a")
    loaded(made, "a", 2.0)
    assert made.decide(3.0) == []
    assert made.expires_at("a") == 62.0


def test_the_cheapest_to_reload_goes_first_then_the_longest_unused():
    made = policy("slow", "old", "new", "d", max_loaded=3)
    loaded(made, "slow", 0.0, seconds=30.0)
    loaded(made, "new", 3.0, seconds=2.2)
    loaded(made, "old", 1.0, seconds=2.4)
    made.arrive("d", 1, 9.0)
    assert kinds(made.decide(9.0)) == [("unload", "old")]


def test_an_important_model_goes_last():
    made = LoadPolicy(2)
    made.add("important", priority=-1)
    made.add("b")
    made.add("c")
    loaded(made, "important", 0.0, seconds=1.0)
    loaded(made, "b", 1.0, seconds=60.0)
    made.arrive("c", 1, 9.0)
    assert kinds(made.decide(9.0)) == [("unload", "b")]


def test_memory_limits_what_is_loaded_and_a_large_model_is_alone():
    made = policy("a", "b", "large", max_bytes=10)
    for name, num_bytes in (("a", 6), ("b", 4)):
        loaded(made, name, 0.0, num_bytes=num_bytes)
    made.arrive("large", 1, 1.0)  # how large is not known before it is loaded
    assert kinds(made.decide(1.0)) == [("load", "large")]
    made.loaded("large", 2.0, 1.0, 50)
    assert sorted(kinds(made.decide(2.0))) == [("admit", "large"), ("unload", "a"), ("unload", "b")]
    made.unloaded("a")
    made.unloaded("b")
    assert not made.arrive("b", 2, 3.0)
    assert made.decide(3.0) == []
    made.release("large", 4.0)
    assert kinds(made.decide(4.0)) == [("unload", "large")]


def test_memory_that_models_share_counts_once():
    made = policy("a", "b", "c", max_bytes=10)
    for name, num_bytes, shared_bytes in (("a", 8, 6), ("b", 6, 4), ("c", 7, 5)):  # each has 2 bytes of its own
        loaded(made, name, 0.0, num_bytes=num_bytes, shared_bytes=shared_bytes)
    # 6 bytes and the most that one shares are more than 10.
    assert kinds(made.decide(0.0)) == []
    assert [made.stage(name) for name in "abc"] == [Stage.UNLOADING, Stage.LOADED, Stage.LOADED]
    made.unloaded("a")
    made.want("a")
    assert kinds(made.decide(1.0)) == [("unload", "b")]


def test_a_failed_load_refuses_those_who_wait_and_is_tried_later():
    made = policy("a")
    made.arrive("a", 1, 0.0)
    made.decide(0.0)
    assert made.load_failed("a", 1.0) == (1,)
    assert made.retry_in("a", 1.0) == 1.0
    assert made.decide(1.0) == []
    made.arrive("a", 2, 2.0)
    assert kinds(made.decide(2.0)) == [("load", "a")]
    made.load_failed("a", 3.0)
    assert made.retry_in("a", 3.0) == 2.0
    made.want("a")
    made.decide(5.0)
    made.loaded("a", 6.0, 1.0)
    assert made.retry_in("a", 6.0) == 0.0


@pytest.mark.parametrize("seed", range(30))
def test_limits_hold_nothing_in_use_is_unloaded_and_nobody_starves(seed):
    draw = random.Random(seed)
    names = ["a", "b", "c", "d"]
    most = draw.choice([1, 2, 3])
    made = policy(*names, max_loaded=most, max_bytes=draw.choice([None, 12]), keep_alive=5.0)
    sizes = dict(zip(names, (3, 5, 6, 8), strict=True))
    running, pending, waiting = [], [], {}
    uses = dict.fromkeys(names, 0)
    now, longest = 0.0, 0.0
    for request in range(1500):
        now += draw.random()
        if request < 1200:
            name = draw.choices(names, (8, 3, 2, 1))[0]
            if made.arrive(name, request, now):
                uses[name] += 1
                running.append((now + 3 * draw.random(), name))
            else:
                waiting[request] = name, now
        for due in [one for one in running if one[0] <= now]:
            running.remove(due)
            uses[due[1]] -= 1
            made.release(due[1], now)
        for due in [one for one in pending if one[0] <= now]:
            pending.remove(due)
            if due[1] == "load":
                made.loaded(due[2], now, 1.0, sizes[due[2]])
            else:
                made.unloaded(due[2])
        for action in made.decide(now):
            if action.kind == "admit":
                for admitted in action.admitted:
                    name, since = waiting.pop(admitted)
                    longest = max(longest, now - since)
                    uses[name] += 1
                    running.append((now + 3 * draw.random(), name))
            else:
                assert uses[action.model] == 0
                pending.append((now + 1.0, action.kind, action.model))
        assert sum(made.stage(name) is not Stage.UNLOADED for name in names) <= most
    assert not waiting
    # Each of the others may have a turn before: it drains, and the next one loads.
    assert longest < 4 * (MAX_WAIT + 8)
