"""Why a turn of a session found less in its upstream's cache than the turn before it had left there: by the bodies and by `usage`."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.gate.answer import UpstreamUsage
from chairlift.gate.prompt import Prompt
from chairlift.server.cache_miss import CacheMiss, Difference, MissReason
from chairlift.server.chat.turn_difference import first_difference
from chairlift.server.turns import Part

MAX_PARTS = 1 << 19
"""Parts of all turns that are kept, of about 100 bytes each."""
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


class Conversations:
    """The latest turns of the sessions of all tenants, in bounded memory."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], deque[_Turn]] = OrderedDict()
        """By tenant and name, the one that was used last at the end."""
        self._parts = 0

    def add(self, tenant: str, session: str, prompt: Prompt, usage: UpstreamUsage, token_seconds: float | None) -> CacheMiss | None:
        """Keeps a turn that was answered. Returns why it missed the cache, if it did and the upstream tells what it found there.

        `token_seconds` is what a token of a prompt takes at the upstream, None if that is unknown.
        """
        if usage.prompt is None:
            return None
        turns = self._sessions.setdefault((tenant, session), deque())
        self._sessions.move_to_end((tenant, session))
        now = {part for part in prompt.parts if part[0].startswith(_CONVERSATION)}
        before = max(reversed(turns), key=lambda turn: len(now.intersection(turn.parts)), default=None)
        turns.append(_Turn(prompt.parts, usage.prompt))
        self._parts += len(prompt.parts) + 1
        if len(turns) > MAX_TURNS:
            self._parts -= len(turns.popleft().parts) + 1
        while self._parts > MAX_PARTS:
            self.end(*next(iter(self._sessions)))
        if before is None or usage.cached is None or now.isdisjoint(before.parts):
            return None
        reusable = min(before.tokens, usage.prompt)
        missed = reusable - usage.cached
        if missed <= max(SLACK_TOKENS, SLACK_SHARE * reusable):
            return None
        field = first_difference(before.parts, prompt.parts)
        seconds = None if token_seconds is None else round(token_seconds * missed, 6)
        return CacheMiss(_reason(field, before.parts, prompt), missed, reusable, Difference(field), seconds=seconds)

    def end(self, tenant: str, session: str) -> None:
        """Forgets a session, if it is known."""
        self._parts -= sum(len(turn.parts) + 1 for turn in self._sessions.pop((tenant, session), ()))


def _reason(field: str | None, before: Sequence[Part], prompt: Prompt) -> MissReason:
    if field is None:
        return MissReason.UPSTREAM
    if not field.startswith(_CONVERSATION):
        return _REASONS.get(field, MissReason.SETTINGS)
    if prompt.has_system_message and field.endswith("[0]"):
        return MissReason.SYSTEM
    fewer = len(prompt.parts) < len(before)
    return MissReason.SHORTENED if fewer else MissReason.HISTORY
