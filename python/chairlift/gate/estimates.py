"""What is known of an upstream's speed and memory: measured on the answers that pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from chairlift.engine.estimated_engine import STEP_SECONDS, TOKEN_SECONDS
from chairlift.engine.frames import Estimate
from chairlift.gate.answer import Answer

if TYPE_CHECKING:
    from chairlift.gate.admission import Admitted

SMOOTHING = 0.1
"""Weight of the newest measurement in a moving average. The first ones weigh more, so that no average keeps much of its first value."""
SHORT = 256
"""Tokens to compute of a prompt above which the first token says how fast prompts are computed."""
MAX_PER_TOKEN = 4.0
"""Our estimate of a prompt's tokens over the upstream's own number is believed from the inverse of this on, up to this."""
COUNTED_TOKENS, MEASURED_TOKENS = 1 << 17, 1 << 15
"""Tokens of prompts after which those before count half: how many there are, and how fast they are computed."""
MIN_SHARE = 0.25
"""The smallest part of the upstream's KV on which we count, however few tokens it finds."""
TRUSTED = 20
"""Answers that should find tokens after which missing ones shrink the budget."""
AHEAD_SECONDS, MAX_AHEAD = 0.15, 2048
"""Prompts are passed on when those at the upstream are computed but for this time, at most so many tokens: vLLM's and llama.cpp's batch.

So the upstream has them when it begins its next step, and one that is more urgent waits there for little more than this time.
"""
MAX_STEP_SECONDS = 1.0
"""The longest believed time between two tokens of a stream, also where the upstream computes prompts and no event comes."""


class _Average:
    """A moving average; `value` is assumed until something is measured."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.count = 0

    def observe(self, measured: float) -> None:
        self.count += 1
        self.value += max(SMOOTHING, 1 / self.count) * (measured - self.value)


class _Streams:
    """The streams that run at an upstream, those that it has not begun to answer too: their events, and the sum of their seconds."""

    def __init__(self) -> None:
        self._running: dict[int, Admitted] = {}
        self._answers = 0
        """Of those that run."""
        self._seconds = self._since = 0.0
        self._events = 0
        """Events of ended streams, less those of streams that were counted before."""

    @contextmanager
    def running(self, held: Admitted) -> Iterator[None]:
        """Counts a stream as running."""
        self._count_time()
        self._running[id(held)] = held
        self._answers += held.answers
        try:
            yield
        finally:
            self._count_time()
            self._answers -= held.answers
            del self._running[id(held)]
            self._events += _events(held)

    def take_pace(self) -> float | None:
        """Seconds of a stream for each of its events since the last call; None if no stream ran."""
        self._count_time()
        running = sum(map(_events, self._running.values()))
        seconds, events = self._seconds, self._events + running
        self._seconds, self._events = 0.0, -running
        return seconds / max(1, events) if seconds else None

    def _count_time(self) -> None:
        now = time.monotonic()
        self._seconds += self._answers * (now - self._since)
        self._since = now


def _events(held: Admitted) -> int:
    return 0 if held.answer is None else held.answer.events


class Estimates:
    """Moving averages of one upstream, and the estimate that the engine schedules by."""

    def __init__(self, kv_tokens: int, block_size: int, max_blocks: int) -> None:
        """`kv_tokens` are what the upstream's KV cache holds; the engine has at most `max_blocks` blocks of `block_size`."""
        self._kv_tokens, self._block_size, self._most = kv_tokens, block_size, max_blocks
        self._step = _Average(STEP_SECONDS)
        self._computing = self._computed = 0.0
        """Seconds in which the upstream computed prompts, and their tokens, the older ones less."""
        self._streams = _Streams()
        self.running = self._streams.running
        """Counts a stream as running, in a `with` block."""
        self._first_event = 0.0
        """When a stream last began, on the monotonic clock."""
        self._ours = self._theirs = 0.0
        """Tokens of prompts as we and as the upstream counted them, the older ones less."""
        self._found = _Average(1.0)
        """Tokens that the upstream found in its cache over those that we expected."""
        self.share = 1.0
        """The part of the upstream's KV on which we count: less where it finds fewer tokens than were expected."""

    @property
    def ratio(self) -> float:
        """Tokens that we count over those that the upstream counts."""
        return self._ours / self._theirs if self._theirs else 1.0

    @property
    def token_seconds(self) -> float | None:
        """What the upstream takes for each token of a prompt; None before one was measured."""
        return self._computing / self._computed if self._computed else None

    def observe_first(self, sent: float, first: float, to_compute: int) -> None:
        """Learns from the first event of a stream, at `first` on the monotonic clock, whose prompt had so many tokens to compute.

        It was sent at `sent`. The upstream has computed it since then or, if it had other prompts to compute, since the first event of the
        last of them. The time to the first event alone would count those others too.
        """
        since, self._first_event = max(sent, self._first_event), first
        if to_compute > SHORT:
            if self._computed >= MEASURED_TOKENS:
                self._computing, self._computed = self._computing / 2, self._computed / 2
            # By tokens: of prompts that share steps, one seems to take the time of others.
            self._computing += first - since
            self._computed += to_compute

    def observe(self, answer: Answer, prompt: int, cached: int) -> None:
        """Learns from an answer whose prompt had `prompt` tokens by our count, of which `cached` were expected to be found."""
        usage = answer.usage
        if usage.prompt:
            if self._theirs >= COUNTED_TOKENS:
                self._ours, self._theirs = self._ours / 2, self._theirs / 2
            # By tokens: many short prompts whose tokens we count wrongly say little of the others, which fill the KV.
            theirs = min(usage.prompt, MAX_PER_TOKEN * prompt)
            self._ours += min(prompt, MAX_PER_TOKEN * theirs)
            self._theirs += theirs
        if usage.cached is not None and cached > SHORT:
            self._found.observe(min(1.0, usage.cached * self.ratio / cached))
            if self._found.count >= TRUSTED:
                self.share = max(MIN_SHARE, self.share - 0.02) if self._found.value < 0.8 else min(1.0, self.share + 0.005)

    def frame(self) -> Estimate:
        """The estimate for the engine.

        Its sequences together get as many tokens as the upstream's streams got events since the last call: one that waits for the upstream
        to compute its prompt must not fill the KV here.
        """
        if (pace := self._streams.take_pace()) is not None:
            self._step.observe(min(pace, MAX_STEP_SECONDS))
        blocks = int(self._kv_tokens * self.share * self.ratio) // self._block_size
        token = TOKEN_SECONDS if self.token_seconds is None else self.token_seconds
        ahead = min(AHEAD_SECONDS / max(1e-9, token), MAX_AHEAD * self.ratio)
        step_us, token_ns = round(self._step.value * 1e6), round(token * 1e9)
        return Estimate(step_us, token_ns, max(1, min(self._most, blocks)), int(ahead))
