"""Regular expressions that match one of many texts."""

from __future__ import annotations

import re
from collections.abc import Sequence


def alternatives(texts: Sequence[str]) -> str:
    """Returns a pattern that matches the longest of `texts`.

    Their common beginnings are tried once, so that the search takes time linear in the text however many there are.
    """
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + alternatives(rests) for first, rests in by_first.items()]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"
