"""Agents' KV with a time to live, as Continuum (arXiv 2511.02230) keeps it, on a model of an engine.

The scheduler has no such rule, so this is a smaller model than the simulator: one machine with steps of 2,048 tokens, each context as a
length that is cached from its beginning, and memory for an answer from its start. Its LRU can be compared with the simulator's.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.sessions import RecordedSession, SessionTurn

STEP, TOKEN, DECODE, PAIR = 12e-3, 40e-6, 360e-6, 1e-9
"""Seconds of a step, for each of its tokens, each sequence that decodes, and each pair of a prompt token and one before it."""
BUDGET = 2048
"""Tokens of a step."""
THINK, START, PAUSE, SPAWN = 60.0, 60.0, (5.0, 60.0), 0.5
"""The longest time between answer and request, when users begin, between two sessions, and before subagents, in seconds."""
SPAN, WARM_UP = 3.5 * 3600, 0.5 * 3600
RECENT = 0.125
"""The part of a new measurement in the mean wait."""


def prompt_time(cached: int, prompt: int) -> float:
    """Seconds to compute a prompt alone."""
    new = prompt - cached
    return STEP * math.ceil(new / BUDGET) + TOKEN * new + PAIR * new * (prompt + cached) / 2


def common_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """The leading blocks that two prompts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Work(NamedTuple):
    """What the model needs of a recorded request."""

    turn: SessionTurn
    shared: int
    """Leading tokens of the prompt that are those of the thread's prompt before."""
    alone: float
    """Seconds of the request alone, with the time before it."""


def works(session: RecordedSession) -> list[list[Work]]:
    """The requests of a session's threads."""
    threads = []
    for turns in session.threads:
        thread, before = list[Work](), list[int]()
        for turn in turns:
            blocks = session.blocks(turn)
            shared = min(session.block * common_blocks(before, blocks), turn.prompt_tokens - 1)
            decode = (turn.output_tokens - 1) * (STEP + TOKEN + DECODE)
            thread.append(Work(turn, shared, min(turn.think, THINK) + prompt_time(shared, turn.prompt_tokens) + decode))
            before = blocks
        threads.append(thread)
    return threads


class Keeps(Protocol):
    """How long a context is kept."""

    def seconds(self, reload: float, wait: float) -> float:
        """Seconds to keep a context that takes `reload` to compute, where a request waits for `wait`; 0 for not at all."""


@dataclass(frozen=True)
class Constant:
    """Keeps each context for the same time."""

    time: float

    def seconds(self, reload: float, wait: float) -> float:
        """See `Keeps`."""
        return self.time


@dataclass(frozen=True)
class Lifetimes:
    """Continuum's times to live: those that maximise P(tool ends in time) x (mean wait x memoryfulness + reload) - time."""

    times: NDArray[np.float64]
    """Times that tools took, in seconds: 201 quantiles of them."""
    memoryfulness: float
    """By how much more requests of a session mean that fewer are left: minus their correlation."""

    @classmethod
    def of(cls, sessions: Sequence[RecordedSession]) -> Lifetimes:
        """The times and the memoryfulness of recorded sessions."""
        threads = [thread for session in sessions for thread in session.threads]
        pairs = [pair for thread in threads for pair in pairwise(thread)]
        gaps = [min(after.think, THINK) for turn, after in pairs if turn.calls_tool]
        done = [(number, len(one.threads[0]) - number) for one in sessions for number in range(1, len(one.threads[0]) + 1)]
        return cls(np.quantile(gaps, np.linspace(0, 1, 201)), -float(np.corrcoef(np.array(done).T)[0, 1]))

    def seconds(self, reload: float, wait: float) -> float:
        """See `Keeps`."""
        ended = np.searchsorted(self.times, self.times, side="right") / len(self.times)
        worth = ended * (wait * self.memoryfulness + reload) - self.times
        at = int(worth.argmax())
        return float(self.times[at]) if worth[at] > 0 else 0.0


class Request(NamedTuple):
    """A request that waits, runs or has ended."""

    replay: int
    thread: int
    work: Work
    arrived: float


