"""Scheduling parameters of a request: its class, its tenant and its deadlines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from chairlift.checks import choice, integer, number, text

TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Names of tenants that a server takes."""

LONGEST_MS = 1e10
"""The longest duration that a deadline or a setting may have: four months. A longer one is rejected as a mistake."""

TIERS = ("priority", "default", "flex")
"""The tiers of requests, the most urgent first."""

TIER_WEIGHTS = {"priority": 4, "default": 2, "flex": 1}
"""Default factors of a tenant's weight under the policies `fair` and `vtc`, by tier."""

ROUTINGS = ("predicted", "lmetric", "prefix-aware", "least-loaded", "round-robin")
"""Which of several engines gets a request: the names of the core's routings."""

BACKGROUND = 2**31 - 1
"""The `priority` of background requests. Under every policy they wait while others wait, and are preempted for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """One request's scheduling parameters. Their effect depends on the engine's scheduling policy.

    A more urgent `tier` goes first, under `fair` and `vtc` only within a tenant. Within a tier, lower `priority` goes first under policies
    with classes. The priority `BACKGROUND` yields to all others under every policy. The request counts against the share of `tenant`.
    Deadlines are in milliseconds from the call, or from the request's first byte at a server, for the last and for the first token: a
    request that misses one is dropped. A request shares cached KV blocks only with requests of the same `cache_salt`; requests without one
    share among themselves. `predicted_tokens` is the number of output tokens that the caller expects. `user_turn_end` is the number of
    prompt tokens up to the end of the user's last turn, by default up to the last end token: the next prompt of the conversation may differ
    after them. `session` is the tenant's name for the conversation or agent that the request belongs to, and `parent_session` for the one
    that began it: names of other tenants are other sessions. A server sets the groups: only tenants of one `cache_group` share cached KV,
    and all tenants of one `limit_group` share the limits on grammars; None for `tenant` alone.
    """

    priority: int = 0
    tier: str = "default"
    tenant: str = ""
    deadline_ms: float | None = None
    ttft_deadline_ms: float | None = None
    cache_salt: str | None = None
    predicted_tokens: int | None = None
    session: str | None = None
    parent_session: str | None = None
    user_turn_end: int | None = None
    cache_group: str = ""
    limit_group: str | None = None

    @property
    def served_tier(self) -> str:
        """The tier that serves the request: `background` if its priority is `BACKGROUND`, else its `tier`."""
        return "background" if self.priority == BACKGROUND else self.tier

    def __post_init__(self) -> None:
        """Raises InvalidRequest with the field and its allowed values."""
        integer("priority", self.priority, -(2**31), 2**31 - 1)
        choice("tier", self.tier, TIERS)
        text("tenant", self.tenant, 0, 128)
        if self.deadline_ms is not None:
            number("deadline_ms", self.deadline_ms, 0.0, LONGEST_MS, above=True)
        if self.ttft_deadline_ms is not None:
            number("ttft_deadline_ms", self.ttft_deadline_ms, 0.0, LONGEST_MS, above=True)
        if self.cache_salt is not None:
            text("cache_salt", self.cache_salt, 1, 256)
        if self.predicted_tokens is not None:
            integer("predicted_tokens", self.predicted_tokens, 1, 2**31 - 1)
        if self.user_turn_end is not None:
            integer("user_turn_end", self.user_turn_end, 0, 2**31 - 1)
        for name, session in (("session", self.session), ("parent_session", self.parent_session)):
            if session is not None:
                text(name, session, 1, 256)
        text("cache_group", self.cache_group, 0, 129)
        if self.limit_group is not None:
            text("limit_group", self.limit_group, 0, 128)
