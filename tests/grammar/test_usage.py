"""What the grammars of a tenant may take of the engine's time, with clocks of the test."""

import pytest

from chairlift.errors import InvalidRequest
from chairlift.grammar import allowance
from chairlift.grammar.allowance import REFILL, Allowance, TenantAllowances
from chairlift.grammar.usage import CALL_SECONDS, GRAMMAR_SECONDS, MAX_GROWTH, TENANT_SECONDS, GrammarUsage


class Machine:
    """A clock and a thread's processor clock, which functions of the test move."""

    def __init__(self):
        self.now = self.processor = 0.0

    def allowance(self, capacity=TENANT_SECONDS):
        return Allowance(capacity, lambda: self.now)

    def usage(self, tenant):
        return GrammarUsage(tenant, clock=lambda: self.now, processor_clock=lambda: self.processor)

    def work(self, seconds):
        self.processor += seconds
        self.now += seconds
        return "mask"


@pytest.fixture
def machine():
    return Machine()


def calls_until_refused(machine, usage, seconds, at_most=10_000):
    for count in range(at_most):
        try:
            usage.check()
        except InvalidRequest:
            return count
        assert usage.call(machine.work, seconds) == "mask"
    return at_most


def test_an_allowance_returns_with_time_and_never_beyond_its_capacity(machine):
    bucket = machine.allowance(1.0)
    bucket.spend(-5.0)
    assert (bucket.left, bucket.full) == (1.0, True)
    bucket.spend(1.5)
    assert (bucket.left, bucket.full, bucket.refilled_in) == (-0.5, False, 0.5 / REFILL)
    machine.now += 0.5 / REFILL
    assert bucket.left == pytest.approx(0.0)
    machine.now += 100 / REFILL
    assert (bucket.full, bucket.refilled_in) == (True, 0.0)


def test_of_many_tenants_those_are_remembered_whose_allowances_are_not_full(machine, monkeypatch):
    monkeypatch.setattr(allowance, "MAX_REMEMBERED", 3)
    tenants = TenantAllowances(1.0, lambda: machine.now)
    eve, bob = tenants.of("eve"), tenants.of("bob")
    eve.spend(1.0)
    for number in range(10):
        tenants.of(f"tenant {number}")
    assert tenants.of("eve") is eve
    assert tenants.of("bob") is not bob


def test_usual_masks_are_never_refused(machine):
    usage = machine.usage(machine.allowance())
    assert calls_until_refused(machine, usage, CALL_SECONDS) == 10_000


def test_a_slow_grammar_is_refused_after_its_allowance_and_a_mask(machine):
    usage = machine.usage(machine.allowance())
    slow = 0.015
    # What comes back while it runs is a twentieth.
    assert 1 < calls_until_refused(machine, usage, slow) <= GRAMMAR_SECONDS / (slow * (1 - REFILL) - CALL_SECONDS) + 1
    with pytest.raises(InvalidRequest, match="make it simpler") as refused:
        usage.check()
    assert refused.value.code == "grammar_timeout"
    machine.now += GRAMMAR_SECONDS / REFILL
    usage.check()


def test_several_slow_grammars_of_a_tenant_share_its_allowance_and_others_go_on(machine):
    tenant = machine.allowance()
    slow, good, other = [machine.usage(tenant) for _ in range(3)], machine.usage(tenant), machine.usage(machine.allowance())
    good.call(machine.work, CALL_SECONDS / 2)
    counts = [calls_until_refused(machine, usage, 0.015) for usage in slow]
    assert counts[0] > 2 * counts[2] > 0
    assert tenant.left <= 0
    good.check()
    other.check()


def test_the_time_of_any_number_of_grammars_is_bounded(machine):
    tenant, slow = machine.allowance(), 0.015
    good, other = machine.usage(tenant), machine.usage(machine.allowance())
    calls = sum(calls_until_refused(machine, machine.usage(tenant), slow) for _ in range(1000))
    assert calls * (slow - CALL_SECONDS) < 2 * TENANT_SECONDS + REFILL * machine.now + slow
    with pytest.raises(InvalidRequest, match=r"your grammars together .* try again in \d s") as refused:
        good.check()
    assert refused.value.code == "grammar_timeout"
    machine.now += tenant.refilled_in + 0.1
    good.check()
    other.check()


def test_a_grammar_that_grew_too_much_is_worn(machine):
    usage = GrammarUsage(machine.allowance(), 1000)
    assert (usage.growth, usage.worn) == (0, False)
    usage.lexer_bytes = 1000 + MAX_GROWTH
    assert (usage.growth, usage.worn) == (MAX_GROWTH, False)
    usage.lexer_bytes += 1
    assert usage.worn
