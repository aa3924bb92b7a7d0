"""A gate in front of a server that computes prompts quickly and many of them in one step, in virtual time."""

from statistics import median

import pytest
from simulated_upstream import Agents, EverySecond, Gate, LongPrompts, Server, World, patched

TOKEN_SECONDS = 1 / 5000
SLOTS = 32
KV_TOKENS = 1 << 20
BACKLOG = 750 + 2048 + 300
"""What the server may have ahead, what it computes in its present step, and a prompt that was passed on at the same time."""


def served(monkeypatch, directory, agents, seed, *, gated):
    """What agents get that go on at once or after half a second."""
    world = World()
    patched(monkeypatch, world)
    server = Server(world, SLOTS, TOKEN_SECONDS, step_seconds=0.02)
    gate = Gate(world, server, directory, KV_TOKENS, SLOTS) if gated else None
    seen = Agents(world, gate or server, agents, 0.5, seed, new=(50, 400), output=(5, 30)).seen
    world.run(30.0, gate)
    if gate is not None:
        gate.engine.check()
        assert gate.engine.stats().preemptions == 0
        gate.engine.close()
    return seen


@pytest.mark.parametrize("agents", [1, 8, 24])
def test_agents_whose_contexts_fit_are_served_as_often_as_without_the_gate(monkeypatch, tmp_path, agents):
    direct, gated = ([served(monkeypatch, tmp_path, agents, seed, gated=one) for seed in range(3)] for one in (False, True))
    assert sum(one.ended for one in gated) >= 0.97 * sum(one.ended for one in direct)
    first = [median([seconds for one in side for seconds in one.first]) for side in (direct, gated)]
    assert first[1] <= first[0] + 0.05


def beside(monkeypatch, directory, flood):
    """The times to the first token of a tenant that sends 300 tokens a second, and what was left at the server when it got a prompt."""
    world = World()
    patched(monkeypatch, world)
    gate = Gate(world, Server(world, SLOTS, TOKEN_SECONDS), directory, KV_TOKENS, SLOTS, scheduling_policy="fair")
    flood(world, gate)
    seen = EverySecond(world, gate, 300, "honest").seen
    world.run(40.0, gate)
    gate.engine.close()
    return seen.first, gate.backlogs


def test_a_tenant_waits_for_little_of_what_another_sends(monkeypatch, tmp_path):
    alone, _ = beside(monkeypatch, tmp_path, lambda world, gate: None)
    first, backlogs = beside(monkeypatch, tmp_path, lambda world, gate: Agents(world, gate, 20, 0.0, 1, "flood"))
    assert max(alone) == pytest.approx(0.07, abs=0.001)
    # Before a prompt there is what the server may have ahead, and sometimes a prompt of 1,700 tokens.
    assert median(first) <= median(alone) + 0.1
    assert max(first) <= max(alone) + 0.45
    assert max(backlogs) <= BACKLOG


def test_a_tenant_waits_for_two_long_prompts_at_most(monkeypatch, tmp_path):
    first, backlogs = beside(monkeypatch, tmp_path, lambda world, gate: LongPrompts(world, gate, 12, 6000, "flood"))
    assert len(first) >= 37
    # One that the server has begun, one that came before it to the gate, and the step with its own prompt.
    assert max(first) <= (2 * 6000 + 2048) * TOKEN_SECONDS + 0.2
    assert max(backlogs) <= BACKLOG
