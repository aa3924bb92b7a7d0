"""Latency histograms by tenant, priority class and tier, at half a microsecond for each token, and percentiles from their buckets."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate, pairwise

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from chairlift.scheduling import TIERS, Scheduling
from chairlift.server.observability.engine_metrics import CLASSES, NO_TENANT, priority_class

# vLLM's buckets, with finer ones below: small models respond within milliseconds.
_TTFT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
LATENCY = (*_SHORT, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Upper bounds in seconds for latencies of whole requests."""

BUCKET_RATIO = 1.05
"""Maximum ratio of a bucket's upper bound to its lower one: the bounds above are subdivided so for the dashboard."""

MAX_TENANTS = 32
"""Tenants with latencies of their own, in order of arrival; all others are summed as `other`."""


@cache
def _fine_bounds(bounds: tuple[float, ...]) -> tuple[float, ...]:
    """Adds bounds so that neighbours differ by a factor of at most `BUCKET_RATIO`."""
    fine = [bounds[0]]
    for low, high in pairwise(bounds):
        parts = math.ceil(math.log(high / low) / math.log(BUCKET_RATIO))
        fine += [low * (high / low) ** (part / parts) for part in range(1, parts)] + [high]
    return tuple(fine)


class Histogram:
    """Counts observations by bucket. prometheus_client's histogram is thread-safe, at ten times the cost.

    Prometheus gets the upper bounds `shown`; `bounds` has those and finer ones.
    """

    __slots__ = ("bounds", "counts", "shown", "sum")

    def __init__(self, shown: tuple[float, ...]) -> None:
        self.shown = shown
        self.bounds = _fine_bounds(shown)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Counts an observation."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Latencies:
    """Latencies of the requests of one tenant, priority class and tier."""

    __slots__ = ("between_tokens", "first_token", "per_token", "queued", "whole")

    def __init__(self) -> None:
        self.first_token = Histogram(_TTFT)
        self.between_tokens = Histogram(_ITL)
        self.per_token = Histogram(_ITL)
        self.queued = Histogram(LATENCY)
        self.whole = Histogram(LATENCY)


_Select = Callable[[Latencies], Histogram]

_FAMILIES: Mapping[str, tuple[_Select, str]] = {
    "time_to_first_token": (lambda one: one.first_token, "From a request's arrival to its first token"),
    "inter_token_latency": (lambda one: one.between_tokens, "Between one request's consecutive tokens"),
    "request_time_per_output_token": (
        lambda one: one.per_token,
        "From an answer's first token to its last, over the tokens after the first",
    ),
    "request_queue_time": (lambda one: one.queued, "From the engine's queue to the first step"),
    "e2e_request_latency": (lambda one: one.whole, "From a request's arrival to its last token"),
}
"""What is measured, by the stem of the metric's name."""


class AllLatencies(Collector):
    """The latencies of a server: for all requests, by class and by tenant."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._tenants: set[str] = set()
        known = [*((NO_TENANT, kind, "default") for kind in CLASSES), *((NO_TENANT, "default", tier) for tier in TIERS)]
        self._by_label: dict[tuple[str, str, str], Latencies] = {key: Latencies() for key in known}

    def for_request(self, scheduling: Scheduling) -> Latencies:
        """Returns where to record the latencies of a request."""
        # Clients can invent any number of names, so only the first ones are tracked.
        tenant = scheduling.tenant
        if tenant and len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        label = NO_TENANT if not tenant else tenant if tenant in self._tenants else "other"
        key = label, priority_class(scheduling.priority), scheduling.served_tier
        if (found := self._by_label.get(key)) is None:
            found = self._by_label[key] = Latencies()
        return found

    def buckets(self, stem: str, tier: str) -> Buckets:
        """Returns cumulative counts of the requests of a tier by upper bound, including the finer bounds."""
        select, _ = _FAMILIES[stem]
        chosen = [select(one) for (_, _, served), one in self._by_label.items() if served == tier]
        return dict(_sum(chosen)[0]) if chosen else {}

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yields four metric families for each latency."""
        names, values = list(self._labels), list(self._labels.values())
        for stem, (select, help) in _FAMILIES.items():
            yield _family(f"{stem}_seconds", f"{help}.", names, {"": list(self._by_label.values())}, values, select)
            for at, (by, label) in enumerate((("tenant", "tenant"), ("class", "priority"), ("tier", "tier"))):
                parts: dict[str, list[Latencies]] = {}
                for key, one in list(self._by_label.items()):  # the event loop adds labels meanwhile
                    parts.setdefault(key[at], []).append(one)
                yield _family(f"{stem}_by_{by}_seconds", f"{help}, by {by}.", [*names, label], parts, values, select)


def _family(
    name: str, help: str, labels: list[str], parts: Mapping[str, list[Latencies]], common: list[str], select: _Select
) -> HistogramMetricFamily:
    """Builds one metric; `parts` by the value of the last label, if there are more labels than `common` values."""
    family = HistogramMetricFamily(f"chairlift_{name}", help, labels=labels)
    for own, latencies in parts.items():
        histograms = [select(one) for one in latencies]
        buckets, total = _sum(histograms)
        shown = {*histograms[0].shown, math.inf}
        counts = [("+Inf" if math.isinf(bound) else str(float(bound)), count) for bound, count in buckets if bound in shown]
        family.add_metric([*common, own][: len(labels)], counts, total)
    return family


def _sum(histograms: Iterable[Histogram]) -> tuple[list[tuple[float, float]], float]:
    """Returns cumulative counts by upper bound, and the sum of all observations."""
    parts = list(histograms)
    counts = [sum(column) for column in zip(*(part.counts for part in parts), strict=True)]
    return list(zip((*parts[0].bounds, math.inf), accumulate(counts), strict=True)), sum(part.sum for part in parts)


Buckets = Mapping[float, float]
"""Cumulative counts by upper bound; the last bound is infinite."""


def total(parts: Iterable[Buckets]) -> Buckets:
    """Returns the sum of counts by equal bounds."""
    summed: Counter[float] = Counter()
    for part in parts:
        summed.update(part)
    return summed


PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentiles(before: Buckets, now: Buckets) -> dict[str, float | None]:
    """Returns `count`, `p50`, `p90` and `p99` of the observations between two readings of the buckets.

    Each percentile is the nearest rank, rounded up to its bucket's upper bound, without interpolation. It is None without observations, and
    the last finite bound if it lies above.
    """
    increase = {bound: count - before.get(bound, 0.0) for bound, count in now.items()}
    count = max(increase.values(), default=0.0)
    return {"count": count, **{name: _quantile(increase, share * count) if count else None for name, share in PERCENTILES.items()}}


def _quantile(increase: Buckets, rank: float) -> float:
    finite = 0.0
    for bound, count in sorted(increase.items()):
        if not math.isinf(bound):
            finite = bound
        if count >= rank:
            break
    return finite
