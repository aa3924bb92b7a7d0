"""JSON logs: one object on each line, with the id of the request."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime

from chairlift.server.observability.request_context import CURRENT_REQUEST

_ACCESS = ("client", "method", "path", "http_version", "status")
"""The arguments of a record of uvicorn's access log."""


_QUERY_VALUE = re.compile(r"(?<=[?&])([A-Za-z_]{1,32}=)?[^&]+")


def redact_query(record: logging.LogRecord) -> bool:
    """Log filter that hides the values of a URL's query: a client may have put its API key there."""
    if isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
        client, method, path, *rest = record.args
        redacted = _QUERY_VALUE.sub(lambda match: f"{match[1] or ''}[redacted]", str(path))
        record.args = (client, method, redacted, *rest)
    return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one line. Records never contain prompts or answers."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as JSON without line breaks."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (context := CURRENT_REQUEST.get()) is not None:
            line["request_id"] = context.request_id
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
            line |= zip(_ACCESS, record.args, strict=True)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
