"""Reads recorded sessions of agents: requests whose prompts are the conversation so far, and the times between them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chairlift.bench.agent_logs import TOOL_CALL, read_logs
from chairlift.bench.traces import MAX_TOKENS, open_text
from chairlift.errors import InvalidTrace
from chairlift.scheduling import TENANT, TIERS

MAX_IDS = 2**24
"""Blocks of a session at most."""
_ASSUMED_ANSWER = 10.0
"""Seconds of an answer whose end was not recorded."""
_EXPECTED = "expected a line of JSON for each session, with block, threads and requests, or a folder with logs of Claude Code or Codex"


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One request of a thread."""

    think: float
    """Seconds from the end of the thread's request before it, or of the subagents before it, to this one."""
    prompt_tokens: int
    output_tokens: int
    leaf: int
    """The last full block of the prompt, 0 for none. The blocks before it are its parents."""
    calls_tool: bool
    """Whether the answer ends with a call of a tool."""
    subagents: range = range(0)
    """The threads that run side by side before this request of the main thread, which waits for all."""


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """A session: the requests of its threads, of which 0 is the main one, and the block before each block of their prompts.

    Block 0 is the beginning. The first `shared` blocks of the main thread are equal in all sessions of the same `group`.
    """

    block: int
    threads: Sequence[Sequence[SessionTurn]]
    parents: Sequence[int]
    shared: int = 0
    group: int = 0
    tenant: str = ""
    tier: str = "default"

    @property
    def num_requests(self) -> int:
        """The requests of all threads."""
        return sum(map(len, self.threads))

    def blocks(self, turn: SessionTurn) -> list[int]:
        """The full blocks of a request's prompt, from the first."""
        blocks, block = [], turn.leaf
        while block:
            blocks.append(block)
            block = self.parents[block]
        return blocks[::-1]

    def fresh_tokens(self) -> list[list[int]]:
        """For each thread, the prompt tokens of its requests that no earlier request of the session has.

        Threads begin before the request that waits for them.
        """
        seen: set[int] = set()
        fresh: list[list[int]] = [[] for _ in self.threads]

        def count(thread: int, turn: SessionTurn) -> None:
            blocks = self.blocks(turn)
            new = (len(blocks) - len(seen.intersection(blocks))) * self.block + turn.prompt_tokens - len(blocks) * self.block
            fresh[thread].append(max(1, new))
            seen.update(blocks)

        for turn in self.threads[0]:
            for thread in turn.subagents:
                for own in self.threads[thread]:
                    count(thread, own)
            count(0, turn)
        return fresh


