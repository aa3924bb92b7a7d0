"""The processor time of grammars' masks, until it is charged."""

from chairlift.engine import mask_time
from chairlift.engine.mask_time import MIN_SECONDS, MaskTime
from chairlift.scheduling import Scheduling


def test_time_is_charged_once_there_is_enough_of_it_and_by_weight():
    masks = MaskTime({"alice": 4}, {"standard": 1})
    for tenant in ("alice", "eve"):
        add = masks.meter(Scheduling(tenant=tenant))
        add(MIN_SECONDS)
        add(2 * MIN_SECONDS)
    assert masks.take() == {"eve": 3000}
    masks.meter(Scheduling(tenant="alice"))(MIN_SECONDS)
    assert masks.take() == {"alice": 1000}
    assert masks.take() == {}


def test_tenants_who_leave_early_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(mask_time, "MAX_TENANTS", 3)
    masks = MaskTime({}, {})
    for tenant in "abc":
        masks.meter(Scheduling(tenant=tenant))(MIN_SECONDS / 10)
    assert masks.take() == {}
    masks.meter(Scheduling(tenant="d"))(MIN_SECONDS / 5)
    assert masks.take() == {"a": 100, "b": 100, "c": 100, "d": 200}
    assert masks.take() == {}
