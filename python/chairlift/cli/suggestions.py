"""Suggestions for misspelt flags, commands and environment variables."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], similarity: float = 0.75) -> str:
    """`: did you mean NAME?` with the most similar of the `known` names; empty if none has this `similarity`, 0 to 1.

    The default is that of words of four letters of which two are swapped.
    """
    near = get_close_matches(name, list(known), 1, similarity)
    return f": did you mean {near[0]}?" if near else ""
