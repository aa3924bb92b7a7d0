"""The text of GET /metrics, which is rendered beside the event loop and at most once a second for each reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from chairlift.server.keys import Reader
from chairlift.server.observability.metrics import Metrics, render

MAX_AGE = 1.0
"""Seconds for which a text is served again. With many tenants, rendering takes 0.1 s."""


class MetricsPage:
    """Renders the metrics of all models in one thread, so that any number of scrapers cost no more than one."""

    def __init__(self, models: Sequence[Metrics], max_age: float = MAX_AGE) -> None:
        self._models = models
        self.max_age = max_age
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._texts: dict[Reader, tuple[float, bytes]] = {}
        """Recent texts and when they were rendered, by reader."""

    async def text(self, reader: Reader) -> bytes:
        """Returns the metrics that `reader` may see in Prometheus' text format."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._text, reader)

    def _text(self, reader: Reader) -> bytes:
        now = time.monotonic()
        self._texts = {one: text for one, text in self._texts.items() if now - text[0] < self.max_age}
        if reader not in self._texts:
            self._texts[reader] = now, render(self._models, reader)
        return self._texts[reader][1]
