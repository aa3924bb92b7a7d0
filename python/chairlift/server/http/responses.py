"""What whole answers have in common."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from pydantic_core import to_json
from starlette.responses import JSONResponse

_LONGEST_NAME = 64
_MOST_NAMED = 64


class Json(JSONResponse):
    """A JSON answer."""

    def render(self, content: Any) -> bytes:
        """Writes `content`."""
        return written(content)


def written(content: Any) -> bytes:
    """JSON; null stands for numbers that it can't say, which are read where a client or a model writes 1e999.

    A lone surrogate cannot get here, since requests and calls with one are not taken, and tokens decode to text.
    """
    return to_json(content, inf_nan_mode="null")


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that lists the fields of a request that had no effect, percent-encoded, cut and counted where they are too many."""
    shown = [quote(name[:_LONGEST_NAME], safe="") or "%00" for name in names[:_MOST_NAMED]]
    if len(names) > _MOST_NAMED:
        shown.append(f"and {len(names) - _MOST_NAMED} more")
    return {"x-chairlift-ignored": ", ".join(shown)} if shown else {}
