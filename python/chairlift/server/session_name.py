"""How a request names its session: the headers of agents and gateways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chairlift.errors import InvalidRequest

MAX_LENGTH = 256
"""Maximum characters of a session's name."""

_CLAUDE_SESSION, _CLAUDE_AGENT, _CLAUDE_PARENT = "x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"

_NAMES = (
    ("x-session-id", "x-parent-session-id"),
    (_CLAUDE_SESSION, None),
    ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    ("session-id", None),
)
"""Headers of a session and of the session that began it, by precedence."""

_FINAL = "x-dynamo-session-final"
_HEADERS = frozenset(name for pair in _NAMES for name in pair if name is not None) | {_CLAUDE_AGENT, _CLAUDE_PARENT, _FINAL}


@dataclass(frozen=True, slots=True)
class SessionName:
    """The client's name for a conversation or an agent, which is another session for each tenant."""

    name: str
    parent: str | None = None
    """The session that began it."""
    final: bool = False
    """Whether the session ends with this request."""

    @property
    def home(self) -> str:
        """The name by which an engine is chosen: a subagent's prompt begins as that of its parent, so both have one engine."""
        return self.parent or self.name


def session_name(headers: Iterable[tuple[bytes, bytes]]) -> SessionName | None:
    """Returns the session that a request's headers name; None if they name none.

    If several headers name sessions, the first of `_NAMES` counts, and the first of equal headers. An agent of Claude Code is a session of
    its own. Raises InvalidRequest for a name that is too long.
    """
    values: dict[str, str] = {}
    for raw, value in headers:
        if (name := raw.decode("latin-1")) in _HEADERS and value:
            values.setdefault(name, value.decode("latin-1"))
    header, parent_header = next((pair for pair in _NAMES if pair[0] in values), (None, None))
    if header is None:
        return None
    session, parent = values[header], None if parent_header is None else values.get(parent_header)
    if header == _CLAUDE_SESSION and _CLAUDE_AGENT in values:
        parent = f"{session}/{values[_CLAUDE_PARENT]}" if _CLAUDE_PARENT in values else session
        session = f"{session}/{values[_CLAUDE_AGENT]}"
    for name in (session, parent or ""):
        check_length(name, header)
    return SessionName(session, parent, values.get(_FINAL, "").lower() == "true")


def check_length(name: str, param: str) -> None:
    """Raises InvalidRequest for a name that is too long."""
    if len(name) > MAX_LENGTH:
        raise InvalidRequest(f"{param} has {len(name)} characters: a session's name may have {MAX_LENGTH}", param=param)
