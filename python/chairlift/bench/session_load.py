"""Closed-loop load: users run recorded sessions of agents against a server."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from chairlift.bench.client import Target, send_request
from chairlift.bench.http import Http
from chairlift.bench.load import allow_sockets, drive
from chairlift.bench.record import Record
from chairlift.bench.session_alone import Alone
from chairlift.bench.sessions import RecordedSession, SessionTurn
from chairlift.bench.workload import Job, Piece

PAUSE = 5.0
"""Seconds after a failed session before its user begins another one, in a run of some duration: as the shortest in `chairlift simulate`."""


@dataclass(slots=True)
class SessionRecord:
    """One replay of a recorded session. Times are seconds since the start of the run."""

    session: int
    """The number of the recorded session in its file."""
    began: float
    ended: float = 0.0
    complete: bool = False
    """Whether all its requests were answered."""
    records: list[Record] = field(default_factory=list)
    """Its requests, in the order in which they were sent."""
    tenant: str = ""
    tier: str = "default"
    alone: float | None = None
    """Seconds that it would have taken alone, with a cache that loses nothing; None if it is not complete or this is unknown."""

    @property
    def slowdown(self) -> float | None:
        """How many times longer it took than alone."""
        return (self.ended - self.began) / self.alone if self.alone else None

    @property
    def longest_wait(self) -> float:
        """The longest time to a first token, in seconds."""
        return max((record.ttft for record in self.records if record.ok), default=0.0)

    @property
    def cached_share(self) -> float | None:
        """The part of its prompt tokens that the server's cache had; None if the server does not report it."""
        known = [record for record in self.records if record.cached_tokens is not None]
        tokens = sum(record.prompt_tokens for record in known)
        return sum(record.cached_tokens or 0 for record in known) / tokens if tokens else None

    def to_json(self) -> dict[str, object]:
        """Plain data for the result file."""
        return {
            "session": self.session,
            "tenant": self.tenant,
            "tier": self.tier,
            "began": round(self.began, 6),
            "ended": round(self.ended, 6),
            "seconds": round(self.ended - self.began, 6),
            "complete": self.complete,
            "requests": len(self.records),
            "failed": sum(not record.ok for record in self.records),
            "slowdown": self.slowdown,
            "longest_wait": round(self.longest_wait, 6),
            "cached_share": self.cached_share,
        }


