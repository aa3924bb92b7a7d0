"""An engine for a model that another server runs: it schedules, and estimates what that server does."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift.engine import clock
from chairlift.engine.engine import Engine
from chairlift.engine.frames import Answering, Estimate, ServerRestarted, StepOutputs

if TYPE_CHECKING:
    from chairlift import _core
    from chairlift.engine.engine import OnPrepared
    from chairlift.engine.engine_request import EngineRequest

STEP_SECONDS, TOKEN_SECONDS = 0.02, 1e-3
"""The estimate before anything was measured: a step that only decodes, and what each token of a prompt takes.

Prompts are rather taken for slow: the first event of an answer ends their step, but nothing takes back the tokens that a sequence is
believed to have decoded before the other server has computed its prompt.
"""
MIN_DECODE_SECONDS = 0.005
"""The shortest step that only decodes. A request waits for none, and an answer that pauses must not reach the end of its context here."""
SHARED_AHEAD_SECONDS, SHARED_SECONDS = 0.02, 10.0
"""Seconds of prompts that the other server has ahead, at most, while tenants share it: for so long after one followed another.

So a tenant that sends little waits for little more than what the other server has begun of others' prompts.
"""
HEADROOM = 4
"""KV blocks of the engine for each block of the other server: prompts are counted by bytes here (see `gate.estimates`)."""


class Prompts:
    """The prompts that another server computes, in the order in which it got them. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        """By tag, the tokens of each prompt that the server has probably not computed."""
        self._total = 0
        self._since = 0.0
        """When the server began with the first of them."""

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, tag: int) -> bool:
        return tag in self._tokens

    def computed_at(self, token_seconds: float, but: float = 0) -> float:
        """When the server has computed all tokens of the prompts except `but` of them; a time in the past if it already has."""
        return self._since + (self._total - but) * token_seconds

    def add(self, tag: int, tokens: int, now: float, token_seconds: float) -> None:
        """Adds a prompt. Those before it are forgotten if the server should have computed them by now."""
        if now >= self.computed_at(token_seconds):
            self._tokens.clear()
            self._total, self._since = 0, now
        self._tokens[tag] = tokens
        self._total += tokens

    def remove(self, tag: int, now: float, *, computed: bool) -> None:
        """Removes a prompt that was cancelled or, with all before it, `computed`. An unknown tag is ignored."""
        if tag not in self._tokens:
            return
        first = next(iter(self._tokens))
        if computed or first == tag:
            self._since = now
        while computed and first != tag:
            self._total -= self._tokens.pop(first)
            first = next(iter(self._tokens))
        self._total -= self._tokens.pop(tag)


