import pytest

from chairlift.sim import plan, workload_spec


@pytest.fixture
def short_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for a quarter of the time and fewer requests, for which synthetic machines have the same capacities."""
    monkeypatch.setattr(plan, "_MIN_SECONDS", 30.0)
    monkeypatch.setattr(workload_spec, "MIN_REQUESTS", 150)
