"""Runs `chairlift shadow` beside the server, and shows what it reports."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import Metric
from prometheus_client.registry import Collector

from chairlift.server.observability.engine_metrics import NO_TENANT, gauge

log = logging.getLogger(__name__)

MAX_REPORT_BYTES = 16 << 20
"""A report has 100 tenants and 100 sessions at most."""

_FAMILIES = (
    ("time_to_first_token_seconds", "TTFT", {"0.5": "ttft_p50_s", "0.99": "ttft_p99_s"}),
    (
        "time_per_output_token_seconds",
        "Time per output token",
        {"0.5": "time_per_output_token_p50_s", "0.99": "time_per_output_token_p99_s"},
    ),
    ("preemptions", "Preemptions", {"": "preemptions"}),
    ("cached_prompt_share", "Share of prompt tokens found in the prefix cache", {"": "cached_share"}),
)
SHADOW_METRICS = tuple(f"shadow_{name}" for name, _, _ in _FAMILIES)
_BOUNDS = {"estimate": "change", "low": "low", "high": "high"}
"""The key of each label `bound` in the figures of a proposal."""


class Shadow(Collector):
    """The process that simulates what the server would do under other settings, and its last report (`sim.shadow.Shadow.document`)."""

    def __init__(self, command: Sequence[str], labels: Mapping[str, str]) -> None:
        """`labels` are those that all metrics have."""
        self._command, self._labels = command, labels
        self.report: Mapping[str, Any] | None = None

    async def run(self, engine_started: Awaitable[None]) -> None:
        """Runs the process until it ends or this is cancelled. The server goes on without it.

        A model that is loaded on demand has no journal before `engine_started`.
        """
        await engine_started
        process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE, limit=MAX_REPORT_BYTES)
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self.report = json.loads(line)
            self.report = None
            log.warning("the shadow ended with status %d: its figures are no longer shown", await process.wait())
        finally:
            with suppress(ProcessLookupError):
                process.kill()  # it has nothing to save
            await process.wait()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        report = self.report or {"tenants": {}, "covered": None, "proposal": None}
        for name, help, quantiles in _FAMILIES:
            text = f"{help} of the last ten minutes, by tenant: recorded, simulated, and simulated with the settings of the shadow."
            several = len(quantiles) > 1
            values = {
                (tenant or NO_TENANT, run, *([quantile] if several else [])): figures[key]
                for tenant, runs in report["tenants"].items()
                for run, figures in runs.items()
                for quantile, key in quantiles.items()
                if figures[key] is not None
            }
            yield gauge(f"shadow_{name}", text, self._labels, values, "tenant", "run", *(["quantile"] if several else []))
        text = "Share of the requests that the shadow simulated; others were more than its 2 % of a core allow."
        covered = {} if report["covered"] is None else {None: report["covered"]}
        yield gauge("shadow_covered_share", text, self._labels, covered)
        text = "Relative change of a latency by the change of settings that the shadow proposes, and the bounds of its uncertainty."
        proposal = report["proposal"] or {"figures": {}}
        changes = {
            (proposal["settings"], name, bound): figure[key]
            for name, figure in proposal["figures"].items()
            for bound, key in _BOUNDS.items()
        }
        yield gauge("shadow_proposed_change", text, self._labels, changes, "setting", "figure", "bound")
