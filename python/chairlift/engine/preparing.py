"""Requests that wait for their grammars, or for KV that is read from disk, before they are scheduled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chairlift.engine.engine_request import EngineRequest

if TYPE_CHECKING:
    from chairlift.grammar.grammar import Grammar


class Preparing:
    """Requests by tag, with the state of their timeline and its start. Times are microseconds of the monotonic clock."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[EngineRequest, str, int]] = {}
        self._grammars: dict[int, Future[Grammar]] = {}  # that requests wait for

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request: EngineRequest, state: str, grammar: Future[Grammar] | None) -> None:
        """Adds a request that waits in `state` of its timeline, for this grammar if any."""
        self._requests[request.tag] = request, state, _now()
        if grammar is not None:
            self._grammars[request.tag] = grammar

    def end(self, tag: int, ended: int) -> EngineRequest | None:
        """Removes a request whose wait ended at `ended` and returns it for submission; None if it was aborted."""
        self._grammars.pop(tag, None)
        if (waiting := self._requests.pop(tag, None)) is None:
            return None
        return replace(waiting[0], submitted=ended, spent=_spent(*waiting, ended))

    def abort(self, tags: Iterable[int]) -> None:
        """Forgets requests, and cancels grammars that no other request waits for. Unknown tags are ignored."""
        for tag in tags:
            self._requests.pop(tag, None)
            grammar = self._grammars.pop(tag, None)
            if grammar is not None and grammar not in self._grammars.values():
                grammar.cancel()

    def explain(self, tag: int) -> dict[str, Any] | None:
        """The timeline of a request that waits, as the core reports it; None for any other tag."""
        if tag not in self._requests:
            return None
        waiting, now = self._requests[tag], _now()
        request, spent = waiting[0], _spent(*waiting, now)
        counts = (
            *(
                "cached_tokens",
                "own_cached_tokens",
                "output_tokens",
                "computed_tokens",
                "recomputed_tokens",
                "draft_tokens",
                "accepted_draft_tokens",
            ),
            *("preemptions", "swaps", "block_us", "compute_ns"),
        )
        return {
            "tag": tag,
            "finish": None,
            "arrived": now - sum(spent.values()),
            "submitted": now,
            **dict.fromkeys(("started", "first_token", "ended", "limit", "energy_uj")),
            "prompt_tokens": len(request.prompt) // 4,
            **dict.fromkeys(counts, 0),
            "tenant": request.scheduling.tenant,
            "priority": request.scheduling.priority,
            "tier": request.scheduling.served_tier,
            "preempted_by": [],
            "preempted_for": {},
            "states": {state: time for state, time in spent.items() if time},
        }


def _spent(request: EngineRequest, state: str, began: int, until: int) -> dict[str, int]:
    """The microseconds of a request's states until `until`. Before `began` it waited for the engine's current step."""
    submitted = began if request.submitted is None else request.submitted
    spent = dict(request.spent)
    for name, time_ in (("wait_step", began - submitted), (state, until - began)):
        spent[name] = spent.get(name, 0) + time_
    return spent


def _now() -> int:
    return time.monotonic_ns() // 1000
