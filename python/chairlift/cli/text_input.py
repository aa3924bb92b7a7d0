"""Text that comes through standard input."""

from __future__ import annotations

import sys
from collections.abc import Callable

from chairlift.errors import InvalidRequest


def text_input(read: Callable[[], str] = lambda: sys.stdin.read()) -> str:
    """All of standard input, or what `read` reads of it. Raises InvalidRequest if it is not UTF-8."""
    try:
        text = read()
        text.encode()  # in the locale C, wrong bytes become lone surrogates
        return text
    except UnicodeError:
        raise InvalidRequest("standard input is not UTF-8 text") from None
