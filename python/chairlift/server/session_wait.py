"""The wait of a request for its session's turn: how long it is expected to be, and whether its client wants to wait for so long."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from chairlift.errors import EngineDead, InvalidRequest, WaitTooLong

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.replicated_engine import ReplicatedEngine
    from chairlift.server.session_name import SessionName

HEADER = "x-chairlift-expected-wait"
"""The expected wait in whole seconds, in the headers of a stream that waits."""

FIRST_CHECK_SECONDS = 0.5
"""Seconds after which an engine has usually decided whether a request waits. A stream's status is not sent before 1 s."""

ANSWER_SECONDS = 1.0
"""Seconds that the engine has to answer. The headers of a stream do not wait longer for one that hangs."""

_WAIT = re.compile(r"wait\s*=\s*(.*)", re.IGNORECASE)


def takes_turns(session: SessionName | None, config: EngineConfig) -> bool:
    """Whether a request may wait for its session's turn. Without a name too, it may be found to continue a session."""
    return session is not None or config.session_turns == "all"


def preferred_wait(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds of `Prefer: wait=SECONDS` (RFC 7240), which the client wants to wait at most; raises InvalidRequest."""
    found = (_WAIT.fullmatch(preference.strip()) for preference in re.split("[,;]", headers.get("prefer", "")))
    value = next((match[1].strip('"') for match in found if match), None)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise InvalidRequest(f"the header prefer has wait={value[:20]!r}: send a whole number of seconds", param="prefer")
    return float(value)


async def expected_wait(engine: ReplicatedEngine, engine_id: str) -> float | None:
    """Returns the seconds that a request is still expected to wait for its session's turn; None if it does not wait for that.

    None too if the engine does not answer or dies: the request itself goes on in another engine.
    """
    with suppress(EngineDead, TimeoutError):
        async with asyncio.timeout(ANSWER_SECONDS):
            timelines = await engine.explain(engine_id)
        return max((one.expected_wait_ms / 1e3 for one in timelines if one.expected_wait_ms is not None), default=None)
    return None


async def refuse_long_wait(
    engine: ReplicatedEngine, engine_id: str, began: float, max_wait: float, refuse: Callable[[WaitTooLong], None]
) -> None:
    """Refuses a request that the engine has just got if it is expected to wait for its session's turn for more than `max_wait` seconds.

    They count from `began`, on the monotonic clock. The engine is asked again when they are over, because the estimate may have been too
    low, and at the first check the engine may still compile the request's grammar.
    """
    for at in (time.monotonic() + FIRST_CHECK_SECONDS, began + max_wait):
        await asyncio.sleep(at - time.monotonic())
        more = await expected_wait(engine, engine_id)
        if more is not None and time.monotonic() - began + more > max_wait:
            message = (
                f"other sessions have their turn: this request would wait for about {max(1, math.ceil(more))} s more, "
                f"and its header prefer says at most {max_wait:g} s in all"
            )
            refuse(WaitTooLong(message, retry_after=more))
            return
