"""Processor time that the masks of tenants' grammars take. It makes steps longer for all, so the tenants are charged for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from chairlift.scheduling import Scheduling

MIN_SECONDS = 1e-3
"""Less than this is charged later, with what follows."""
MAX_TENANTS = 1024
"""Most tenants whose time is kept. With more, all are charged."""


class MaskTime:
    """The time that is not charged yet, by tenant, divided by the weights as `Scheduler.charge_external` takes it."""

    def __init__(self, tenant_weights: Mapping[str, int], tier_weights: Mapping[str, int]) -> None:
        self._tenant_weights, self._tier_weights = tenant_weights, tier_weights
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def meter(self, scheduling: Scheduling) -> Callable[[float], None]:
        """Returns the function that adds seconds for a request."""
        tenant = scheduling.tenant
        weight = self._tenant_weights.get(tenant, 1) * self._tier_weights.get(scheduling.served_tier, 1)

        def add(seconds: float) -> None:
            self._seconds[tenant] += seconds / weight

        return add

    def take(self) -> dict[str, int]:
        """Returns the microseconds to charge now, by tenant, and forgets them."""
        least = MIN_SECONDS if len(self._seconds) <= MAX_TENANTS else 0.0
        due = [tenant for tenant, seconds in self._seconds.items() if seconds >= least]
        return {tenant: round(1e6 * self._seconds.pop(tenant)) for tenant in due}
