"""The open connections of a server: how many there may be, and which of them end when there are too many."""

from __future__ import annotations

import contextlib
import logging
import ssl
import time
from collections import OrderedDict
from enum import Enum, auto
from typing import Protocol

MAX_CONNECTIONS = 16_384
"""Most connections, however many descriptors there are: an idle one takes about 9 kB."""

RESERVED_DESCRIPTORS = 96
"""Descriptors for all that is no connection: engines and their restarts, the database, logs, what is accepted before others have ended."""

LOG_SECONDS = 60.0
"""Interval at which a failure to accept connections is logged."""


class ConnectionState(Enum):
    """What a connection does."""

    IDLE = auto()
    """No request is complete up to its body: the handshake, the headers or the next request are awaited."""
    RECEIVING = auto()
    """A request's body arrives."""
    ANSWERING = auto()


class Connection(Protocol):
    """A connection that `Connections` may end."""

    def end(self) -> None:
        """Closes the connection at once."""


class Connections(set[Connection]):
    """uvicorn's set of open connections, with a limit.

    A new connection beyond the limit ends the one that has been idle for longest or, if none is idle, the one whose request has been
    arriving for longest. The latter also ends when the requests of more than half of the limit are arriving. None ends whose request is
    being answered.
    """

    def __init__(self, limit: int = MAX_CONNECTIONS, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self.tls = tls
        """The certificate, for connections that use TLS."""
        self._limit = limit
        self._states: dict[Connection, ConnectionState] = {}
        self._waiting: dict[ConnectionState, OrderedDict[Connection, None]] = {
            ConnectionState.IDLE: OrderedDict(),
            ConnectionState.RECEIVING: OrderedDict(),
        }
        """Connections that may end by their state, those that entered it first before others. A dict would search past all that left."""

    def enter(self, connection: Connection) -> bool:
        """Adds a connection, which is idle, and ends another one at the limit. Returns False, and adds nothing, if none may end."""
        if len(self._states) >= self._limit:
            oldest = next((one for waiting in self._waiting.values() for one in waiting), None)
            if oldest is None:
                return False
            self._end(oldest)
        self.add(connection)
        self.set_state(connection, ConnectionState.IDLE)
        return True

    def leave(self, connection: Connection) -> None:
        """Removes a connection that has ended, or is about to."""
        self.discard(connection)
        if (state := self._states.pop(connection, None)) in self._waiting:
            del self._waiting[state][connection]

    def set_state(self, connection: Connection, state: ConnectionState) -> None:
        """Called when a connection may have changed its state."""
        before = self._states.get(connection)
        if state is before or (before is None and connection not in self):
            return
        if before in self._waiting:
            del self._waiting[before][connection]
        self._states[connection] = state
        if state in self._waiting:
            self._waiting[state][connection] = None
        receiving = self._waiting[ConnectionState.RECEIVING]
        if len(receiving) > self._limit // 2:
            self._end(next(iter(receiving)))

    def _end(self, connection: Connection) -> None:
        self.leave(connection)
        connection.end()


def connection_limit() -> int:
    """Raises this process's limit of open descriptors as far as the system allows, and returns how many connections it leaves room for.

    Each connection may have a file open beside its socket.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(8, (soft - RESERVED_DESCRIPTORS) // 2))


class AcceptFailures(logging.Filter):
    """Lets asyncio log once a minute, in one line, that it cannot accept connections. It would log a traceback for each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at = -LOG_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is logged."""
        if not record.getMessage().startswith("socket.accept() out of system resource"):
            return True
        now = time.monotonic()
        if now - self._logged_at < LOG_SECONDS:
            return False
        self._logged_at = now
        error = record.exc_info[1] if record.exc_info else None
        record.msg, record.args, record.exc_info = (
            "no connection can be accepted (%s): raise the limit of open files (ulimit -n)",
            (error,),
            None,
        )
        return True
