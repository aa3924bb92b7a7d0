"""Service tiers: their tenants, weights and latency targets, from the file of `--tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.config import LARGEST_TIER_WEIGHT
from chairlift.errors import InvalidSetting
from chairlift.scheduling import LONGEST_MS, TIER_WEIGHTS, TIERS
from chairlift.server.keys import TENANT
from chairlift.server.toml_file import line_of, read_toml

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

    @property
    def weights(self) -> dict[str, int]:
        """The tiers' weights."""
        return {name: tier.weight for name, tier in self.tiers.items()}

    def choose(self, asked: str | None, tenant: str) -> str:
        """Returns the tier that serves a request of `tenant` with the `service_tier` asked for.

        It is `default` for `auto`, for OpenAI's `scale`, and where the tenant may not use the tier.
        """
        tier = self.tiers.get(asked or "")
        allowed = tier is not None and (tier.tenants is None or tenant in tier.tenants)
        return asked if asked is not None and allowed else "default"


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
