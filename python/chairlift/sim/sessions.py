"""Simulates users that run recorded sessions of agents in a closed loop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift import _core
from chairlift.bench.sessions import RecordedSession, read_sessions
from chairlift.errors import InvalidSetting, InvalidTrace
from chairlift.scheduling import TIER_WEIGHTS, TIERS
from chairlift.sim import groups
from chairlift.sim.devices import Device, Profile
from chairlift.sim.result import Result
from chairlift.sim.run import Trace, block_bytes, configured, longest_request, machine, requests_of, simulating
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

USERS = 32
"""Default of the number of users."""
THINK_TIME = 60.0
"""Default of the longest time between an answer and the next request, in seconds."""
DURATION = 3.5 * 3600
"""Default of the simulated time, in seconds."""
WARM_UP = 1 / 7
"""The part of the time at the beginning that the figures leave out."""
MEASURED_TURNS, MEASURED_SECONDS = 10, 60.0
"""A session has a slowdown if more than MEASURED_SECONDS passed in which at least MEASURED_TURNS of its requests were answered."""

_SEEN = np.dtype([(name, "<i8") for name in ("session", "began", "ended", "turns", "alone", "longest_wait", "complete")])


class SessionsResult:
    """The result of a simulation of sessions.

    `requests` covers those of sessions that ended after the warm-up, and `others` those without a session; their columns are those of
    `Result.requests`. `sessions` is a structured array of the replays that had a request after it: session (the index of the recorded
    one), began and ended in microseconds, turns, alone (the microseconds that it would have taken alone with a cache that loses nothing),
    longest_wait (for a first token) and complete.
    """

    def __init__(
        self,
        report: _core.SessionsReport,
        recorded: Sequence[RecordedSession],
        settings: Mapping[str, Any],
        users: int,
        span: float,
        wall: float,
        weights: Mapping[str, int],
        policy_failure: str | None = None,
    ) -> None:
        self.result = Result(report["engines"], settings, wall, weights=weights, policy_failure=policy_failure)
        """All requests, with those of the warm-up."""
        self.users, self.span, self.wall = users, span, wall
        self._recorded = recorded
        self._counts = self.result.requests["ended"] >= 1e6 * span * WARM_UP
        in_session = self.result.labels("session") != ""
        self.requests = self.result.requests[self._counts & in_session]
        self.others = self.result.requests[self._counts & ~in_session]
        self.sessions: NDArray[Any] = np.frombuffer(report["sessions"], _SEEN)
        self.context_tokens: int = report["context_tokens"]
        """The mean tokens of all live sessions' contexts. With a cache that loses nothing it is the working set."""
        self.measured = span * (1 - WARM_UP)
        """Seconds after the warm-up."""

    @property
    def slowdowns(self) -> NDArray[np.float64]:
        """How many times longer each session took than alone, without those that are too short to say."""
        of_each = self._slowdowns()
        slowdowns: NDArray[np.float64] = of_each[~np.isnan(of_each)]
        return slowdowns

    def grouped(self, group: str) -> dict[str, dict[str, float | None]]:
        """The figures of all requests after the warm-up, by tenant, session or tier: see `groups.figures`."""
        return groups.grouped(self.result.requests[self._counts], self.result.labels(group)[self._counts])

    def replays(self) -> list[dict[str, Any]]:
        """The rows of `sessions`, with times in seconds and the names of `chairlift bench serve --sessions`.

        The slowdown over alone is None if the session is too short to say.
        """
        return [
            {
                "session": int(one["session"]),
                "tenant": self._recorded[one["session"]].tenant,
                "tier": self._recorded[one["session"]].tier,
                "began": one["began"] / 1e6,
                "ended": one["ended"] / 1e6,
                "seconds": (one["ended"] - one["began"]) / 1e6,
                "complete": bool(one["complete"]),
                "requests": int(one["turns"]),
                "slowdown": None if np.isnan(slowdown) else float(slowdown),
                "longest_wait": one["longest_wait"] / 1e6,
            }
            for one, slowdown in zip(self.sessions, self._slowdowns(), strict=True)
        ]

    def _slowdowns(self) -> NDArray[np.float64]:
        """The slowdown of each row of `sessions`, NaN if it is too short to say."""
        seen = self.sessions
        took = (seen["ended"] - seen["began"]) / 1e6
        # A session that waits at the end counts although few of its requests were answered.
        long = (took > MEASURED_SECONDS) & ((seen["turns"] >= MEASURED_TURNS) | (seen["longest_wait"] > 300e6))
        return np.where(long, took / np.maximum(seen["alone"] / 1e6, 1e-6), np.nan)

    def figures(self) -> dict[str, float | None]:
        """The figures of sessions by name: rates, the part of prompt tokens that were cached, seconds, and slowdowns."""
        ttft, slowdowns = groups.ttft(self.requests), self.slowdowns
        prompt = int(self.requests["prompt_tokens"].sum())
        p50, p99 = np.percentile(ttft, (50, 99)).tolist() if len(ttft) else (None, None)
        return {
            "users": self.users,
            "requests_per_s": len(self.requests) / self.measured,
            "sessions_per_hour": int(self.sessions["complete"].sum()) / self.measured * 3600,
            "cached_share": int(self.requests["cached_tokens"].sum()) / prompt if prompt else None,
            "ttft_p50_s": p50,
            "ttft_p99_s": p99,
            "longest_wait_s": int(self.sessions["longest_wait"].max()) / 1e6 if len(self.sessions) else None,
            "slowdown_mean": float(slowdowns.mean()) if len(slowdowns) else None,
            "slowdown_worst": float(slowdowns.max()) if len(slowdowns) else None,
            "context_tokens": self.context_tokens,
            "refused": len(self.result.refused),
        }


