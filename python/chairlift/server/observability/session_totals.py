"""What each session has used and waited for, for the dashboard and `chairlift top`."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from chairlift.outputs import Timeline
from chairlift.server.cache_miss import CacheMiss
from chairlift.server.keys import Reader, sees
from chairlift.timeline import WAITING

MAX_SESSIONS = 512
"""Sessions that are kept. Beyond it, the tenant with the most sessions loses the one that has been quiet for longest."""
MAX_ROWS = 32
"""Rows of a report: those of the latest sessions."""


@dataclass(slots=True)
class _Totals:
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    waited_s: float = 0.0
    """Seconds that requests waited in the engine, in all states of waiting."""
    turn_wait_s: float = 0.0
    """Seconds that requests waited for the session's turn."""
    compute_s: float = 0.0
    """The session's share of the steps' times, as in `Timeline.compute_seconds`."""
    missed_for: dict[str, int] = field(default_factory=dict)
    """Tokens that were computed again although the turn before had left them in the cache, by reason."""
    ended: float = 0.0
    """When its last request ended, on the monotonic clock."""


class SessionTotals:
    """The totals of a model's sessions.

    Answers that a stop string or the client ended do not count towards the seconds, because their timelines are not at hand.
    """

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], _Totals] = OrderedDict()
        """Totals by tenant and name; the session with the latest request is last."""
        self._of_tenant: Counter[str] = Counter()

    def add(
        self, tenant: str, session: str, prompt_tokens: int, cached_tokens: int, output_tokens: int, timelines: Sequence[Timeline]
    ) -> None:
        """Adds a request, with the `cached_tokens` of its usage. Of several answers the one that waited longest counts."""
        totals = self._totals(tenant, session)
        totals.turns += 1
        totals.prompt_tokens += prompt_tokens
        totals.cached_tokens += cached_tokens
        totals.output_tokens += output_tokens
        totals.waited_s += max((_waited(timeline) for timeline in timelines), default=0.0)
        totals.turn_wait_s += max((timeline.states.get("wait_session", 0.0) for timeline in timelines), default=0.0)
        totals.compute_s += sum(timeline.compute_seconds for timeline in timelines)
        totals.ended = time.monotonic()

    def add_miss(self, tenant: str, session: str, miss: CacheMiss) -> None:
        """Adds a turn that missed the cache, before it is added as a request."""
        missed = self._totals(tenant, session).missed_for
        missed[str(miss.reason)] = missed.get(str(miss.reason), 0) + miss.missed_tokens

    def rows(self, reader: Reader) -> list[dict[str, object]]:
        """Returns the latest sessions that `reader` may see, the latest first, with `quiet_s`, the seconds since the last request's end."""
        now = time.monotonic()
        rows: list[dict[str, object]] = []
        for (tenant, session), totals in reversed(self._sessions.items()):
            if sees(reader, tenant):
                row = {"session": session, "tenant": tenant, **asdict(totals)}
                rows.append(row | {"quiet_s": now - row.pop("ended")})
            if len(rows) == MAX_ROWS:
                break
        return rows

    def _totals(self, tenant: str, session: str) -> _Totals:
        """Returns the totals of a session, which is now the latest."""
        key = tenant, session
        if key not in self._sessions:
            self._make_room()
            self._of_tenant[tenant] += 1
            self._sessions[key] = _Totals(ended=time.monotonic())
        self._sessions.move_to_end(key)
        return self._sessions[key]

    def _make_room(self) -> None:
        if len(self._sessions) < MAX_SESSIONS:
            return
        [(most, _)] = self._of_tenant.most_common(1)
        del self._sessions[next(key for key in self._sessions if key[0] == most)]
        self._of_tenant -= Counter([most])


def _waited(timeline: Timeline) -> float:
    return sum(seconds for name, seconds in timeline.states.items() if name in WAITING)
