"""A gate in front of a server that computes prompts quickly and many of them in one step, in virtual time."""

from statistics import median

import pytest
from simulated_upstream import Agents, Gate, Server, World, patched

TOKEN_SECONDS = 1 / 5000
SLOTS = 32
KV_TOKENS = 1 << 20


def served(monkeypatch, directory, agents, seed, *, gated, seconds=60.0):
    """What agents get that go on at once or after half a second, and the gate."""
    world = World()
    patched(monkeypatch, world)
    server = Server(world, SLOTS, TOKEN_SECONDS)
    gate = Gate(world, server, directory, KV_TOKENS, SLOTS) if gated else None
    seen = Agents(world, gate or server, agents, 0.5, seed).seen
    world.run(seconds, gate)
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