def simulate_sessions(
    trace: str | Path | Sequence[RecordedSession],
    users: int = USERS,
    *,
    model: str | None = None,
    device: str | Device | Profile = "cpu",
    longest_think: float = THINK_TIME,
    duration: float = DURATION,
    seed: int = 0,
    replicas: int = 1,
    routing: str = "predicted",
    step_time: StepTime | None = None,
    disk: float | None = None,
    beside: Trace | None = None,
    **settings: Any,
) -> SessionsResult:
    """Simulates users of recorded sessions and returns their latencies and throughput.

    Args:
        trace: a file of sessions (see docs/capacity.md), or sessions. A request that is longer than the model's context, or than the KV
            cache, ends its session.
        users: sessions at a time. A user begins the next session when one has ended.
        longest_think: the longest time between an answer and the next request, in seconds.
        duration: seconds to simulate. The first seventh is left out of the figures.
        seed: which sessions the users have, and when they begin.
        disk: bytes a second at which a disk with all contexts is read, as with `--prefix-cache-dir`; None without one.
        beside: requests without a session that arrive meanwhile, as `simulate` takes them.

    The others are those of `simulate`, with which scheduling_policy may be a `Policy`. The same arguments give the same result, bit for
    bit. Raises InvalidTrace, InvalidSetting, ModelNotFound, or TypeError for an unknown setting.
    """
    config = configured("simulate_sessions", settings)
    numbers, steps = machine(model, device, config, step_time)
    longest = longest_request(numbers)
    sessions = read_sessions(trace, longest) if isinstance(trace, str | Path) else trace
    if not sessions:
        raise InvalidTrace("there is no session to simulate")
    return run_sessions(
        *(sessions, users, numbers, steps, config.tenant_weights or {}),
        tier_weights=config.tier_weights,
        longest_think=longest_think,
        duration=duration,
        seed=seed,
        replicas=replicas,
        routing=routing,
        read_ns_per_block=0 if disk is None else round(block_bytes(model, device, config) / disk * 1e9),
        beside=None if beside is None else requests_of(beside, config),
    )


def run_sessions(
    sessions: Sequence[RecordedSession],
    users: int,
    numbers: dict[str, Any],
    steps: StepTime,
    weights: Mapping[str, int],
    *,
    tier_weights: Mapping[str, int] | None = None,
    longest_think: float,
    duration: float,
    seed: int = 0,
    replicas: int = 1,
    routing: str = "predicted",
    read_ns_per_block: int = 0,
    beside: Workload | None = None,
) -> SessionsResult:
    """Simulates users of sessions with the scheduler's settings `numbers`; see `simulate_sessions`."""
    if users < 1:
        raise InvalidSetting(f"--users must be at least 1, got {users}")
    weights = {**dict(beside.tenants if beside else ()), **weights}
    of_tiers = {**TIER_WEIGHTS, **(tier_weights or {})}
    tenants = sorted({session.tenant for session in sessions}.union(weights if beside else ()))
    start = time.perf_counter()
    policy = numbers.get("scheduling_policy")
    with simulating(policy) as failures:
        report = _core.simulate_sessions(
            *_arrays(sessions, tenants, weights, of_tiers),
            sessions[0].block,
            [(tenant, weights.get(tenant, 1) * of_tiers["default"]) for tenant in tenants],
            (users, round(longest_think * 1e6), round(duration * WARM_UP * 1e6), round(duration * 1e6), seed),
            numbers,
            steps.numbers,
            replicas=replicas,
            routing=routing,
            read_ns_per_block=read_ns_per_block,
            beside=None if beside is None else _beside(beside, tenants),
        )
    wall = time.perf_counter() - start
    return SessionsResult(report, sessions, numbers, users, duration, wall, weights, failures[policy])


def _beside(workload: Workload, tenants: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Requests without a session for the core, with the numbers of `tenants`."""
    numbers = np.array([tenants.index(name) for name, _ in workload.tenants])
    return workload.with_(tenant=numbers[workload.column("tenant")]).requests, workload.names, workload.name_block


def _arrays(
    sessions: Sequence[RecordedSession], tenants: Sequence[str], weights: Mapping[str, int], of_tiers: Mapping[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The sessions, their blocks' parents and their requests as rows of numbers for the core."""
    heads = [
        (
            len(one.threads),
            one.num_requests,
            len(one.parents),
            one.shared,
            one.group,
            tenants.index(one.tenant),
            TIERS.index(one.tier),
            weights.get(one.tenant, 1) * of_tiers[one.tier],
        )
        for one in sessions
    ]
    turns = [
        (
            thread,
            round(turn.think * 1e6),
            turn.prompt_tokens,
            turn.output_tokens,
            turn.calls_tool,
            turn.leaf,
            turn.subagents.start,
            len(turn.subagents),
        )
        for one in sessions
        for thread, own in enumerate(one.threads)
        for turn in own
    ]
    parents = chain.from_iterable(one.parents for one in sessions)
    return np.array(heads, np.int64), np.fromiter(parents, np.int64), np.array(turns, np.int64)
