"""Polls the engine's state for the dashboard, several times a second and only while a client asks for it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import chairlift
from chairlift.engine.snapshot import EngineSnapshot, RunningSequence, WaitingSequence
from chairlift.engine.stats import Stats
from chairlift.errors import ChairliftError
from chairlift.scheduling import TIERS
from chairlift.server.keys import Reader, sees
from chairlift.server.observability import engine_stats
from chairlift.server.observability.latencies import Buckets, percentiles, total
from chairlift.server.observability.metrics import DASHBOARD_LATENCIES

if TYPE_CHECKING:
    from chairlift.engine.replica import Replica
    from chairlift.server.model import ServedModel

POLL_SECONDS, SAMPLE_SECONDS = 0.25, 1.0
"""Intervals of snapshots and of samples of the counters."""
IDLE_SECONDS = 5.0
"""Polling stops after this many seconds without a request."""
FIRST_POLL_TIMEOUT = 2.0
"""Seconds that the first response waits for the engine, which may be in a long step."""
STEPS, SAMPLES = 480, 300
"""Maximum steps and samples kept."""
LATENCY_WINDOW = 60.0
"""Seconds that latency percentiles cover; until a sixth of it was observed they cover the time since the server's start."""

_TIERS = (*TIERS, "background")

_NOTHING = EngineSnapshot(running=[], waiting=[], waiting_by_tier={}, kv_map=b"", blocks_per_cell=1, steps=[], now_us=0, stats={}, names=[])
"""What is shown of an engine before its first snapshot."""

_RATES = {"generation": "generated_tokens", "prompt": "computed_prompt_tokens", "computed": "computed_tokens", "steps": "steps"}


