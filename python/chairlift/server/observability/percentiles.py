"""Percentiles of what a histogram saw between two looks at its buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping

Buckets = Mapping[float, float]
"""Observations up to each bucket's upper bound, the last bound infinite."""

SHOWN = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentiles(before: Buckets, now: Buckets) -> dict[str, float | None]:
    """The `count` of observations between two looks, and `p50`, `p90`, `p99`: the upper bounds of the buckets that they lie in.

    Each is one of the observations (nearest rank), rounded up to its bucket's bound; nothing is interpolated. Where there were no
    observations they are None; one beyond the last finite bound is told as that bound.
    """
    grown = {bound: count - before.get(bound, 0.0) for bound, count in now.items()}
    count = max(grown.values(), default=0.0)
    return {"count": count, **{name: _quantile(grown, share * count) if count else None for name, share in SHOWN.items()}}


def _quantile(grown: Buckets, rank: float) -> float:
    finite = 0.0
    for bound, count in sorted(grown.items()):
        if not math.isinf(bound):
            finite = bound
        if count >= rank:
            break
    return finite
