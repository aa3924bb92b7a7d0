"""The log of a command: how its lines are written, and that its child processes write them in the same way."""

from __future__ import annotations

import json
import logging
import os
import select
from datetime import UTC, datetime
from io import UnsupportedOperation
from typing import TextIO

_VARIABLE = "_CHAIRLIFT_LOG"
"""The variable that tells a child process the level and the format."""

_PATIENCE_MS = 100
"""How long a line may wait for a reader that stands still, such as a terminal after Ctrl-S. The lines after it do not wait."""
_PIECE = 1000
"""Characters that are written at once: a pipe with any room takes their 4000 bytes without waiting."""


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the log. Lines for which a stalled reader leaves no room are lost and counted: a server must not wait for it."""

    _lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, after the number of those that were lost before it."""
        try:
            if self._lost and self._has_room():
                lost, self._lost = self._lost, 0
                fields = {"name": "chairlift", "levelno": logging.WARNING, "levelname": "WARNING"}
                self.emit(logging.makeLogRecord({**fields, "msg": f"the log was not read, and {lost} lines of it are lost"}))
            text = self.format(record) + self.terminator
            for at in range(0, len(text), _PIECE):
                if not self._has_room():
                    self._lost += 1
                    return
                self.stream.write(text[at : at + _PIECE])
                self.flush()
        except Exception:
            self.handleError(record)

    def _has_room(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self.stream, select.POLLOUT)
        except UnsupportedOperation:  # a stream in memory
            return True
        return bool(poll.poll(0 if self._lost else _PATIENCE_MS))


class JsonFormatter(logging.Formatter):
    """Formats a record as one line. Records never contain prompts or answers."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as JSON without line breaks."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.more(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)

    def more(self, record: logging.LogRecord) -> dict[str, object]:
        """What a line has beside its time, level, logger and message."""
        return {}


def write_log(level: str, formatter: logging.Formatter | None = None) -> None:
    """Writes this process's log to standard error from this level on, as text without a `formatter`, and that of its child processes."""
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=level.upper(), format=form, datefmt="%H:%M:%S", handlers=[LogHandler()])
    if formatter is not None:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(formatter)
    os.environ[_VARIABLE] = f"{level} {'text' if formatter is None else 'json'}"


def write_log_as_parent() -> None:
    """Writes the log of a child process as its parent's, if that called `write_log`."""
    level, _, format = os.environ.get(_VARIABLE, "").partition(" ")
    if level:
        write_log(level, JsonFormatter() if format == "json" else None)
