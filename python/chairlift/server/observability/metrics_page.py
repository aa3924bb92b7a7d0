"""The text of GET /metrics, which is rendered beside the event loop, and not too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from chairlift.server.keys import Reader
from chairlift.server.observability.metrics import Metrics, render

PAUSE = 10.0
"""A text is served again for this many times the CPU time that rendering it took: 0.1 s with many tenants, a hundredth of that with few."""


class MetricsPage:
    """Renders the metrics of all models in one thread, so that any number of scrapers cost no more than one."""

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models
        self.pause = PAUSE
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._texts: dict[Reader, tuple[float, bytes]] = {}
        """Recent texts and until when they are served, by reader."""

    async def text(self, reader: Reader) -> bytes:
        """Returns the metrics that `reader` may see in Prometheus' text format."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._text, reader)

    def _text(self, reader: Reader) -> bytes:
        now = time.monotonic()
        self._texts = {one: kept for one, kept in self._texts.items() if now < kept[0]}
        if reader not in self._texts:
            began = time.thread_time()
            text = render(self._models, reader)
            self._texts[reader] = time.monotonic() + self.pause * (time.thread_time() - began), text
        return self._texts[reader][1]
