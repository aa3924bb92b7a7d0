"""The usage log: one JSON line for each prompt that the engine has run, for billing and audit."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from chairlift.directories import private_directory
from chairlift.errors import ChairliftError, InvalidSetting
from chairlift.outputs import Timeline

if TYPE_CHECKING:
    from chairlift.engine.replicated_engine import ReplicatedEngine
    from chairlift.scheduling import Scheduling

logger = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
"""Seconds after which a written line is on the disk, and not only in the system's memory."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class UsageLabels:
    """What a record says about its request, in addition to the timelines."""

    id: str
    """The engine's id of the prompt: the id of the answer, with `-0`, `-1` and so on if the request has several prompts."""
    request_id: str
    model: str
    tenant: str
    tier: str
    priority: int
    prompt_tokens: int
    session: str | None = None
    """The client's name for the conversation or agent."""

    @classmethod
    def of(cls, id: str, request_id: str, model: str, scheduling: Scheduling, prompt_tokens: int) -> UsageLabels:
        """Returns the labels of a prompt with these scheduling parameters."""
        who = scheduling.tenant, scheduling.served_tier, scheduling.priority
        return cls(id, request_id, model, *who, prompt_tokens, scheduling.session)


class UsageLog:
    """Appends records to `DIRECTORY/YYYY-MM-DD.jsonl`, by the UTC day on which the request ended.

    A line is written before its answer's end is sent, so every answered request has one, even if the process is killed. It is on the
    disk `SYNC_SECONDS` later. Several servers may share a directory.
    """

    def __init__(self, directory: str) -> None:
        """Creates the directory for this user alone; raises InvalidSetting if it cannot be written."""
        self._directory = private_directory("--usage-log", directory)
        self._day = ""
        self._file = -1
        self._torn = False
        """Whether the file ends in an incomplete line."""
        self._sync: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self._open(_day(time.time()))
        except OSError as error:
            raise InvalidSetting(f"--usage-log {directory}: {error.strerror}") from None

    async def write_ended(self, engine: ReplicatedEngine, labels: UsageLabels, timelines: Sequence[Timeline | None] = ()) -> None:
        """Appends the record of an ended prompt. The engine is asked for `timelines` of its answers that are not given.

        A prompt that was lost with its engine has no timelines and gets no record.
        """
        known = [timeline for timeline in timelines if timeline is not None]
        tenants: list[str] = []
        try:
            if not known or len(known) < len(timelines):
                known = await engine.explain(labels.id)
            if tags := sorted({tag for timeline in known for tag in timeline.preempted_by}):
                tenants = sorted({other.tenant for other in await engine.explain_sequences(tags)})
        except ChairliftError as error:
            logger.debug("the engine could not be asked about %s: %s", labels.id, error)
        if known:
            self._append(labels, _record(known, tenants))

    def write_later(self, engine: ReplicatedEngine, labels: UsageLabels) -> None:
        """Starts a task that does `write_ended`; `close` waits for it."""
        self._start(self.write_ended(engine, labels))

    def write_held(self, labels: UsageLabels, token_seconds: float, seconds: float) -> None:
        """Appends the record of a live sequence that was dropped after `seconds`. Without a request, it held `token_seconds`."""
        self._append(labels, {**_without_engine("dropped", seconds), "held_token_seconds": round(token_seconds, 6)})

    def write_upstream(self, labels: UsageLabels, cached_tokens: int, output_tokens: int, finish: str, states: Mapping[str, float]) -> None:
        """Appends the record of a request that another server has run, with the tokens that it reports and the seconds in each state."""
        tokens = {
            "cached_tokens": cached_tokens,
            "output_tokens": output_tokens,
            "computed_tokens": max(0, labels.prompt_tokens - cached_tokens) + output_tokens,
        }
        rounded = {name: round(seconds, 6) for name, seconds in states.items()}
        self._append(labels, {**_without_engine(finish, sum(states.values())), **tokens, "states": rounded})

    def _append(self, labels: UsageLabels, fields: dict[str, object]) -> None:
        """Appends a line. Logs an error if the disk refuses it: the answer is sent all the same."""
        now = time.time()
        head = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)), **asdict(labels)}
        line = _encode(head | fields).encode() + b"\n"
        try:
            if _day(now) != self._day or os.fstat(self._file).st_nlink == 0:  # a deleted file cannot be found again
                self._open(_day(now))
            data = b"\n" + line if self._torn else line
            self._torn = os.write(self._file, data) < len(data)
        except OSError as error:
            logger.error("the usage record of %s could not be written: %s", labels.id, error.strerror)
        else:
            if self._torn:
                logger.error("the usage record of %s could not be written: the disk is full", labels.id)
        if self._sync is None:
            self._sync = asyncio.get_running_loop().call_later(SYNC_SECONDS, self._start_sync)

    async def close(self) -> None:
        """Writes pending records, and returns when all are on the disk."""
        await asyncio.gather(*self._tasks)
        if self._sync is not None:
            self._sync.cancel()
        await self._put_on_disk()
        os.close(self._file)

    def _open(self, day: str) -> None:
        file = os.open(self._directory / f"{day}.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        before, self._file, self._day = self._file, file, day
        if before >= 0:
            with _logging_errors():
                os.fsync(before)
            os.close(before)
        size = os.fstat(file).st_size
        self._torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"

    def _start_sync(self) -> None:
        self._sync = None
        self._start(self._put_on_disk())

    async def _put_on_disk(self) -> None:
        with _logging_errors():
            await asyncio.to_thread(os.fsync, self._file)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextmanager
def _logging_errors() -> Iterator[None]:
    """Logs that lines may not be on the disk. The server goes on."""
    try:
        yield
    except OSError as error:
        logger.error("usage records may not be on the disk: %s", error.strerror)


def _record(timelines: Sequence[Timeline], preempted_by: Sequence[str]) -> dict[str, object]:
    """Returns what one prompt has used: its answers' timelines summed, and `seconds` from its arrival to its last answer's end."""
    states: dict[str, float] = {}
    for timeline in timelines:
        for state, seconds in timeline.states.items():
            states[state] = round(states.get(state, 0.0) + seconds, 6)
    ended = max((timeline.ended for timeline in timelines if timeline.ended is not None), default=timelines[0].arrived)
    return {
        "finish": sorted({timeline.finish for timeline in timelines if timeline.finish}),
        "cached_tokens": sum(timeline.own_cached_tokens for timeline in timelines),
        "output_tokens": sum(timeline.output_tokens for timeline in timelines),
        "computed_tokens": sum(timeline.computed_tokens for timeline in timelines),
        "recomputed_tokens": sum(timeline.recomputed_tokens for timeline in timelines),
        "block_seconds": round(sum(timeline.block_seconds for timeline in timelines), 6),
        "compute_seconds": round(sum(timeline.compute_seconds for timeline in timelines), 9),
        **_energy(timelines),
        "preemptions": sum(timeline.preemptions for timeline in timelines),
        "preempted_by": list(preempted_by),
        "swaps": sum(timeline.swaps for timeline in timelines),
        "seconds": round(ended - timelines[0].arrived, 6),
        "states": states,
    }


def _without_engine(finish: str, seconds: float) -> dict[str, object]:
    """The record of what took `seconds` and used nothing of an engine."""
    counts = ("cached_tokens", "output_tokens", "computed_tokens", "recomputed_tokens", "preemptions", "swaps")
    return {
        "finish": [finish],
        **dict.fromkeys(counts, 0),
        "block_seconds": 0.0,
        "compute_seconds": 0.0,
        "preempted_by": [],
        "seconds": round(seconds, 6),
        "states": {},
    }


def _energy(timelines: Sequence[Timeline]) -> dict[str, float]:
    """The field `energy_joules` where there is a meter."""
    measured = [timeline.energy_joules for timeline in timelines if timeline.energy_joules is not None]
    return {"energy_joules": round(sum(measured), 6)} if measured else {}


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
