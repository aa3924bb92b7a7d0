"""The latest turns of sessions: where they ran, and why one found less in its upstream's cache than the turn before had left there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.gate.answer import UpstreamUsage
from chairlift.gate.prompt import Prompt
from chairlift.server.cache_miss import CacheMiss, Difference, MissReason
from chairlift.server.chat.turn_difference import first_difference
from chairlift.server.turns import Part

MAX_PARTS = 1 << 19
"""Parts of all turns that are kept, of about 100 bytes each."""
SESSION_PARTS = 6
"""Parts that take as much memory as a session with a long name."""
MAX_TURNS = 4
"""Turns of a session among which the one before is looked for: agents send other requests in between."""
SLACK_TOKENS, SLACK_SHARE = 256, 0.2
"""Tokens, and the part of all, that may be missing: upstreams find whole blocks, and some of them are large."""

_CONVERSATION = ("messages[", "input[")
_REASONS = {
    "model": MissReason.MODEL,
    "cache_salt": MissReason.SALT,
    "system": MissReason.SYSTEM,
    "instructions": MissReason.SYSTEM,
    "tools": MissReason.TOOLS,
    "functions": MissReason.TOOLS,
}


@dataclass(frozen=True, slots=True)
class _Turn:
    parts: Sequence[Part]
    tokens: int
    """Tokens of its prompt as the upstream counted them."""


@dataclass(slots=True)
class _Session:
    upstream: int = 0
    """The number of the upstream that answered the latest turn."""
    turns: list[_Turn] = field(default_factory=list)

    @property
    def parts(self) -> int:
        """What it counts towards MAX_PARTS."""
        return SESSION_PARTS + sum(len(turn.parts) + 1 for turn in self.turns)


class Conversations:
    """The latest turns of the sessions of all tenants, in bounded memory."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        """By tenant and name, the one that was used last at the end."""
        self._parts = 0

    def upstream_of(self, tenant: str, session: str) -> int | None:
        """The number of the upstream that answered a session's latest turn, None for a session that is not known."""
        known = self._sessions.get((tenant, session))
        return None if known is None else known.upstream

    def add(
        self, tenant: str, session: str, prompt: Prompt, usage: UpstreamUsage, token_seconds: float | None, upstream: int = 0
    ) -> CacheMiss | None:
        """Keeps a turn that an upstream answered. Returns why it missed the cache, if it did and the upstream tells what it found there.

        `token_seconds` is what a token of a prompt takes at the upstream, None if that is unknown.
        """
        known = self._sessions.get((tenant, session))
        if known is None:
            known = self._sessions[tenant, session] = _Session()
            self._parts += known.parts
        known.upstream, turns = upstream, known.turns
        self._sessions.move_to_end((tenant, session))
        if usage.prompt is None:
            self._forget_oldest()
            return None
        now = {part for part in prompt.parts if part[0].startswith(_CONVERSATION)}
        before = max(reversed(turns), key=lambda turn: len(now.intersection(turn.parts)), default=None)
        turns.append(_Turn(prompt.parts, usage.prompt))
        self._parts += len(prompt.parts) + 1
        if len(turns) > MAX_TURNS:
            self._parts -= len(turns.pop(0).parts) + 1
        self._forget_oldest()
        if before is None or usage.cached is None or now.isdisjoint(before.parts):
            return None
        reusable = min(before.tokens, usage.prompt)
        missed = reusable - usage.cached
        if missed <= max(SLACK_TOKENS, SLACK_SHARE * reusable):
            return None
        name = first_difference(before.parts, prompt.parts)
        seconds = None if token_seconds is None else round(token_seconds * missed, 6)
        return CacheMiss(_reason(name, before.parts, prompt), missed, reusable, Difference(name), seconds=seconds)

    def end(self, tenant: str, session: str) -> None:
        """Forgets a session, if it is known."""
        known = self._sessions.pop((tenant, session), None)
        self._parts -= 0 if known is None else known.parts

    def _forget_oldest(self) -> None:
        while self._parts > MAX_PARTS:
            self.end(*next(iter(self._sessions)))


def _reason(name: str | None, before: Sequence[Part], prompt: Prompt) -> MissReason:
    """Why it missed, by the first field that differs."""
    if name is None:
        return MissReason.UPSTREAM
    if not name.startswith(_CONVERSATION):
        return _REASONS.get(name, MissReason.SETTINGS)
    if prompt.has_system_message and name.endswith("[0]"):
        return MissReason.SYSTEM
    fewer = len(prompt.parts) < len(before)
    return MissReason.SHORTENED if fewer else MissReason.HISTORY
