"""Processor time that a grammar, or all grammars of a tenant, may take beyond the usual."""

from __future__ import annotations

import time
from collections.abc import Callable

REFILL = 0.05
"""Seconds of an allowance that return each second."""
MAX_REMEMBERED = 1024
"""Number of tenants above which full allowances are forgotten."""


class Allowance:
    """A bucket of `capacity` seconds of processor time. It is full at first and is refilled at the rate `REFILL`."""

    def __init__(self, capacity: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._clock = capacity, clock
        self._left, self._at = capacity, clock()

    @property
    def left(self) -> float:
        """Seconds that are left; negative if more was spent than there was."""
        if self._left == self._capacity:
            return self._left  # the usual case, without a look at the clock
        return min(self._capacity, self._left + (self._clock() - self._at) * REFILL)

    @property
    def full(self) -> bool:
        """Whether nothing is missing."""
        return self.left == self._capacity

    @property
    def far_overdrawn(self) -> bool:
        """Whether twice the capacity was spent."""
        return self.left <= -self._capacity

    @property
    def refilled_in(self) -> float:
        """Seconds until something is left; 0 if something is."""
        return max(0.0, -self.left / REFILL)

    def spend(self, seconds: float) -> None:
        """Takes seconds out; negative seconds are put back."""
        if seconds > 0 or self._left < self._capacity:
            self._left, self._at = min(self._capacity, self.left - seconds), self._clock()


class TenantAllowances:
    """The allowances of tenants, of `capacity` seconds each."""

    def __init__(self, capacity: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._clock = capacity, clock
        self._by_tenant: dict[str, Allowance] = {}

    def of(self, tenant: str) -> Allowance:
        """The allowance of a tenant. Of many tenants, only those whose allowances are not full are remembered."""
        if tenant not in self._by_tenant:
            if len(self._by_tenant) >= MAX_REMEMBERED:
                self._by_tenant = {name: allowance for name, allowance in self._by_tenant.items() if not allowance.full}
            self._by_tenant[tenant] = Allowance(self._capacity, self._clock)
        return self._by_tenant[tenant]
