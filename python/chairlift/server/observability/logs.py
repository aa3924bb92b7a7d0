"""The log as JSON: one object a line, with the id of the request that a line is about."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime

from chairlift.server.observability.request_context import LOGGED

_ACCESS = ("client", "method", "path", "http_version", "status")
"""What a record of uvicorn's access log has as its arguments."""


_QUERY_VALUE = re.compile(r"(?<=[?&])([A-Za-z_]{1,32}=)?[^&]+")


def redact_query(record: logging.LogRecord) -> bool:
    """A filter of uvicorn's access log that hides the values of a URL's query: a client may have put its API key there."""
    if isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
        client, method, path, *rest = record.args
        redacted = _QUERY_VALUE.sub(lambda found: f"{found[1] or ''}[redacted]", str(path))
        record.args = (client, method, redacted, *rest)
    return True


class JsonFormatter(logging.Formatter):
    """Makes a line of a record; nothing in it comes from a prompt or an answer, since no record has any."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON without line breaks."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (context := LOGGED.get()) is not None:
            line["request_id"] = context.request_id
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
            line |= zip(_ACCESS, record.args, strict=True)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