class SnapshotPoller:
    """An engine's newest snapshot, with the steps and samples before it. Latencies are those of the whole model."""

    def __init__(self, model: ServedModel, replica: Replica) -> None:
        self._model = model
        self.replica = replica
        self._last_request_time = 0.0
        self._task: asyncio.Task[None] | None = None
        self._polled = asyncio.Event()
        self._snapshot = _NOTHING
        self._steps: deque[tuple[int, dict[str, object]]] = deque(maxlen=STEPS)
        self._step_count = 0
        self._samples: deque[tuple[float, dict[str, object]]] = deque(maxlen=SAMPLES)
        self._buckets: deque[tuple[float, Mapping[str | None, Mapping[str, Buckets]]]] = deque()
        """Readings of the latencies, by tier; None for all requests."""
        self._previous: tuple[float, Stats] | None = None
        self._wall_clock = 0.0
        """What is added to the monotonic clock: the times of samples and steps never go back, as the system's clock may."""

    async def state(self, step: int = 0, sample: float = 0.0, reader: Reader = None) -> dict[str, object]:
        """Returns the body of /dashboard/data: steps after the one numbered `step`, samples after the time `sample`.

        A tenant sees its own requests and how loaded the server is, and the same fields without values for the rest.
        """
        self._last_request_time = time.monotonic()
        if self._task is None or self._task.done():
            self._polled.clear()
            self._snapshot = _NOTHING  # it is old
            self._wall_clock = time.time() - time.monotonic()
            self._task = asyncio.create_task(self._poll())
        if self.replica.engine.ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._polled.wait(), FIRST_POLL_TIMEOUT)
        engine = self.replica.engine
        activity = self._activity(step, sample) if reader is None else self._activity_of(reader)
        return {
            "model": self._model.name,
            "version": chairlift.__version__,
            "time": self._wall_clock + time.monotonic(),
            "ready": engine.ready,
            "state": self._model.lifecycle.state.value,
            "restarts": self._model.lifecycle.restarts,
            "replica": self.replica.number,
            "replicas": [_describe(one, reader) for one in self._model.engine.replicas],
            "stuck": engine.stuck,
            "info": {name: value for name, value in engine.info.pack().items() if isinstance(value, int)},
            "sessions": self._model.metrics.sessions.rows(reader),
            **activity,
        }

    def _activity(self, step: int, sample: float) -> dict[str, object]:
        """Returns all that the engine does, for the operator."""
        stats, targets = self._stats, self._model.metrics.targets_met()
        return {
            "load": engine_stats.load(stats),
            "stats": stats.counters(),
            "latency": self._latency(None),
            "cache_misses": self._model.metrics.cache_misses(),
            "tiers": [row for tier in _TIERS if (row := self._tier(tier, targets.get(tier, {})))],
            "running": self._named(self._snapshot["running"]),
            "waiting": self._named(self._snapshot["waiting"]),
            "kv_map": base64.b64encode(self._snapshot["kv_map"]).decode(),
            "blocks_per_cell": self._snapshot["blocks_per_cell"],
            "steps": [one for number, one in self._steps if number > step],
            "samples": [one for taken, one in self._samples if taken > sample],
        }

    def _activity_of(self, tenant: str) -> dict[str, object]:
        """Returns a tenant's part of `_activity`. Steps, samples, latencies and the map would tell what others do, and when."""
        running = [_without_cache(one) for one in self._snapshot["running"] if sees(tenant, one["tenant"])]
        waiting = [one for one in self._snapshot["waiting"] if sees(tenant, one["tenant"])]
        stats = self._stats
        held = min(stats.total_blocks, sum(one["blocks"] for one in running))
        own = Stats(
            running=len(running),
            waiting=len(waiting),
            slots=stats.slots,
            total_blocks=stats.total_blocks,
            free_blocks=stats.total_blocks - held,
            waiting_by_state=Counter(one["state"] for one in waiting),
            saturation=engine_stats.coarse(stats.saturation),
        )
        shown = {name: getattr(own, name) for name in ("running", "waiting", "slots", "total_blocks", "free_blocks", "waiting_by_state")}
        nothing = {"latency": {"window": None}, "tiers": [], "cache_misses": [], "kv_map": "", "blocks_per_cell": 1}
        nothing |= {"steps": [], "samples": []}
        rows = {"running": self._named(running), "waiting": self._named(waiting)}
        return {"load": engine_stats.load(own), "stats": shown, **rows, **nothing}

    @property
    def _stats(self) -> Stats:
        """The counters at the time of the snapshot: they agree with its requests."""
        return Stats(**self._snapshot["stats"]) if self._snapshot["stats"] else self.replica.engine.stats()

    def _tier(self, tier: str, targets: Mapping[str, object]) -> dict[str, object] | None:
        """Returns the requests of a tier, its latencies, and how many answers met its `targets`; None if it was not used."""
        running = sum(one["tier"] == tier for one in self._snapshot["running"])
        waiting = self._snapshot["waiting_by_tier"].get(tier, 0)
        latency = self._latency(tier)
        if not (running or waiting or any(one["count"] for one in latency.values() if isinstance(one, dict))):
            return None
        return {"tier": tier, "running": running, "waiting": waiting, "latency": latency, "targets": targets}

    def _named(self, sequences: Sequence[RunningSequence | WaitingSequence]) -> list[dict[str, object]]:
        """Returns sequences of the snapshot, each with its request's id."""
        names = dict(self._snapshot["names"])
        return [{**one, "request": names.get(one["tag"])} for one in sequences]

    async def _poll(self) -> None:
        """Polls until no client asks any more."""
        self._buckets.clear()
        self._previous = None
        due = 0.0
        while (now := time.monotonic()) - self._last_request_time < IDLE_SECONDS:
            if not self.replica.engine.ready:
                self._snapshot = _NOTHING
            else:
                # If the engine dies, `ready` turns False.
                with contextlib.suppress(ChairliftError):
                    self._store(await self.replica.engine.take_snapshot())
            if now >= due:
                due = now + SAMPLE_SECONDS
                self._sample(now)
                await self._read_buckets(now)
            self._polled.set()
            await asyncio.sleep(POLL_SECONDS)

    def _store(self, snapshot: EngineSnapshot) -> None:
        now = self._wall_clock + time.monotonic()
        for step in snapshot["steps"]:
            self._step_count += 1
            # The steps' times are on the engine's clock: convert them.
            ago = (snapshot["now_us"] - step["planned_us"]) / 1e6
            shown = {name: value for name, value in step.items() if name != "planned_us"}
            self._steps.append((self._step_count, {"id": self._step_count, "time": now - ago, **shown}))
        self._snapshot = snapshot

    async def _read_buckets(self, now: float) -> None:
        """Reads the latencies in small parts, between which the event loop does other work: each takes time by the number of tenants."""
        read: dict[str | None, dict[str, Buckets]] = {tier: {} for tier in (None, *_TIERS)}
        for name in DASHBOARD_LATENCIES:
            for tier in _TIERS:
                read[tier][name] = self._model.metrics.buckets(name, tier)
                await asyncio.sleep(0)
            read[None][name] = total([read[tier][name] for tier in _TIERS])
        self._buckets.append((now, read))
        while len(self._buckets) > 1 and now - self._buckets[1][0] >= LATENCY_WINDOW:
            self._buckets.popleft()

    def _sample(self, now: float) -> None:
        stats = self.replica.engine.stats()
        if self._previous is not None:
            since, before = self._previous
            at = self._wall_clock + now
            sample = {"time": at, "waiting": stats.waiting_by_state, "running": stats.running, "kv_cache": stats.kv_cache}
            for name, key in _RATES.items():
                increase = getattr(stats, key) - getattr(before, key)
                sample[name] = max(0.0, increase) / (now - since)  # negative after an engine restart
            self._samples.append((at, sample))
        self._previous = now, stats

    def _latency(self, tier: str | None) -> dict[str, object]:
        """Returns the percentiles of a tier's requests, None for all requests, and the seconds that they cover."""
        if not self._buckets:
            return {"window": None}
        newest, now = self._buckets[-1]
        since, before = self._buckets[0]
        long = newest - since >= LATENCY_WINDOW / 6
        return {"window": newest - since if long else None} | {
            name: percentiles(before[tier].get(name, {}) if long else {}, buckets) for name, buckets in now[tier].items()
        }


def _without_cache(running: RunningSequence) -> RunningSequence:
    """Returns a sequence whose tokens in the cache, during its prompt, do not tell its tenant how many of them others had put there."""
    prompt, output = running["prompt_tokens"], running["output_tokens"]
    return {**running, "computed_tokens": prompt + output - 1 if output else 0}


def _describe(replica: Replica, reader: Reader) -> dict[str, object]:
    """Returns an engine's number and state, and for the operator its requests and load."""
    described: dict[str, object] = {"number": replica.number, "state": replica.state}
    if reader is not None:
        return described
    stats = replica.engine.stats()
    counts = {"running": stats.running, "waiting": stats.waiting + stats.swapped, "restarts": replica.restarts}
    return described | counts | {"machine": replica.machine, "load": engine_stats.load(stats)}
