"""Scheduling parameters of a request: its class, its tenant and its deadlines."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.checks import integer, number, text

LONGEST_MS = 1e10
"""The latest deadline that a request may have: four months. A later one is rejected as a mistake."""


BACKGROUND = 2**31 - 1
"""The `priority` of background requests. Under every policy they wait while others wait, and are preempted for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """One request's scheduling parameters. Their effect depends on the engine's scheduling policy.

    Lower `priority` goes first; `BACKGROUND` yields to all others under every policy. The request counts against the share of `tenant`.
    Deadlines are in milliseconds from the arrival at the engine, for the last and for the first token: a request that misses one is
    dropped. A request shares cached KV blocks only with requests of the same `cache_salt`; requests without one share among themselves.
    `predicted_tokens` is the number of output tokens that the caller expects.
    """

    priority: int = 0
    tenant: str = ""
    deadline_ms: float | None = None
    ttft_deadline_ms: float | None = None
    cache_salt: str | None = None
    predicted_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest with the field and its allowed values."""
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
