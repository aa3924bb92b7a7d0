"""How an engine without a server is driven: it reads orders from its standard input, one line of JSON each.

An order is `{"prompts", "outputs", "arrivals"}`, a list with one entry a request: token ids, how many tokens to give, and seconds.
The reply is `{"times", "tokens"}`: for each request, when tokens were there (seconds since the order), and their ids.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Order = dict[str, Any]
Reply = tuple[list[list[float]], list[list[int]]]


def serve(load: Callable[[], Callable[[Order], Reply]]) -> None:
    """Loads an engine, says `ready`, and answers orders until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print, in C++ too, must not end up between the replies
    answer = load()
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        times, tokens = answer(json.loads(line))
        print(json.dumps({"times": times, "tokens": tokens}), file=replies, flush=True)


def spans(firsts: list[float], lasts: list[float], whole: float) -> list[list[float]]:
    """Times of an engine that tells only when a request's first and last token were there.

    `whole` is what the call took, seen by the caller: the last request ends then, so that nothing the call did goes uncounted.
    """
    last = max(range(len(lasts)), key=lasts.__getitem__)
    return [[first, whole if i == last else end] for i, (first, end) in enumerate(zip(firsts, lasts, strict=True))]
