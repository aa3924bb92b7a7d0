"""The text of GET /metrics, which is rendered beside the event loop, and not too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from prometheus_client import Metric

from chairlift.server.keys import HIDDEN_TENANT, Reader
from chairlift.server.observability.metrics import Metrics, collect, render, tenants
from chairlift.server.work import WorkThreads

PAUSE = 10.0
"""Metrics are served again for this many times the CPU time that they took: 0.1 s with many tenants, a hundredth of that with few."""


class MetricsPage:
    """Renders the metrics of all models in one thread, so that any number of scrapers cost no more than one.

    All readers see metrics collected at the same time, because collecting takes most of the time. Each tenant that has samples gets a
    text, and all others share one: clients can invent any number of names.
    """

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models
        self.pause = PAUSE
        self._thread = WorkThreads(1, "metrics")
        self._families: list[Metric] = []
        self._texts: dict[Reader, bytes] = {}
        """The texts of `_families`, by reader; HIDDEN_TENANT stands for tenants without samples."""
        self._tenants: set[str] = set()
        self._until = 0.0
        """When the metrics are collected again."""

    async def text(self, reader: Reader) -> bytes:
        """Returns the metrics that `reader` may see in Prometheus' text format."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._text, reader)

    def _text(self, reader: Reader) -> bytes:
        began = time.thread_time()
        if (now := time.monotonic()) >= self._until:
            self._until = now
            self._families, self._texts = collect(self._models), {}
            self._tenants = tenants(self._families)
        if reader is not None and reader not in self._tenants:
            reader = HIDDEN_TENANT
        if reader not in self._texts:
            self._texts[reader] = render(self._families, reader)
            self._until += self.pause * (time.thread_time() - began)
        return self._texts[reader]
