import math

import pytest

from chairlift.scheduling import Scheduling
from chairlift.server.observability.latencies import AllLatencies, percentiles

INF = math.inf


@pytest.mark.parametrize(
    ("before", "now", "reported"),
    [
        ({}, {}, (0, None, None, None)),
        ({1: 4, INF: 4}, {1: 4, INF: 4}, (0, None, None, None)),
        ({}, {1: 100, 2: 100, INF: 100}, (100, 1, 1, 1)),
        ({1: 50, 2: 50, INF: 50}, {1: 50, 2: 150, INF: 150}, (100, 2, 2, 2)),
        ({}, {1: 50, 2: 90, 4: 100, INF: 100}, (100, 1, 2, 4)),
        ({}, {1: 1, 2: 1, 4: 2, INF: 2}, (2, 1, 4, 4)),  # of two there is a smaller and a larger
        ({}, {1: 0, 2: 10, INF: 100}, (100, 2, 2, 2)),  # most of them beyond the last bound
    ],
)
def test_percentiles_are_those_of_what_came_between_two_looks(before, now, reported):
    assert percentiles(before, now) == pytest.approx(dict(zip(("count", "p50", "p90", "p99"), reported, strict=True)))


@pytest.mark.parametrize("seconds", [0.0013, 0.048, 0.3, 3.57, 22.0])
def test_percentiles_of_few_requests_are_what_these_took(seconds):
    """Within 5 %, in buckets finer than those that Prometheus gets, with nothing interpolated."""
    latencies = AllLatencies({"model_name": "m", "engine": "0"})
    for took in (seconds / 10, seconds, 10 * seconds):
        latencies.for_request(Scheduling()).first_token.observe(took)
        latencies.for_request(Scheduling()).queued.observe(took)
    for stem in ("time_to_first_token", "request_queue_time"):
        found = percentiles({}, latencies.buckets(stem, "default"))
        assert seconds <= found["p50"] <= 1.051 * seconds
        assert 10 * seconds <= found["p99"] <= 10.51 * seconds
    [family] = [one for one in latencies.collect() if one.name == "chairlift_time_to_first_token_seconds"]
    bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
    assert (len(bounds), bounds[-1]) == (25, "+Inf")
    assert [sample.value for sample in family.samples if sample.name.endswith("_count")] == [3]
