"""The table that is logged at the start: what was decided, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger("chairlift")


def log_decisions(model: str, decisions: Sequence[Sequence[str]]) -> None:
    """Logs a line for the model and one for each decision of a start (what, value, reason), in columns."""
    rows = [("model", model, ""), *decisions]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for what, value, reason in rows:
        log.info("%s", f"{what:{widths[0]}}  {value:{widths[1]}}  {reason}".rstrip())
