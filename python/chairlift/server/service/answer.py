"""What whole answers have in common."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import to_json
from starlette.responses import JSONResponse

_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMED = 16


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
    """The header that lists the fields of a request that had no effect; names that would not be safe in one are left out."""
    safe = [name for name in names if _HEADER_SAFE.fullmatch(name)]
    return {"x-chairlift-ignored": ", ".join(safe[:_MOST_NAMED])} if safe else {}
