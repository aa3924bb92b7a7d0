"""Prometheus metrics: the server's own timings, and the engine's counters read when scraped."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

# vLLM's buckets, with finer ones below: a small model answers within milliseconds.
_TTFT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
_LATENCY = (*_SHORT, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

_FINISHES = ("stop", "length", "abort", "error", "deadline")
_CLASSES = ("high", "default", "low")
_REASONS = ("rows", "tokens", "blocks", "order", "share", "batch", "step", "sibling", "preempted", "swapped")

MOST_TENANTS = 100
"""Tenants that have a label of their own; the rest are summed as `other`."""

_COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "preemptions", "Times that a running request gave up its blocks."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that were started, those found in the cache included."),
    ("generation_tokens", "generated_tokens", "Tokens generated."),
    ("computed_tokens", "computed_tokens", "Tokens that went through the model, prompts and answers."),
    ("recomputed_tokens", "recomputed_tokens", "Tokens that went through the model again, after a preemption."),
    ("swapped_blocks", "swapped_blocks", "KV blocks copied to the host's memory."),
    ("engine_steps", "steps", "Forward passes."),
)
"""Counters as (name, key in the engine's stats, help)."""

_USED = (
    ("requests", "requests", 1.0, "Requests that ended"),
    ("prompt_tokens", "prompt_tokens", 1.0, "Prompt tokens"),
    ("prompt_tokens_cached", "cached_tokens", 1.0, "Prompt tokens found in the prefix cache"),
    ("generation_tokens", "output_tokens", 1.0, "Tokens generated"),
    ("computed_tokens", "computed_tokens", 1.0, "Tokens that went through the model"),
    ("kv_block_seconds", "block_us", 1e-6, "KV blocks held, times how long"),
    ("num_preemptions", "preemptions", 1.0, "Times that a running request gave up its blocks"),
    ("request_queue_seconds", "queued_us", 1e-6, "Time that requests which ended had waited for their first step"),
)
"""Counters by tenant and by class as (name, key in the engine's usage, unit, help)."""


def tier(priority: int) -> str:
    """The class of a priority as a label: clients choose among billions of numbers, a dashboard among three words."""
    return "high" if priority < 0 else "low" if priority else "default"


_Family = CounterMetricFamily | GaugeMetricFamily
_Usage = Mapping[Any, Mapping[str, float]]


class _Shares:
    """The engine's use by tenant or by class, as sums by label which never go down.

    What is used counts for the label that its user has at the time: a tenant may get one of its own late, or lose it.
    """

    def __init__(self, by: str, label: str, choose: Callable[[_Usage], Mapping[Any, str]]) -> None:
        self._by = by
        self._label = label
        self._choose = choose
        self._sums: dict[str, dict[str, float]] = {}
        self._before: _Usage = {}

    def families(self, common: Mapping[str, str], usage: _Usage) -> Iterator[_Family]:
        """Takes the engine's newest word on who used what; yields one family a gauge or counter."""
        labels = self._choose(usage)
        now: dict[str, dict[str, float]] = {label: {"running": 0, "waiting": 0} for label in labels.values()}
        for who, used in usage.items():
            label, before = labels[who], self._before.get(who, {})
            for key, count in now[label].items():
                now[label][key] = count + used[key]
            sums = self._sums.setdefault(label, defaultdict(float))
            for _, key, _, _ in _USED:
                # Less than before means that the engine had forgotten it, and began anew.
                grown = used[key] - before.get(key, 0)
                sums[key] += used[key] if grown < 0 else grown
        self._before = usage
        for key, help in (("running", "Requests with a place in the batch"), ("waiting", "Requests waiting for a place")):
            values = {label: counts[key] for label, counts in now.items()}
            yield _gauge(f"num_requests_{key}_by_{self._by}", f"{help}, by {self._by}.", common, values, self._label)
        for name, key, unit, help in _USED:
            values = {label: self._sums[label][key] * unit for label in now}
            yield _counter(f"{name}_by_{self._by}", f"{help}, by {self._by}.", common, values, self._label)


def _tenants(usage: _Usage) -> dict[Any, str]:
    largest = set(heapq.nlargest(MOST_TENANTS, usage, key=lambda name: usage[name]["computed_tokens"]))
    return {name: (name or "none") if name in largest else "other" for name in usage}


def _classes(usage: _Usage) -> dict[Any, str]:
    return {priority: tier(priority) for priority in usage}


class _EngineCounters(Collector):
    """Turns the engine's newest counters into samples at each scrape."""

    def __init__(self, labels: Mapping[str, str], stats: Callable[[], Mapping[str, Any]]) -> None:
        self._labels = labels
        self._stats = stats
        self._shares = {"tenants": _Shares("tenant", "tenant", _tenants), "classes": _Shares("class", "priority", _classes)}

    def collect(self) -> Iterator[_Family]:
        """Yields one family a counter; all are zero until the engine has reported."""
        stats, common = self._stats(), self._labels
        for name, value, help in (
            ("num_requests_running", stats.get("running", 0), "Requests with a place in the batch."),
            ("num_requests_waiting", stats.get("waiting", 0), "Requests waiting for a place."),
            ("num_requests_swapped", stats.get("swapped", 0), "Requests whose KV blocks wait in the host's memory."),
            ("row_usage_perc", _part(stats, "running", "rows"), "Share of the batch's places that are taken, 0 to 1."),
            ("kv_cache_usage_perc", _rest(stats, "free_blocks", "total_blocks"), "Share of KV blocks that requests hold, 0 to 1."),
            ("kv_cache_fragmentation_perc", _rest(stats, "used_tokens", "held_slots"), "Share of held KV slots without a token, 0 to 1."),
            ("swap_usage_perc", _rest(stats, "free_host_blocks", "host_blocks"), "Share of the host's KV blocks in use, 0 to 1."),
            ("predicted_wait_seconds", stats.get("predicted_wait_us", 0) / 1e6, "How long a request that came now would wait."),
            ("predicted_step_seconds", stats.get("predicted_step_us", 0) / 1e6, "How long the newest step was expected to take."),
        ):
            yield _gauge(name, help, common, {None: value})
        waiting = dict.fromkeys(_REASONS, 0)
        waiting |= {cause.removeprefix("wait_"): count for cause, count in stats.get("waiting_by_cause", {}).items()}
        yield _gauge("num_requests_waiting_by_reason", "Requests waiting for a place, by what they lack.", common, waiting, "reason")
        for name, key, help in _COUNTERS:
            yield _counter(name, help, common, {None: stats.get(key, 0)})
        kinds = {kind: stats.get(f"preemptions_{kind}", 0) for kind in ("recompute", "swap")}
        yield _counter("num_preemptions_by_kind", "Preemptions, by what becomes of the KV blocks.", common, kinds, "kind")
        rejected = {"queue_full": stats.get("rejected_queue_full", 0)}
        yield _counter("admission_rejections", "Requests turned away at the engine's door.", common, rejected, "reason")
        for key, shares in self._shares.items():
            yield from shares.families(common, stats.get(key, {}))


def _part(stats: Mapping[str, Any], some: str, all: str) -> float:
    """How much of one of the engine's numbers another is, 0 to 1."""
    whole = stats.get(all, 0)
    return stats.get(some, 0) / whole if whole else 0.0


def _rest(stats: Mapping[str, Any], some: str, all: str) -> float:
    """How much of one of the engine's numbers another leaves, 0 to 1."""
    return 1 - _part(stats, some, all) if stats.get(all) else 0.0


def _gauge(name: str, help: str, common: Mapping[str, str], values: Mapping[Any, float], label: str | None = None) -> _Family:
    return _filled(GaugeMetricFamily(f"chairlift_{name}", help, labels=[*common, *([label] if label else [])]), common, values)


def _counter(name: str, help: str, common: Mapping[str, str], values: Mapping[Any, float], label: str | None = None) -> _Family:
    return _filled(CounterMetricFamily(f"chairlift_{name}", help, labels=[*common, *([label] if label else [])]), common, values)


def _filled(family: _Family, common: Mapping[str, str], values: Mapping[Any, float]) -> _Family:
    """With one sample a label; None stands for the only one of a family without."""
    for label, value in values.items():
        family.add_metric([*common.values(), *([] if label is None else [label])], value)
    return family


class Metrics:
    """Every metric of one server; times are in seconds."""

    def __init__(self, model: str, stats: Callable[[], Mapping[str, Any]]) -> None:
        labels = {"model_name": model, "engine": "0"}
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCounters(labels, stats))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"chairlift_{name}", help, list(labels), registry=self.registry, buckets=buckets)
            return made.labels(**labels)

        def by_class(name: str, help: str, buckets: tuple[float, ...]) -> dict[str, Histogram]:
            made = Histogram(f"chairlift_{name}", help, [*labels, "priority"], registry=self.registry, buckets=buckets)
            return {each: made.labels(**labels, priority=each) for each in _CLASSES}

        self.between_tokens = histogram("inter_token_latency_seconds", "Between one request's consecutive tokens.", _ITL)
        self.queued = histogram("request_queue_time_seconds", "From the engine's door to the first step.", _LATENCY)
        self._first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT)
        self._first_token_of = by_class("time_to_first_token_by_class_seconds", "From arrival to first token, by class.", _TTFT)
        self._whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", _LATENCY)
        finished = Counter("chairlift_request_success", "Requests by how they ended.", [*labels, "finished_reason"], registry=self.registry)
        self._finished = {reason: finished.labels(**labels, finished_reason=reason) for reason in _FINISHES}

    def answered(self, seconds: float, priority: int) -> None:
        """Counts a first token that came after so many seconds to a request of that priority."""
        self._first_token.observe(seconds)
        self._first_token_of[tier(priority)].observe(seconds)

    def ended(self, reason: str, seconds: float) -> None:
        """Counts a request that ended as `stop`, `length`, `abort`, `error` or `deadline` after so many seconds."""
        self._finished[reason].inc()
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """The exposition format, for a scrape."""
        return generate_latest(self.registry)