class Figures(NamedTuple):
    """What a simulation finds after the warm-up."""

    requests: float
    """Requests a second."""
    slowdown: float
    """The mean of sessions' times over those alone."""
    found: float
    """The part of the prompt tokens that were cached."""
    longest: float
    """The longest wait for a first token, in seconds, from the start on."""


class Replay:
    """A user's run of a session."""

    def __init__(self, threads: list[list[Work]], skipped: float) -> None:
        self.threads, self.next = threads, [0] * len(threads)
        self.next[0] = int(len(threads[0]) * skipped)
        self.subagents = 0
        self.began = self.ended = self.alone = 0.0
        self.turns = 0


class Engine:
    """A machine with KV for `capacity` tokens, and users in a closed loop. With `keeps` Continuum's rules, otherwise LRU and FCFS.

    Continuum serves requests whose contexts are kept first, then those of the sessions that began first. Kept contexts take no part in
    eviction until their time is over. If nothing runs and the next request does not fit, that of the session that began last is given up.
    """

    def __init__(self, sessions: Sequence[RecordedSession], users: int, capacity: int, seed: int, keeps: Keeps | None) -> None:
        self.dice = np.random.default_rng(seed)
        self.works = [works(session) for session in sessions]
        self.order: Iterator[int] = iter(int(one) for _ in count() for one in self.dice.permutation(len(sessions)))
        self.capacity, self.keeps = capacity, keeps
        self.now, self.wait = 0.0, 0.0
        self.replays: list[Replay] = []
        self.events: list[tuple[float, int, int, int]] = []
        self.waiting: list[Request] = []
        self.prompts: deque[tuple[Request, int]] = deque()
        self.decodes: list[tuple[Request, int]] = []
        self.cached: dict[tuple[int, int], int] = {}
        """Tokens of contexts that no request uses, the least recently used first."""
        self.kept: dict[tuple[int, int], float] = {}
        """Until when cached contexts are kept."""
        self.running = 0
        self.answered = 0
        self.prompt_tokens = self.found_tokens = 0
        self.waits: list[float] = []
        for _ in range(users):
            self.begin(self.dice.uniform(0, START), self.dice.uniform())

    def begin(self, at: float, skipped: float = 0.0) -> None:
        """Begins a user's next session."""
        self.replays.append(Replay(self.works[next(self.order)], skipped))
        self.wake(at, len(self.replays) - 1, 0)

    def wake(self, at: float, replay: int, thread: int) -> None:
        """Lets a thread send its next request at a time."""
        heapq.heappush(self.events, (at, len(self.events), replay, thread))

    def run(self) -> Figures:
        """Simulates until `SPAN`."""
        while self.now < SPAN:
            while self.events and self.events[0][0] <= self.now:
                at, _, replay, thread = heapq.heappop(self.events)
                one = self.replays[replay]
                one.began = one.began or (at if at >= WARM_UP else 0.0)
                self.waiting.append(Request(replay, thread, one.threads[thread][one.next[thread]], at))
            for key in [key for key, until in self.kept.items() if until <= self.now]:
                del self.kept[key]
            self.admit()
            if self.prompts or self.decodes:
                self.step()
            else:
                self.now = self.events[0][0] if self.events else SPAN
        seen = [one for one in self.replays if one.began and one.turns >= 10 and one.ended - one.began > 60]
        slowdown = float(np.mean([(one.ended - one.began) / max(one.alone, 30.0) for one in seen]))
        waits = [*self.waits, *(self.now - one.arrived for one in self.waiting)]
        found = self.found_tokens / self.prompt_tokens
        return Figures(self.answered / (SPAN - WARM_UP), slowdown, found, max(waits))

    def admit(self) -> None:
        """Lets waiting requests begin as far as they fit."""
        if self.keeps:
            self.waiting.sort(key=lambda one: ((one.replay, one.thread) not in self.kept, one.replay))
        while self.waiting:
            request = self.waiting[0]
            key, turn = (request.replay, request.thread), request.work.turn
            needed = turn.prompt_tokens + turn.output_tokens
            kept = sum(self.cached[other] for other in self.kept if other != key)
            if self.running + kept + needed > self.capacity:
                if self.prompts or self.decodes or not self.kept:
                    return
                del self.kept[max(self.kept)]
                continue
            self.waiting.pop(0)
            if self.kept.pop(key, None) is None:
                self.wait += RECENT * (self.now - request.arrived - self.wait)
            found = min(self.cached.pop(key, 0), request.work.shared)
            self.running += needed
            self.evict()
            if self.now >= WARM_UP:
                self.prompt_tokens, self.found_tokens = self.prompt_tokens + turn.prompt_tokens, self.found_tokens + found
            self.prompts.append((request, found))

    def evict(self) -> None:
        """Drops the ends of contexts until all fit."""
        excess = self.running + sum(self.cached.values()) - self.capacity
        for key in [key for key in self.cached if key not in self.kept]:
            if excess <= 0:
                return
            lost = min(excess, self.cached[key])
            self.cached[key], excess = self.cached[key] - lost, excess - lost
            if not self.cached[key]:
                del self.cached[key]

    def step(self) -> None:
        """Runs a step, or all equal steps until something may change."""
        rows, steps = len(self.decodes), 1
        left, tokens, pairs = BUDGET - rows, 0, 0.0
        begun = list[tuple[Request, int]]()
        while self.prompts and left > 0:
            request, at = self.prompts.popleft()
            piece = min(left, request.work.turn.prompt_tokens - at)
            left, tokens, pairs = left - piece, tokens + piece, pairs + piece * (at + piece / 2)
            if at + piece < request.work.turn.prompt_tokens:
                self.prompts.appendleft((request, at + piece))
            else:
                begun.append((request, request.work.turn.output_tokens))
        took = STEP + TOKEN * (tokens + rows) + DECODE * rows + PAIR * pairs
        if not tokens:
            times = [self.events[0][0]] if self.events else []
            until = min([*times, *self.kept.values(), SPAN])
            steps = max(1, min(min(left for _, left in self.decodes), math.ceil((until - self.now) / took)))
        self.now += steps * took
        self.waits += [self.now - request.arrived for request, _ in begun]
        self.decodes = [(request, left - steps) for request, left in self.decodes] + [(request, left - 1) for request, left in begun]
        ended = [request for request, left in self.decodes if left <= 0]
        self.decodes = [one for one in self.decodes if one[1] > 0]
        for request in ended:
            self.end(request)

    def end(self, request: Request) -> None:
        """Goes on with a session whose request was answered."""
        replay, (turn, _, alone) = self.replays[request.replay], request.work
        self.running -= turn.prompt_tokens + turn.output_tokens
        key = (request.replay, request.thread)
        self.cached[key] = turn.prompt_tokens + turn.output_tokens
        if self.keeps and turn.calls_tool:
            keep = self.keeps.seconds(prompt_time(0, turn.prompt_tokens), self.wait)
            if keep > 0:
                self.kept[key] = self.now + keep
        self.answered += self.now >= WARM_UP
        if replay.began:
            replay.turns, replay.ended = replay.turns + 1, self.now
            if request.thread == 0 or replay.subagents == 1:
                replay.alone += alone
        replay.next[request.thread] += 1
        self.go_on(replay, *key)

    def go_on(self, replay: Replay, number: int, thread: int) -> None:
        """Lets a thread send its next request, begin its subagents, or end."""
        if replay.next[thread] < len(replay.threads[thread]):
            turn = replay.threads[thread][replay.next[thread]].turn
            if turn.subagents:
                replay.subagents = len(turn.subagents)
                for subagent in turn.subagents:
                    self.wake(self.now + SPAWN, number, subagent)
            else:
                self.wake(self.now + min(turn.think, THINK), number, thread)
        elif thread == 0:
            self.begin(self.now + self.dice.uniform(*PAUSE))
        else:
            replay.subagents -= 1
            if not replay.subagents:
                self.wake(self.now + min(replay.threads[0][replay.next[0]].turn.think, THINK), number, 0)