class EstimatedEngine(Engine):
    """Plans steps as an engine does, and lets each last as long as it is estimated to take at the other server.

    Requests are admitted as long as the other server has few tokens of prompts still to compute: as many as the estimate lets it have
    `ahead`, and fewer while tenants share it. While requests wait, a step ends as soon as that is so. Then the other server finds the
    next prompts when it begins its next step, and those that become urgent meanwhile find little before them.

    Sequences end when they are aborted, because only the other server knows when an answer ends. No tokens are sent to the client. Needs
    `load_format="none"`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.info = replace(self.info, decisions=[])  # its model's files are a stand-in
        self._step_seconds, self._token_seconds, self._ahead = STEP_SECONDS, TOKEN_SECONDS, 0
        self._begins = self._may_end = 0.0
        """When the step in flight began, and when it may end if requests wait."""
        self._chunks: dict[int, int] = {}
        """By tag, the tokens of prompts in this step that the other server had not computed when the step began."""
        self._prompts = Prompts()
        self._admitted: set[int] = set()
        """The sequences that have not ended and that the other server has got."""
        self._closed = False
        """Whether the scheduler admits nothing."""
        self._shares = self.config.scheduling_policy in ("fair", "vtc")
        self._tenant: str | None = None
        self._shared_until = 0.0
        """The tenant of the newest request, and until when tenants share the other server."""
        self.set_block_limit(self.runner.num_kv_blocks // HEADROOM)

    def learn(self, news: Estimate | Answering | ServerRestarted) -> None:
        """Uses the newest estimate, or what happened at the other server.

        One that has begun to answer a sequence has computed its prompt, and one that has restarted has nothing cached.
        """
        match news:
            case Estimate():
                self._step_seconds, self._token_seconds, self._ahead = news.step_us / 1e6, news.token_ns / 1e9, news.ahead
                self.set_block_limit(news.blocks)
                # The steps here end early while requests wait, so they do not say how long prompts take.
                self._scheduler.set_upstream_token_time(news.token_ns, clock.now())
            case Answering(tag) if tag in self._admitted:
                self._prompts.remove(tag, time.monotonic(), computed=True)
            case ServerRestarted():
                self._scheduler.evict_cached(clock.now())

    def add(self, request: EngineRequest, on_prepared: OnPrepared | None = None) -> None:
        """Queues a request: see `Engine.add`. It waits for no step that only decodes."""
        super().add(request, on_prepared)
        self._may_end = 0.0
        before, self._tenant = self._tenant, request.scheduling.tenant
        if self._shares and before not in (None, self._tenant):
            self._shared_until = time.monotonic() + SHARED_SECONDS

    def abort(self, tag: int, *, stopped: bool = False) -> bool:
        """Ends a sequence: see `Engine.abort`."""
        found = super().abort(tag, stopped=stopped)
        self._forget(tag)
        return found

    def step(self) -> StepOutputs | None:
        """Ends the step in flight when its time has come, and begins one. None if the client need hear nothing, as while all decode."""
        ended: list[_core.Timeline] = []
        if self._in_flight is not None:
            if self._left() > 0.0:
                return None
            step, self._in_flight = self._in_flight, None
            ended += self._steps.commit(self._steps.collect(step)).ended
            self._discard_blocks()
            self._write_journal()
        started = self._begin(ended)
        cached, dropped = self._scheduler.take_cache_changes()
        if not (started or ended or cached or dropped):
            return None
        return StepOutputs(started=started, ended=ended, cached=cached, dropped=dropped)

    def wakes_in(self) -> float | None:
        """Seconds until `step` may have something to do without another `add`; None for never."""
        return super().wakes_in() if self._in_flight is None else self._left()

    def _begin(self, ended: list[_core.Timeline]) -> list[tuple[int, int, int, int]]:
        """Begins a step. Returns the sequences that it admits. Adds those that miss their deadline to those that have `ended`."""
        now, began, started = clock.now(), time.monotonic(), []  # type: ignore[var-annotated]
        ended += self._expire(now)
        for timeline in ended:
            self._forget(timeline["tag"])
        if (closed := began < self._room_at()) != self._closed:
            self._closed = closed
            self._scheduler.close_queue(closed, now)
        step = self._steps.launch(now, started)
        if step is None:
            self._write_journal()
            return started
        self._in_flight, self._begins = step, began
        for tag, cached, *_ in started:
            self._admit(tag, cached, began)
        self._chunks = {}
        if self._prompts:
            lengths = np.diff(self.runner.buffers[step.buffer_index].query_starts[: step.sizes.seqs + 1])
            chunks = zip(self._steps.sequence_tags(step), lengths.tolist(), strict=True)
            # A chunk of one token is a decode, which all steps have room for.
            self._chunks = {tag: length for tag, length in chunks if length > 1 and tag in self._prompts}
        # A step that has admitted nothing takes its time, because the next one may not either.
        self._may_end = 0.0 if started else began + self._step_seconds
        return started

    def _admit(self, tag: int, cached: int, now: float) -> None:
        """Called when the other server gets a sequence, unless it was preempted here."""
        state = self._sequences.get(tag)
        if state is None or tag in self._admitted:
            return
        self._admitted.add(tag)
        to_compute = self._scheduler.tokens(state.seq)[1] - cached
        if to_compute > 1:  # otherwise it is an answer beside another one to the same prompt
            self._prompts.add(tag, to_compute, now, self._token_seconds)

    def _room_at(self) -> float:
        """When the other server may get more prompts."""
        shared = time.monotonic() < self._shared_until
        ahead = min(self._ahead, SHARED_AHEAD_SECONDS / max(1e-9, self._token_seconds)) if shared else self._ahead
        return self._prompts.computed_at(self._token_seconds, but=ahead)

    def _left(self) -> float:
        """Seconds that are left of the step in flight. It is over when the last of its prompts is answered."""
        to_compute = sum(length for tag, length in self._chunks.items() if tag in self._prompts)
        if self._chunks and not to_compute:
            return 0.0
        ends = self._begins + max(self._step_seconds, to_compute * self._token_seconds or MIN_DECODE_SECONDS)
        if len(self._sequences) > len(self._admitted):  # some wait
            ends = min(ends, max(self._may_end, self._room_at()))
        return max(0.0, ends - time.monotonic())

    def _forget(self, tag: int) -> None:
        """Called when a sequence has ended."""
        self._admitted.discard(tag)
        self._prompts.remove(tag, time.monotonic(), computed=False)