class SessionLoad:
    """Users of recorded sessions. Each user runs one session at a time, and a turn follows the answer before it."""

    def __init__(
        self,
        target: Target,
        sessions: Sequence[RecordedSession],
        longest_think: float,
        seed: int = 0,
        on_end: Callable[[bool], None] | None = None,
        alone: Alone | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        """`longest_think` are the most seconds between an answer and the next request. `on_end` is called at each request's end.

        `alone` has the times of requests that are alone on the server, for `SessionRecord.alone`. A run that measures them `is_alone`: its
        sessions have other names and words, and their last requests say that they are the last.
        """
        self._target, self._sessions = target, sessions
        self._longest_think, self._seed, self._on_end = longest_think, seed, on_end
        self._alone, self.is_alone = alone, is_alone
        self._name = "alone" if is_alone else "bench"
        self._fresh = cache(lambda number: sessions[number].fresh_tokens())
        self._replays: list[SessionRecord] = []
        self._started = self._cpu = 0.0
        self.others: list[Record] = []
        """The requests without a session, by due time."""
        self.interrupted = False
        """Whether the run was cancelled (Ctrl-C)."""

    async def run(
        self, users: int, duration: float | None = None, beside: Sequence[Job] = (), max_concurrency: int | None = None
    ) -> tuple[list[SessionRecord], float]:
        """Runs every session once, or sessions again and again for `duration` seconds, and sends the requests `beside` as `load.drive`.

        Returns the replays, and the share of a core that the client used. Requests that run at the end of the duration, or when this is
        cancelled, are cut off and have no record.
        """
        allow_sockets()
        order = random.Random(self._seed).sample(range(len(self._sessions)), len(self._sessions))
        waiting = iter(order) if duration is None else itertools.cycle(order)

        def start() -> float:
            self._cpu, self._started = time.process_time(), time.perf_counter()
            if duration is not None:
                limit.reschedule(asyncio.get_running_loop().time() + duration)
            return self._started

        try:
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
                # It is the first to run, and starts the clock once all its requests are prepared.
                group.create_task(self._drive(beside, max_concurrency, start))
                for _ in range(users):
                    group.create_task(self._user(waiting, 0.0 if duration is None else PAUSE))
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self.interrupted = True
        for replay in self._replays:
            replay.records = [record for record in replay.records if record.end]
            replay.ended = replay.ended or self._now()
        return self._replays, (time.process_time() - self._cpu) / max(self._now(), 1e-9)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _drive(self, beside: Sequence[Job], max_concurrency: int | None, start: Callable[[], float]) -> None:
        """Sends the requests without a session."""
        self.others, _ = await drive(self._target, beside, max_concurrency, start, self._on_end)

    async def _user(self, waiting: Iterator[int], pause: float) -> None:
        """Runs sessions until none waits, with a `pause` in seconds after a failed one: a server that refuses all is not flooded."""
        for number in waiting:
            session = self._sessions[number]
            record = SessionRecord(number, self._now(), tenant=session.tenant, tier=session.tier)
            replay = _Replay(session, self._fresh(number), f"{self._name}-{self._seed}-{len(self._replays)}", self._target, record)
            self._replays.append(record)
            alone = await replay.thread(0, self)
            record.complete, record.ended = alone is not None, self._now()
            record.alone = None if self._alone is None else alone
            if not record.complete:
                await asyncio.sleep(pause)

    async def send(self, http: Http, request: bytes, record: Record) -> None:
        """Sends a request that is due now."""
        record.due = record.admitted = self._now()
        await send_request(http, self._target, request, record, self._started)
        if self._on_end is not None:
            self._on_end(record.ok)

    async def think(self, turn: SessionTurn) -> float:
        """Waits as long as the recorded user or tool took, and returns how long that was."""
        seconds = min(turn.think, self._longest_think)
        await asyncio.sleep(seconds)
        return seconds

    def alone(self, turn: SessionTurn, fresh: int, output: int) -> float:
        """Returns the seconds of a request alone, with `fresh` new tokens in its prompt and `output` tokens; 0 if this is unknown."""
        return 0.0 if self._alone is None else self._alone.request(turn.prompt_tokens, fresh, output)


class _Replay:
    """One replay of a session, in which equal blocks are equal words."""

    def __init__(self, session: RecordedSession, fresh: Sequence[Sequence[int]], name: str, target: Target, record: SessionRecord) -> None:
        self._session, self._fresh, self._name, self._target = session, fresh, name, target
        self._record = record

    async def thread(self, number: int, load: SessionLoad) -> float | None:
        """Sends a thread's requests, each after the answer before it and after its subagents.

        Returns the seconds that they would have taken alone; None if one failed, which ends the session.
        """
        http, seconds = self._target.http(), 0.0
        try:
            for index, turn in enumerate(self._session.threads[number]):
                took = await asyncio.gather(*(self.thread(one, load) for one in turn.subagents))
                if None in took:
                    return None
                seconds += max((one for one in took if one is not None), default=0.0) + await load.think(turn)
                record = Record(0.0, requested_tokens=turn.output_tokens, prompt_tokens=turn.prompt_tokens)
                self._record.records.append(record)
                pieces, session = tuple(self._pieces(turn, f"{number} {index}")), self._session
                job = Job(turn.prompt_tokens, turn.output_tokens, pieces, tenant=session.tenant, tier=session.tier)
                headers = self._headers(number)
                if load.is_alone and number == 0 and index + 1 == len(session.threads[0]):
                    headers["x-dynamo-session-final"] = "true"
                await load.send(http, self._target.request(http, job, headers), record)
                if not record.ok:
                    return None
                seconds += load.alone(turn, self._fresh[number][index], record.output_tokens)
            return seconds
        finally:
            http.close()

    def _headers(self, number: int) -> dict[str, str]:
        """Names the session; a subagent is a session of its own."""
        return {"x-session-id": f"{self._name}/{number}", "x-parent-session-id": self._name} if number else {"x-session-id": self._name}

    def _pieces(self, turn: SessionTurn, own: str) -> Iterator[Piece]:
        """Yields a prompt's blocks, and a piece of its own for the rest."""
        session, blocks = self._session, self._session.blocks(turn)
        for block in blocks:
            # The first blocks, the tools', are equal in all sessions of a group.
            owner = f"group {session.group}" if block <= session.shared else self._name
            yield f"{owner} block {block}", session.block
        if (rest := turn.prompt_tokens - len(blocks) * session.block) > 0:
            yield f"{self._name} rest {own}", rest
