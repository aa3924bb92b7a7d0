"""The log of a command: how its lines are written, and that its child processes write them in the same way."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

_VARIABLE = "_CHAIRLIFT_LOG"
"""The variable that tells a child process the level and the format."""


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
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    if formatter is not None:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(formatter)
    os.environ[_VARIABLE] = f"{level} {'text' if formatter is None else 'json'}"


def write_log_as_parent() -> None:
    """Writes the log of a child process as its parent's, if that called `write_log`."""
    level, _, format = os.environ.get(_VARIABLE, "").partition(" ")
    if level:
        write_log(level, JsonFormatter() if format == "json" else None)