def read_sessions(path: str | Path, longest: int | None = None) -> list[RecordedSession]:
    """Reads sessions from a file of JSON lines, which may be gzipped, or from the logs of coding agents in a folder.

    A session ends before its first request with more than `longest` tokens of prompt and output, and its subagents' longer requests are
    left out. So are sessions with fewer than three requests. Raises InvalidTrace with the number of the faulty line.
    """
    path = Path(path)
    limit = longest or MAX_TOKENS
    try:
        sessions = [_session(data, limit) for data in read_logs(path)] if path.is_dir() else list(_sessions(path, limit))
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidTrace(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except UnicodeDecodeError:
        raise InvalidTrace(f"{path}: is not text; {_EXPECTED}") from None
    sessions = [session for session in sessions if len(session.threads[0]) >= 3]
    if not sessions:
        raise InvalidTrace(f"{path}: has no session with three requests; {_EXPECTED}")
    if len({session.block for session in sessions}) > 1:
        raise InvalidTrace(f"{path}: has blocks of several sizes; expected one")
    return sessions


def _sessions(path: Path, longest: int) -> Iterator[RecordedSession]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield _session(json.loads(line), longest)
            except json.JSONDecodeError as error:
                raise InvalidTrace(f"{path}, line {number}: is no JSON: {error.msg}; {_EXPECTED}") from None
            except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
                raise InvalidTrace(f"{path}, line {number}: is no session ({type(error).__name__}: {error}); {_EXPECTED}") from None


@dataclass(slots=True)
class _Thread:
    after: int
    ended: float
    turns: list[SessionTurn] = field(default_factory=list)
    last: float | None = None
    """When its last request was sent."""


def _session(data: Mapping[str, Any], longest: int) -> RecordedSession:
    block = _whole(data["block"], 1, 2**20)
    threads = [_Thread(_whole(one.get("after") or 0, 0, MAX_IDS), float(one.get("t") or 0.0)) for one in data["threads"]]
    parents, numbers = [0], dict[int, int]()
    sent: list[float] = []
    for row, blocks in zip(data["requests"], _blocks(data["requests"], block), strict=True):
        thread, prompt, output = threads[row[0]], _whole(row[6], 0, MAX_TOKENS), _whole(row[7], 0, MAX_TOKENS)
        if prompt + output > longest:
            if row[0] == 0:
                break
            continue
        leaf = 0
        for one in blocks:
            if one not in numbers:
                numbers[one] = len(parents)
                parents.append(leaf)
            leaf = numbers[one]
        sent_at = float(row[1])
        think = row[2] if row[2] is not None else 0.0 if thread.last is None else sent_at - thread.last - _ASSUMED_ANSWER
        if row[0] == 0:
            sent.append(sent_at)
        thread.last = sent_at
        thread.turns.append(SessionTurn(max(0.0, float(think)), max(prompt, 1), max(output, 1), leaf, row[8] == TOOL_CALL))
    session = _with_subagents(block, threads, parents, sent, data["threads"][0])
    return replace(session, tenant=_tenant(data.get("tenant")), tier=_tier(data.get("tier")))


def _with_subagents(block: int, threads: list[_Thread], parents: list[int], sent: list[float], first: Mapping[str, Any]) -> RecordedSession:
    """Lets the main thread's requests wait for the subagents before them. Leaves out subagents without a request."""
    subagents = sorted((one for one in threads[1:] if one.turns), key=lambda one: one.after)
    main, at = [], 0
    for number, turn in enumerate(threads[0].turns):
        until = at
        while until < len(subagents) and subagents[until].after <= number:
            until += 1
        if until > at:
            think = max(0.0, sent[number] - max(one.ended for one in subagents[at:until]))
            turn = replace(turn, think=think, subagents=range(at + 1, until + 1))
        main.append(turn)
        at = until
    tools = _whole(first.get("tool_tokens") or 0, 0, MAX_TOKENS)
    chain = (number for number in range(1, len(parents)) if parents[number] != number - 1)
    shared = min(tools // block, next(chain, len(parents)) - 1)
    return RecordedSession(block, [main, *(one.turns for one in subagents[:at])], parents, shared, tools)


def _tenant(value: Any) -> str:
    if value is not None and not (isinstance(value, str) and TENANT.fullmatch(value)):
        raise ValueError(f"tenant {value!r:.40} is no name of 1 to 64 letters, digits and . _ : -")
    return value or ""


def _tier(value: Any) -> str:
    if value is not None and value not in TIERS:
        raise ValueError(f"tier {value!r:.40} is none of {', '.join(TIERS)}")
    return value or "default"


def _blocks(requests: Sequence[Sequence[Any]], block: int) -> Iterator[list[int]]:
    """The block ids of each prompt: some of an earlier request's, then runs of ids, or new ones."""
    lists: list[list[int]] = []
    seen = 0
    for row in requests:
        back, shared = _whole(row[11], 0, len(lists)), _whole(row[12], 0, MAX_IDS)
        ids = lists[-back][:shared] if back else []
        if len(row) > 13:
            for start, count in zip(row[13][::2], row[13][1::2], strict=True):
                ids.extend(range(_whole(start, 1, MAX_IDS), start + _whole(count, 0, MAX_IDS)))
        else:
            ids.extend(range(seen + 1, seen + 1 + _whole(row[6], 0, MAX_TOKENS) // block - shared))
        seen = max(seen, max(ids, default=0))
        lists.append(ids)
        yield ids


def _whole(value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is no whole number from {least} to {most}")
    return value
