"""What whole answers have in common."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.responses import JSONResponse

_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMED = 16


class Json(JSONResponse):
    """A JSON answer."""

    def render(self, content: Any) -> bytes:
        """Writes `content`; a lone surrogate cannot get here, since requests with one are refused and tokens decode to text."""
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that lists the fields of a request that had no effect; names that would not be safe in one are left out."""
    safe = [name for name in names if _HEADER_SAFE.fullmatch(name)]
    return {"x-chairlift-ignored": ", ".join(safe[:_MOST_NAMED])} if safe else {}
