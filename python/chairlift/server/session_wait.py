"""How long a request waits for the turn of its session: what its client is told, and when that is too long for it."""

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
    from chairlift.engine.replicated_engine import ReplicatedEngine

HEADER = "x-chairlift-expected-wait"
"""The expected wait in whole seconds, in the headers of a stream that waits."""

FIRST_LOOK_SECONDS = 0.5
"""Seconds after which the engine has decided whether a request waits. A stream's status is not sent before 1 s."""

ANSWER_SECONDS = 1.0
"""Seconds that the engine has to answer. The headers of a stream do not wait longer for one that hangs."""

_WAIT = re.compile(r"wait\s*=\s*(.*)", re.IGNORECASE)


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


async def end_long_wait(engine: ReplicatedEngine, engine_id: str, patience: float, fail: Callable[[WaitTooLong], None]) -> None:
    """Fails a request that is expected to wait for its session's turn for more than `patience` seconds, or that has waited for so long."""
    began = time.monotonic()
    for look in (FIRST_LOOK_SECONDS, patience):
        await asyncio.sleep(max(0.0, began + look - time.monotonic()))
        waited, more = time.monotonic() - began, await expected_wait(engine, engine_id)
        if more is None:
            return
        if waited + more > patience:
            message = (
                f"other sessions have their turn: this request would wait for about {max(1, math.ceil(more))} s more, "
                f"and its header prefer says at most {patience:g} s in all"
            )
            fail(WaitTooLong(message, retry_after=more))
            return
