import math

import pytest

from chairlift.server.observe.percentiles import percentiles

INF = math.inf


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {}, (0, None, None, None)),
        ({1: 4, INF: 4}, {1: 4, INF: 4}, (0, None, None, None)),
        ({}, {1: 100, 2: 100, INF: 100}, (100, 0.5, 0.9, 0.99)),
        ({1: 50, 2: 50, INF: 50}, {1: 50, 2: 150, INF: 150}, (100, 1.5, 1.9, 1.99)),
        ({}, {1: 50, 2: 90, 4: 100, INF: 100}, (100, 1.0, 2.0, 3.8)),
        ({}, {1: 0, 2: 10, INF: 100}, (100, 2, 2, 2)),  # most of them beyond the last bound
    ],
)
def test_percentiles_are_those_of_what_came_between_two_looks(before, now, told):
    assert percentiles(before, now) == pytest.approx(dict(zip(("count", "p50", "p90", "p99"), told, strict=True)))
