"""How long things took, by tenant and class, in histograms that cost a token half a microsecond."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate, pairwise

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from chairlift.server.observability.engine_metrics import CLASSES, tier

# vLLM's buckets, with finer ones below: a small model answers within milliseconds.
_TTFT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
LATENCY = (*_SHORT, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Upper bounds in seconds of what may take long."""

FINENESS = 1.05
"""How much larger the upper bound of a bucket is than the lower one, at most: each of the above is divided so for the dashboard."""

MOST_TENANTS = 32
"""Tenants whose latencies are told apart, the first to come; the others are `other`."""


@cache
def _divided(bounds: tuple[float, ...]) -> tuple[float, ...]:
    """The bounds, and so many between them that two neighbours differ by `FINENESS` at most."""
    fine = [bounds[0]]
    for low, high in pairwise(bounds):
        parts = math.ceil(math.log(high / low) / math.log(FINENESS))
        fine += [low * (high / low) ** (part / parts) for part in range(1, parts)] + [high]
    return tuple(fine)


class Histogram:
    """Observations counted by bucket; prometheus_client's does the same for every thread, at ten times the price.

    `shown` are the upper bounds that Prometheus gets, `bounds` those and finer ones.
    """

    __slots__ = ("bounds", "counts", "shown", "sum")

    def __init__(self, shown: tuple[float, ...]) -> None:
        self.shown = shown
        self.bounds = _divided(shown)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Latencies:
    """Those of the requests of one tenant and class."""

    __slots__ = ("between_tokens", "first_token", "per_token", "queued", "whole")

    def __init__(self) -> None:
        self.first_token = Histogram(_TTFT)
        self.between_tokens = Histogram(_ITL)
        self.per_token = Histogram(_ITL)
        self.queued = Histogram(LATENCY)
        self.whole = Histogram(LATENCY)


_Choose = Callable[[Latencies], Histogram]

_FAMILIES: Mapping[str, tuple[_Choose, str]] = {
    "time_to_first_token": (lambda one: one.first_token, "From a request's arrival to its first token"),
    "inter_token_latency": (lambda one: one.between_tokens, "Between one request's consecutive tokens"),
    "request_time_per_output_token": (
        lambda one: one.per_token,
        "From an answer's first token to its last, over the tokens after the first",
    ),
    "request_queue_time": (lambda one: one.queued, "From the engine's door to the first step"),
    "e2e_request_latency": (lambda one: one.whole, "From a request's arrival to its last token"),
}
"""What is measured, by the stem of its metric's name."""


class AllLatencies(Collector):
    """The latencies of a server: each for all requests, by class and by tenant."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._tenants: set[str] = set()
        self._kept: dict[tuple[str, str], Latencies] = {("none", kind): Latencies() for kind in CLASSES}

    def of(self, tenant: str, priority: int) -> Latencies:
        """Where a request's latencies are to be noted."""
        # A name cannot be asked for by the million: who comes late is not remembered.
        if tenant and len(self._tenants) < MOST_TENANTS:
            self._tenants.add(tenant)
        label = "none" if not tenant else tenant if tenant in self._tenants else "other"
        return self._kept.setdefault((label, tier(priority)), Latencies())

    def buckets(self, stem: str) -> dict[float, float]:
        """How many observations there were up to each upper bound, the finer ones too, for all requests."""
        choose, _ = _FAMILIES[stem]
        return dict(_sum(map(choose, self._kept.values()))[0])

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yields three families a latency."""
        names, values = list(self._labels), list(self._labels.values())
        for stem, (choose, help) in _FAMILIES.items():
            yield _family(f"{stem}_seconds", f"{help}.", names, {"": list(self._kept.values())}, values, choose)
            by_class = {kind: [one for (_, its), one in self._kept.items() if its == kind] for kind in CLASSES}
            yield _family(f"{stem}_by_class_seconds", f"{help}, by class.", [*names, "priority"], by_class, values, choose)
            tenants = dict.fromkeys(label for label, _ in self._kept)
            by_tenant = {label: [one for (its, _), one in self._kept.items() if its == label] for label in tenants}
            yield _family(f"{stem}_by_tenant_seconds", f"{help}, by tenant.", [*names, "tenant"], by_tenant, values, choose)


def _family(
    name: str, help: str, labels: list[str], parts: Mapping[str, list[Latencies]], common: list[str], choose: _Choose
) -> HistogramMetricFamily:
    """One metric; `parts` by the value of the last label, if there are more labels than `common` values."""
    family = HistogramMetricFamily(f"chairlift_{name}", help, labels=labels)
    for own, latencies in parts.items():
        histograms = [choose(one) for one in latencies]
        buckets, total = _sum(histograms)
        shown = {*histograms[0].shown, math.inf}
        counts = [("+Inf" if math.isinf(bound) else str(float(bound)), count) for bound, count in buckets if bound in shown]
        family.add_metric([*common, own][: len(labels)], counts, total)
    return family


def _sum(histograms: Iterable[Histogram]) -> tuple[list[tuple[float, float]], float]:
    """Cumulative counts by upper bound, and the sum of what was observed."""
    found = list(histograms)
    counts = [sum(column) for column in zip(*(one.counts for one in found), strict=True)]
    return list(zip((*found[0].bounds, math.inf), accumulate(counts), strict=True)), sum(one.sum for one in found)
