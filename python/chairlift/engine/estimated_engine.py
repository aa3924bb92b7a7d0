"""An engine for a model that another server runs: it schedules, and estimates what that server does."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift.engine import clock
from chairlift.engine.engine import Engine
from chairlift.engine.frames import Answering, Estimate, StepOutputs

if TYPE_CHECKING:
    from chairlift.engine.engine import OnPrepared
    from chairlift.engine.engine_request import EngineRequest

STEP_SECONDS, TOKEN_SECONDS = 0.02, 1e-3
"""The estimate before anything was measured: a step that only decodes, and what each token of a prompt takes.

Prompts are rather taken for slow: the first event of an answer ends their step, but nothing takes back the tokens that a sequence is
believed to have decoded before the other server has computed its prompt.
"""
MIN_DECODE_SECONDS = 0.005
"""The shortest step that only decodes. A request waits for none, and an answer that pauses must not reach the end of its context here."""
HEADROOM = 4
"""KV blocks of the engine for each block of the other server: prompts are counted by bytes here (see `gate.estimates`)."""


class EstimatedEngine(Engine):
    """Plans steps as an engine does, and lets each last as long as it is estimated to take at the other server.

    Sequences end when they are aborted, because only the other server knows when an answer ends. No tokens are sent to the client. Needs
    `load_format="none"`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_seconds, self._token_seconds = STEP_SECONDS, TOKEN_SECONDS
        self._begins = self._ends = 0.0  # of the step in flight
        self._computes = False
        """Whether the step in flight computes prompts that the other server has not begun to answer."""
        self._answering: set[int] = set()
        self.set_block_limit(self.runner.num_kv_blocks // HEADROOM)

    def learn(self, news: Estimate | Answering) -> None:
        """Uses the newest estimate, or records that the other server has begun to answer a sequence and thus has computed its prompt."""
        if isinstance(news, Estimate):
            self._step_seconds, self._token_seconds = news.step_us / 1e6, news.token_ns / 1e9
            self.set_block_limit(news.blocks)
        else:
            self._answering = {tag for tag in (*self._answering, news.tag) if self._sequences.get(tag) is not None}
            self._shorten()

    def add(self, request: EngineRequest, on_prepared: OnPrepared | None = None) -> None:
        """Queues a request: see `Engine.add`. It waits for no step that only decodes."""
        super().add(request, on_prepared)
        if not self._computes:
            self._ends = 0.0

    def abort(self, tag: int, *, stopped: bool = False) -> bool:
        """Ends a sequence: see `Engine.abort`."""
        found = super().abort(tag, stopped=stopped)
        self._shorten()
        return found

    def step(self) -> StepOutputs | None:
        """Ends the step in flight when its time has come, and begins one; None while it lasts, or if there is nothing to run."""
        if self._in_flight is None:
            return self._begin()
        if self._left() > 0.0:
            return None
        step, self._in_flight, self._computes = self._in_flight, None, False
        outputs = self._steps.commit(self._steps.collect(step))
        self._discard_blocks()
        self._write_journal()
        cached, dropped = self._scheduler.take_cache_changes()
        begun = self._begin() or StepOutputs()
        return replace(begun, ended=[*outputs.ended, *begun.ended], cached=cached, dropped=dropped)

    def wakes_in(self) -> float | None:
        """Seconds until `step` may have something to do without another `add`; None for never."""
        return super().wakes_in() if self._in_flight is None else self._left()

    def _begin(self) -> StepOutputs | None:
        now, started = clock.now(), []  # type: ignore[var-annotated]
        expired = self._expire(now)
        step = self._steps.launch(now, started)
        if step is None:
            self._write_journal()
            return StepOutputs(ended=expired) if expired else None
        self._in_flight, self._begins = step, time.monotonic()
        self._set_end()
        return StepOutputs(started=started, ended=expired)

    def _left(self) -> float:
        """Seconds that are left of the step in flight."""
        return max(0.0, self._ends - time.monotonic())

    def _shorten(self) -> None:
        """Called when the step in flight may have fewer prompts to compute. After the last of them it is over."""
        if self._computes:
            self._set_end()
            if not self._computes:
                self._ends = 0.0

    def _set_end(self) -> None:
        """Estimates when the step in flight ends at the other server. A chunk of one token is a decode, which all steps have room for."""
        step = self._in_flight
        assert step is not None  # it was planned
        lengths = np.diff(self.runner.buffers[step.buffer_index].query_starts[: step.sizes.seqs + 1])
        to_compute = sum(
            length
            for length, tag in zip(lengths.tolist(), self._steps.sequence_tags(step), strict=True)
            if length > 1 and tag not in self._answering and self._sequences.get(tag) is not None
        )
        self._computes = to_compute > 0
        shortest = self._token_seconds * to_compute if self._computes else MIN_DECODE_SECONDS
        self._ends = self._begins + max(self._step_seconds, shortest)
