"""What happens in the engine, for those who watch: looked at several times a second, and only while somebody does."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chairlift
from chairlift.errors import ChairliftError
from chairlift.server.keys import ANOTHER
from chairlift.server.observability import load
from chairlift.server.observability.percentiles import Buckets, percentiles

if TYPE_CHECKING:
    from chairlift.server.service import Service

LOOK_SECONDS, SAMPLE_SECONDS = 0.25, 1.0
"""How often the engine is looked at, and how often its counters are noted."""
PATIENCE = 5.0
"""Seconds after which nobody is thought to watch any more."""
FIRST_LOOK = 2.0
"""Seconds that the first answer waits for the engine, which may be in a long step."""
STEPS, SAMPLES = 480, 300
"""How many steps and samples are kept."""
WINDOW = 60.0
"""Seconds that latencies are told of; those since the server's start as long as nobody has watched for a sixth of that."""

_RATES = {"generation": "generated_tokens", "prompt": "prompt_tokens", "computed": "computed_tokens", "steps": "steps"}


class SnapshotPoller:
    """The newest look, the steps and samples before it, all within one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._asked = 0.0
        self._task: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._snapshot: dict[str, Any] = {}
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self._noted = 0
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self._buckets: deque[tuple[float, Mapping[str, Buckets]]] = deque()
        self._counted: tuple[float, Mapping[str, Any]] | None = None

    async def state(self, step: int = 0, sample: float = 0.0, tenant: str = "") -> dict[str, Any]:
        """Everything, as JSON has it: steps after the one numbered `step`, samples after the time `sample`.

        Someone with a `tenant` does not see the names of others.
        """
        self._asked = time.monotonic()
        if self._task is None or self._task.done():
            self._looked.clear()
            self._task = asyncio.create_task(self._look())
        if self._service.engine.ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._looked.wait(), FIRST_LOOK)
        engine, stats = self._service.engine, self._service.engine.stats()
        names = dict(self._snapshot.get("names", ()))
        return {
            "model": self._service.model,
            "version": chairlift.__version__,
            "time": time.time(),
            "ready": engine.ready,
            "state": self._service.lifecycle.state.value,
            "restarts": self._service.lifecycle.restarts,
            "stuck": engine.stuck,
            "facts": {name: fact for name, fact in engine.facts.items() if isinstance(fact, int)},
            "load": {"slots": load.rows(stats), "kv_cache": load.kv_cache(stats), "swap": load.swap(stats)}
            | {"saturation": load.saturation(stats), "fragmentation": load.fragmentation(stats)},
            "stats": {name: value for name, value in stats.items() if name not in ("tenants", "classes")},
            "latency": self._latency(),
            "running": [_named(one, names, tenant) for one in self._snapshot.get("running", ())],
            "waiting": [_named(one, names, tenant) for one in self._snapshot.get("waiting", ())],
            "kv_map": base64.b64encode(self._snapshot.get("kv_map", b"")).decode(),
            "blocks_per_cell": self._snapshot.get("blocks_per_cell", 1),
            "steps": [one for one in self._steps if one["id"] > step],
            "samples": [one for one in self._samples if one["time"] > sample],
        }

    async def _look(self) -> None:
        """Looks until nobody watches."""
        self._buckets.clear()
        self._counted = None
        due = 0.0
        while (now := time.monotonic()) - self._asked < PATIENCE:
            if self._service.engine.ready:
                # An engine that ends meanwhile is not ready any more, which is told.
                with contextlib.suppress(ChairliftError):
                    self._take(await self._service.engine.look())
            if now >= due:
                due = now + SAMPLE_SECONDS
                self._sample(now)
            self._looked.set()
            await asyncio.sleep(LOOK_SECONDS)

    def _take(self, snapshot: dict[str, Any]) -> None:
        for step in snapshot.pop("steps"):
            self._noted += 1
            # The steps' clock is the engine's, whose zero means nothing to a reader.
            ago = (snapshot["now_us"] - step.pop("planned_us")) / 1e6
            self._steps.append({"id": self._noted, "time": time.time() - ago, **step})
        self._snapshot = snapshot

    def _sample(self, now: float) -> None:
        stats = dict(self._service.engine.stats())
        self._buckets.append((now, self._service.metrics.buckets()))
        while len(self._buckets) > 1 and now - self._buckets[1][0] >= WINDOW:
            self._buckets.popleft()
        if self._counted is not None:
            since, before = self._counted
            sample = {"time": time.time(), "waiting": stats.get("waiting_by_state", {}), "running": stats.get("running", 0)}
            sample |= {"kv_cache": load.kv_cache(stats)}
            for name, key in _RATES.items():
                grown = stats.get(key, 0) - before.get(key, 0)
                sample[name] = max(0.0, grown) / (now - since)  # below 0 where the engine was started again
            self._samples.append(sample)
        self._counted = now, stats

    def _latency(self) -> dict[str, Any]:
        if not self._buckets:
            return {"window": None}
        newest, now = self._buckets[-1]
        since, before = self._buckets[0]
        long = newest - since >= WINDOW / 6
        return {"window": newest - since if long else None} | {
            name: percentiles(before.get(name, {}) if long else {}, buckets) for name, buckets in now.items()
        }


def _named(one: Mapping[str, Any], names: Mapping[int, str], tenant: str) -> dict[str, Any]:
    """A sequence with its request's name, if it is the reader's to know."""
    if tenant not in ("", one["tenant"]):
        return {**one, "tenant": ANOTHER, "request": None}
    return {**one, "request": names.get(one["tag"])}
