"""JSON responses and the header that lists ignored fields."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from pydantic_core import to_json
from starlette.responses import JSONResponse

_MAX_NAME_LENGTH = 64
_MAX_NAMES = 64


class Json(JSONResponse):
    """A JSON response."""

    def render(self, content: Any) -> bytes:
        """Serializes `content`."""
        return to_json_bytes(content)


def to_json_bytes(content: Any) -> bytes:
    """Serializes to JSON; numbers that JSON cannot express (1e999 in a request or in a model's output) become null.

    Lone surrogates cannot occur: requests and tool calls that contain one are rejected, and tokens decode to valid text.
    """
    return to_json(content, inf_nan_mode="null")


def ignored_header(names: list[str]) -> dict[str, str]:
    """Returns the header that lists the request's fields without effect, percent-encoded and limited in length and number."""
    shown = [quote(name[:_MAX_NAME_LENGTH], safe="") or "%00" for name in names[:_MAX_NAMES]]
    if len(names) > _MAX_NAMES:
        shown.append(f"and {len(names) - _MAX_NAMES} more")
    return {"x-chairlift-ignored": ", ".join(shown)} if shown else {}
