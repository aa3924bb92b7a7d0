"""Reads the logs of coding agents as recorded sessions: those of Claude Code (~/.claude/projects) and of Codex (~/.codex/sessions)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median_low
from typing import Any

from chairlift.bench.traces import MAX_TOKENS

BLOCK = 64
"""Tokens of a block of these sessions."""
OTHER_END, TOOL_CALL = 1, 2
"""How an answer ended: with a call of a tool, or in another way."""
_MAIN = ""
_PROMPT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@dataclass(slots=True)
class _Request:
    began: float
    ended: float
    prompt: int
    output: int
    cached: int
    """Tokens of the prompt that the provider's cache had."""
    calls_tool: bool = False


@dataclass(slots=True)
class _Thread:
    requests: dict[str, _Request] = field(default_factory=dict)
    asked: float | None = None
    """When the last message of a user, or result of a tool, was logged."""
    calls_tool: bool = False
    totals: Any = None
    """Codex's counts of all tokens so far, which it sometimes logs twice."""

    def began(self, ended: float) -> float:
        """When the request was sent whose answer ended then."""
        return ended if self.asked is None else min(self.asked, ended)

    @property
    def in_order(self) -> list[_Request]:
        return sorted(self.requests.values(), key=lambda one: (one.began, one.ended))


class _Logs:
    """What has been read: the threads of each session, by the agent's name."""

    def __init__(self) -> None:
        self.sessions: dict[str, dict[str, _Thread]] = defaultdict(lambda: defaultdict(_Thread))
        self._message_in: dict[str, str] = {}
        self._first_of: dict[str, str] = {}

    def claude_code(self, line: Mapping[str, Any]) -> None:
        """A line of Claude Code: a message of the user, or a part of an answer, which repeats the answer's id and counts."""
        message, session = line["message"], line["sessionId"]
        if not isinstance(message, dict):
            return
        agent = (line.get("agentId") or self._first(line)) if line.get("isSidechain") else _MAIN
        thread, at = self.sessions[session][agent], _seconds(line["timestamp"])
        if line["type"] == "user":
            thread.asked = at
            return
        usage, name = message["usage"], message["id"]
        prompt = sum(_tokens(usage, part) for part in _PROMPT)
        # A session that goes on with another one can begin with its lines.
        if not prompt or self._message_in.setdefault(name, session) != session:
            return
        request = thread.requests.setdefault(name, _Request(thread.began(at), at, prompt, 0, _tokens(usage, "cache_read_input_tokens")))
        request.ended = at
        request.output = max(request.output, _tokens(usage, "output_tokens"))
        request.calls_tool |= any(part.get("type") == "tool_use" for part in message["content"])

    def _first(self, line: Mapping[str, Any]) -> str:
        """The first message that this one follows. Early versions name no agent: what follows a first message is of the same agent."""
        own: str = line["uuid"]
        return self._first_of.setdefault(own, self._first_of.get(line.get("parentUuid") or "", own))

    def codex(self, session: str, line: Mapping[str, Any]) -> None:
        """A line of Codex: an item of the conversation, or the counts of the answer that ended."""
        payload, at = line["payload"], _seconds(line["timestamp"])
        thread, kind = self.sessions[session][_MAIN], str(payload.get("type"))
        if line["type"] == "response_item":
            if kind.endswith("_output") or (kind == "message" and payload.get("role") != "assistant"):
                thread.asked = at
            thread.calls_tool |= kind.endswith("_call")
        elif kind == "token_count" and payload["info"]["total_token_usage"] != thread.totals:
            usage, thread.totals = payload["info"]["last_token_usage"], payload["info"]["total_token_usage"]
            prompt, output, cached = (_tokens(usage, name) for name in ("input_tokens", "output_tokens", "cached_input_tokens"))
            thread.requests[str(len(thread.requests))] = _Request(thread.began(at), at, prompt, output, cached, thread.calls_tool)
            thread.calls_tool = False


def read_logs(folder: Path) -> Iterator[dict[str, Any]]:
    """The sessions of all logs below a folder, each as an object of the format that `sessions.read_sessions` reads.

    A prompt that is no shorter than the one before it in its thread begins with that one; of a shorter one, whose conversation was
    compacted, the part is repeated that the provider's cache had. All sessions of a program begin with the same tokens: as many as its
    cache had of the first prompts, in the median. Tokens are counted by the provider. Lines that have none of this are passed over.
    Raises OSError.
    """
    programs = {True: _Logs(), False: _Logs()}
    for path in sorted(folder.rglob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                    if "payload" in line:
                        programs[True].codex(str(path), line)
                    else:
                        programs[False].claude_code(line)
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                    continue
    for logs in programs.values():
        found = [threads for threads in logs.sessions.values() if threads[_MAIN].requests]
        common = median_low([threads[_MAIN].in_order[0].cached for threads in found]) if found else 0
        yield from (_session(threads, common) for threads in found)


def _session(threads: Mapping[str, _Thread], common: int) -> dict[str, Any]:
    main = threads[_MAIN].in_order
    start = main[0].began
    heads: list[dict[str, Any]] = [{"tool_tokens": common}]
    sent = [(main[number].began, 0, number, main) for number in range(len(main))]
    for requests in (one.in_order for agent, one in threads.items() if agent != _MAIN and one.requests):
        heads.append({"after": sum(one.began < requests[0].began for one in main), "t": requests[-1].ended - start})
        sent += [(max(requests[number].began, start), len(heads) - 1, number, requests) for number in range(len(requests))]
    rows: list[list[Any]] = []
    rows_of: dict[int, int] = {}
    for began, thread, number, requests in sorted(sent, key=lambda one: one[:3]):
        request, think, back, repeated = requests[number], 0.0, 0, 0
        if number:
            before = requests[number - 1]
            think, back = max(0.0, began - before.ended), len(rows) - rows_of[thread]
            repeated = before.prompt if request.prompt >= before.prompt else min(request.cached, request.prompt)
        rows_of[thread] = len(rows)
        end = TOOL_CALL if request.calls_tool else OTHER_END
        counts = [request.prompt, request.output, end, "", 0, back, repeated // BLOCK]
        rows.append([thread, began - start, think, None, None, "s", *counts])
    return {"block": BLOCK, "threads": heads, "requests": rows}


def _tokens(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name) or 0
    if not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is no number of tokens")
    return value


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
