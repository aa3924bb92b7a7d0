"""An engine for a model that another server runs: it schedules, and estimates what that server does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift.engine import clock
from chairlift.engine.engine import Engine
from chairlift.engine.frames import Estimate, StepOutputs

if TYPE_CHECKING:
    from chairlift.runner.buffers import StepSizes

STEP_SECONDS, TOKEN_SECONDS = 0.02, 1e-4
"""The estimate before anything was measured: a step that only decodes, and what each token of a prompt adds."""


class EstimatedEngine(Engine):
    """Plans steps as an engine does, and lets each last as long as it is estimated to take at the other server.

    Sequences end when they are aborted, because only the other server knows when an answer ends. No tokens are sent to the client. Needs
    `load_format="none"`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_seconds, self._token_seconds = STEP_SECONDS, TOKEN_SECONDS
        self._ends = 0.0  # of the step in flight

    def estimate(self, estimate: Estimate) -> None:
        """Sets how long steps take, and how many KV blocks the other server has, from the next step on."""
        self._step_seconds, self._token_seconds = estimate.step_us / 1e6, estimate.token_ns / 1e9
        self.set_block_limit(estimate.blocks)

    def step(self) -> StepOutputs | None:
        """Begins a step, or ends it when its time has come; None while it lasts, or if there is nothing to run."""
        if self._in_flight is None:
            return self._begin()
        if time.monotonic() < self._ends:
            return None
        step, self._in_flight = self._in_flight, None
        outputs = self._steps.commit(self._steps.collect(step))
        self._discard_blocks()
        self._write_journal()
        cached, dropped = self._scheduler.take_cache_changes()
        return StepOutputs(ended=outputs.ended, cached=cached, dropped=dropped)

    def wakes_in(self) -> float | None:
        """Seconds until `step` may have something to do without another `add`; None for never."""
        return super().wakes_in() if self._in_flight is None else max(0.0, self._ends - time.monotonic())

    def _begin(self) -> StepOutputs | None:
        now, started = clock.now(), []  # type: ignore[var-annotated]
        expired = self._expire(now)
        step = self._steps.launch(now, started)
        if step is None:
            self._write_journal()
            return StepOutputs(ended=expired) if expired else None
        self._in_flight = step
        self._ends = time.monotonic() + self._seconds(step.buffer_index, step.sizes)
        return StepOutputs(started=started, ended=expired)

    def _seconds(self, buffer_index: int, sizes: StepSizes) -> float:
        """How long a step takes at the other server. A chunk of one token is a decode, which all steps have room for."""
        starts = self.runner.buffers[buffer_index].query_starts[: sizes.seqs + 1]
        lengths = np.diff(starts)
        return self._step_seconds + self._token_seconds * int(lengths[lengths > 1].sum())
