"""`plan --sessions`: the number of agents that a machine serves, each a user of recorded sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.bench.sessions import read_sessions
from chairlift.bench.sweep import search
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import Device, Profile
from chairlift.sim.plan import BISECTIONS, Progress, doubled, ends, step_error
from chairlift.sim.run import longest_request, machine
from chairlift.sim.sessions import DURATION, THINK_TIME, SessionsResult, run_sessions

_SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""The numbers of agents whose figures are reported, as multiples of the planned one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsTarget:
    """The most that a session's time may be of its time alone on the machine, for `percentile` percent of the sessions."""

    slowdown: float = 2.0
    percentile: float = 95.0

    def __post_init__(self) -> None:
        if not (self.slowdown > 1 and 0 < self.percentile <= 100):
            raise InvalidSetting("the target is a slowdown above 1, and a percentile above 0 and at most 100")

    def slowdown_of(self, result: SessionsResult) -> float | None:
        """The percentile of the sessions' slowdowns; None without a session that is long enough to have one."""
        slowdowns = result.slowdowns
        return float(np.percentile(slowdowns, self.percentile, method="inverted_cdf")) if len(slowdowns) else None

    def met(self, result: SessionsResult) -> bool:
        """Whether the sessions are within the target."""
        slowdown = self.slowdown_of(result)
        return slowdown is not None and slowdown <= self.slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsPlan:
    """The number of agents within `target`; see `plan_sessions`."""

    target: SessionsTarget
    agents: int
    low: int
    """The number with steps slower by `error`."""
    high: int
    """The number with steps faster by `error`."""
    sensitivity: dict[str, int]
    """The number of agents with twice the KV blocks, twice the slots, and (`compute`) with steps that take half as long."""
    points: list[dict[str, float | None]]
    """`SessionsResult.figures` and the percentile of the slowdowns (`slowdown`) for numbers around `agents`."""
    error: float
    """The relative error of the step times."""

    def document(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)


def plan_sessions(
    trace: str | Path,
    target: SessionsTarget | None = None,
    *,
    device: Device | Profile,
    model: str | None = None,
    config: EngineConfig | None = None,
    longest_think: float = THINK_TIME,
    duration: float = DURATION,
    on_progress: Callable[[float], None] = lambda done: None,
) -> SessionsPlan:
    """Finds the largest number of agents whose sessions meet the target, by simulations as in `simulate_sessions`.

    Each agent has one session at a time. The same arguments give the same plan, bit for bit. `on_progress` gets the completed share, from 0
    to 1. Raises InvalidSetting if one agent alone misses the target or has no session that is long enough, or whatever `simulate_sessions`
    raises.
    """
    target, config = target or SessionsTarget(), config or EngineConfig()
    settings, steps = machine(model, device, config)
    sessions = read_sessions(trace, longest_request(settings))
    error = step_error(device)
    progress = Progress(on_progress, 7 if error else 5)  # the searches, and the points

    def result(users: int, numbers: dict[str, Any], factor: float = 1.0) -> SessionsResult:
        weights = config.tenant_weights or {}
        return run_sessions(sessions, users, numbers, steps.times(factor), weights, longest_think=longest_think, duration=duration)

    def largest(start: int, numbers: dict[str, Any], factor: float = 1.0) -> int:
        progress()
        meets = cache(lambda users: target.met(result(users, numbers, factor)))
        return int(search(lambda users: meets(int(users)), start, BISECTIONS, least=1.0) or 0)

    agents = largest(1, settings)
    if not agents:
        slowdown = target.slowdown_of(result(1, settings))
        if slowdown is None:
            raise InvalidSetting(f"no session is long enough to be judged in {duration:g} s: simulate a longer --duration")
        raise InvalidSetting(f"this target cannot be met: sessions of a single agent take {slowdown:.2f} times as long as alone")
    low, high = ends([agents], error, lambda slowdown: [agents, largest(agents, settings, slowdown)])
    sensitivity = {
        "compute": largest(agents, settings, 0.5),
        "kv": largest(agents, doubled(settings, "num_kv_blocks")),
        "slots": largest(agents, doubled(settings, "max_num_seqs")),
    }
    progress()
    return SessionsPlan(
        target=target,
        agents=agents,
        low=low,
        high=high,
        sensitivity=sensitivity,
        points=[
            one.figures() | {"slowdown": target.slowdown_of(one)}
            for users in dict.fromkeys(max(1, round(share * agents)) for share in _SHARES)
            for one in (result(users, settings),)
        ],
        error=error,
    )
