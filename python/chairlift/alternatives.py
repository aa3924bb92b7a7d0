"""Regular expressions that match one of many texts."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence


def alternatives(texts: Sequence[str]) -> str:
    """Returns a pattern that matches the longest of `texts`.

    Their common beginnings are tried once, so that the search takes time linear in the text however many there are.
    """
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text)
    branches = []
    for group in by_first.values():
        # At once and not one by one, because re allows only some hundreds of groups in each other.
        common = os.path.commonprefix(group)  # noqa: RUF071  # by characters
        branches.append(re.escape(common) + alternatives([text[len(common) :] for text in group]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"
