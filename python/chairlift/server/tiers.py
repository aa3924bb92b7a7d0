"""Service tiers: their tenants, weights and latency targets, from the file of `--tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chairlift.config import LARGEST_TIER_WEIGHT
from chairlift.errors import InvalidRequest, InvalidSetting
from chairlift.scheduling import LONGEST_MS, TENANT, TIER_WEIGHTS, TIERS, Scheduling
from chairlift.server.keys import Keys
from chairlift.server.toml_file import line_of, read_toml

_FAST = ("fast", "ultrafast")
"""OpenAI's newer names of the tier `priority`."""

_SETTINGS = ("tenants", "weight", "ttft_ms", "itl_ms")


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier's settings."""

    weight: int
    """Factor of a tenant's weight under the policies `fair` and `vtc`."""
    tenants: frozenset[str] | None = None
    """The tenants that may use it; None for all."""
    ttft_ms: float | None = None
    """Target for the time to the first token."""
    itl_ms: float | None = None
    """Target for the mean time between tokens."""


@dataclass(frozen=True, slots=True)
class ServiceTiers:
    """The settings of all tiers, by name."""

    tiers: Mapping[str, Tier] = field(default_factory=lambda: {name: Tier(TIER_WEIGHTS[name]) for name in TIERS})
    keyed: bool = False
    """Whether tenants have keys. Then only those that may use the tier `priority` may claim to be urgent by other fields."""

    def granted(self, keys: Keys) -> ServiceTiers:
        """Returns the settings for a server with these keys: `priority` is for tenants that were granted it.

        A name that clients invent has no grant. If the only kind of key belongs to the server's owner, requests that name no tenant may use
        it, and the tenants that the file names. Without keys nothing changes.
        """
        if not keys:
            return self
        named, tiers = list(keys), {}
        owner = frozenset({""} if keys.of_owner else ())
        for name, tier in self.tiers.items():
            listed = owner if tier.tenants is None and name == "priority" else tier.tenants
            if listed is not None and not keys.of_owner:
                listed &= {tenant.name for tenant in named}
            extra = frozenset(tenant.name for tenant in named if name in tenant.tiers)
            tiers[name] = tier if listed is None else replace(tier, tenants=listed | extra)
        return ServiceTiers(tiers, keyed=True)

    @property
    def weights(self) -> dict[str, int]:
        """The tiers' weights."""
        return {name: tier.weight for name, tier in self.tiers.items()}

    def choose(self, asked: str | None, tenant: str) -> str:
        """Returns the tier that serves a request of `tenant` with the `service_tier` asked for.

        It is `default` for `auto`, for OpenAI's `scale`, and where the tenant may not use the tier.
        """
        if asked in _FAST:
            asked = "priority"
        return asked if asked is not None and asked in self.tiers and self._may_use(asked, tenant) else "default"

    def priority(self, asked: int, tenant: str) -> int:
        """Returns the priority that `tenant` gets for `asked`: a claim to be more urgent than usual needs a grant."""
        return asked if self._may_claim(tenant) else max(0, asked)

    def bound(self, scheduling: Scheduling, policy: str) -> Scheduling:
        """Returns what a request gets of the urgency that it claims under `policy`.

        Raises InvalidRequest for a deadline that needs a grant.
        """
        if self._may_claim(scheduling.tenant):
            return scheduling
        if policy == "deadline" and (scheduling.deadline_ms is not None or scheduling.ttft_deadline_ms is not None):
            message = "on this server a request with a deadline passes others, and your key may not claim that: leave the deadline out"
            param = "ttft_deadline_ms" if scheduling.deadline_ms is None else "deadline_ms"
            raise InvalidRequest(message, param=param, code="deadline_not_granted")
        predicted = None if policy == "shortest" else scheduling.predicted_tokens
        return replace(scheduling, priority=self.priority(scheduling.priority, scheduling.tenant), predicted_tokens=predicted)

    def _may_claim(self, tenant: str) -> bool:
        return not self.keyed or self._may_use("priority", tenant)

    def _may_use(self, tier: str, tenant: str) -> bool:
        allowed = self.tiers[tier].tenants
        return allowed is None or tenant in allowed


def read_tiers(file: str | None) -> ServiceTiers:
    """Reads the file of `--tiers`: TOML with a table for each tier; None for the defaults. Raises InvalidSetting with line and key."""
    if file is None:
        return ServiceTiers()
    flag = f"--tiers {file}"
    tables, text = read_toml(flag, file)
    tiers = dict(ServiceTiers().tiers)
    for name, table in tables.items():
        if name not in TIERS or not isinstance(table, Mapping):
            raise InvalidSetting(f"{flag}{line_of(text, name)}: expected the tables [{'], ['.join(TIERS)}], got {name!r:.100}")
        for key, value in table.items():
            if wrong := _fault(name, key, value):
                raise InvalidSetting(f"{flag}{line_of(text, name, key)}: [{name}] {key:.100} {wrong}")
        tenants = frozenset(table["tenants"]) if "tenants" in table else None
        tiers[name] = Tier(table.get("weight", TIER_WEIGHTS[name]), tenants, table.get("ttft_ms"), table.get("itl_ms"))
    return ServiceTiers(tiers)


def _fault(tier: str, key: str, value: Any) -> str | None:
    """Returns what is wrong with a setting, None if nothing is."""
    if key not in _SETTINGS:
        return f"is no setting: there are {', '.join(_SETTINGS)}"
    if key == "tenants":
        if tier == "default":
            return "is not allowed: every tenant may use the default tier"
        if not isinstance(value, list) or not all(isinstance(name, str) and TENANT.fullmatch(name) for name in value):
            return 'must be a list of tenants, like ["alice", "bob"]'
    elif key == "weight":
        if type(value) is not int or not 1 <= value <= LARGEST_TIER_WEIGHT:
            return f"must be a whole number from 1 to {LARGEST_TIER_WEIGHT}, got {value!r:.100}"
    elif type(value) not in (int, float) or not 0 < value <= LONGEST_MS:
        return f"must be a number of milliseconds above 0 and at most {LONGEST_MS:g}, got {value!r:.100}"
    return None
