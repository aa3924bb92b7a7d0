"""How a request is treated beside others: its class, its tenant, its deadlines."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.checks import integer, number, text

LONGEST_MS = 1e10
"""The latest deadline that can be asked for, four months: later ones are mistakes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """One request's place among the others; what it changes depends on the engine's scheduling policy.

    Lower `priority` goes first. `tenant` is whose share the request counts against. Deadlines are in milliseconds from the
    arrival at the engine, for the last and for the first token: a request that misses one is dropped. `cache_salt` keeps its
    KV blocks apart from those of requests with another salt, or none. `predicted_tokens` is how many tokens the caller expects
    to come out.
    """

    priority: int = 0
    tenant: str = ""
    deadline_ms: float | None = None
    ttft_deadline_ms: float | None = None
    cache_salt: str | None = None
    predicted_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field and what it may be."""
        integer("priority", self.priority, -(2**31), 2**31 - 1)
        text("tenant", self.tenant, 0, 128)
        if self.deadline_ms is not None:
            number("deadline_ms", self.deadline_ms, 0.0, LONGEST_MS, above=True)
        if self.ttft_deadline_ms is not None:
            number("ttft_deadline_ms", self.ttft_deadline_ms, 0.0, LONGEST_MS, above=True)
        if self.cache_salt is not None:
            text("cache_salt", self.cache_salt, 1, 256)
        if self.predicted_tokens is not None:
            integer("predicted_tokens", self.predicted_tokens, 1, 2**31 - 1)
