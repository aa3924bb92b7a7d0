"""What the engine counts, as Prometheus' families: read when scraped, and never going down."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from chairlift.server.observability import load
from chairlift.timeline import WAITING

_REASONS = tuple(state.removeprefix("wait_") for state in WAITING)
"""Why a request waits, as labels."""

MOST_TENANTS = 100
"""Tenants that have a label of their own; the rest are summed as `other`."""

_CONFIG = {
    "block_size": "block_size",
    "num_gpu_blocks": "num_kv_blocks",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
"""Labels of `cache_config_info`, which are vLLM's where it has them, each with the engine's name for the fact."""

MOST_LABELS = 10_000
"""Tenants whose sums are kept, in case that they get their label back; names can be made up without end."""

REJECTIONS = ("queue_full", "tenant_limit", "draining", "not_ready", "invalid", "unauthorized", "too_large")
"""Why a request is turned away, as labels."""

PREEMPTIONS = ("kv_blocks", "priority", "fairness", "shortest")
"""Why a running request gives up its blocks, as labels; the core's names (`_core.PREEMPTION_REASONS`)."""

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
    ("engine_steps_short_of_memory", "steps_short_of_memory", "Steps run in pieces since the device had too little memory for them."),
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


CLASSES = ("high", "default", "low")
"""What `tier` may say."""


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
                # What the engine has forgotten begins anew.
                sums[key] += load.grown(before, used, key)
        self._before = usage
        if len(self._sums) > MOST_LABELS:
            self._sums = {label: sums for label, sums in self._sums.items() if label in now}
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


class EngineMetrics(Collector):
    """Turns the engine's newest counters into samples at each scrape.

    An engine that was started again counts from 0: its counters are added to those of the one before. `rejected` counts, by reason,
    the requests that never reached the engine; `restarts` says how many engines have ended by themselves.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        stats: Callable[[], Mapping[str, Any]],
        facts: Callable[[], Mapping[str, Any]],
        rejected: Mapping[str, int],
        restarts: Callable[[], int],
    ) -> None:
        self._labels = labels
        self._stats = stats
        self._facts = facts
        self._rejected = rejected
        self._restarts = restarts
        self._newest: dict[str, float] = {}
        self._before: dict[str, float] = defaultdict(float)
        self._shares = {"tenants": _Shares("tenant", "tenant", _tenants), "classes": _Shares("class", "priority", _classes)}

    def collect(self) -> Iterator[_Family]:
        """Yields one family a counter; all are zero until the engine has reported."""
        stats, common = self._stats(), self._labels
        for name, value, help in (
            ("num_requests_running", stats.get("running", 0), "Requests with a place in the batch."),
            ("num_requests_waiting", stats.get("waiting", 0), "Requests waiting for a place."),
            ("num_requests_swapped", stats.get("swapped", 0), "Requests whose KV blocks wait in the host's memory."),
            ("row_usage_perc", load.rows(stats), "Share of the batch's places that are taken, 0 to 1."),
            ("kv_cache_usage_perc", load.kv_cache(stats), "Share of KV blocks that requests hold, 0 to 1."),
            ("kv_cache_fragmentation_perc", load.fragmentation(stats), "Share of held KV slots without a token, 0 to 1."),
            ("swap_usage_perc", load.swap(stats), "Share of the host's KV blocks in use, 0 to 1."),
            (
                "saturation",
                load.saturation(stats),
                "Work that arrived in the last 10 s over work that could be served; 1 and more when the queue grows.",
            ),
            ("predicted_wait_seconds", stats.get("predicted_wait_us", 0) / 1e6, "How long a request that came now would wait."),
            ("predicted_step_seconds", stats.get("predicted_step_us", 0) / 1e6, "How long the newest step was expected to take."),
        ):
            yield _gauge(name, help, common, {None: value})
        waiting = dict.fromkeys(_REASONS, 0)
        waiting |= {cause.removeprefix("wait_"): count for cause, count in stats.get("waiting_by_state", {}).items()}
        yield _gauge("num_requests_waiting_by_reason", "Requests waiting for a place, by what they lack.", common, waiting, "reason")
        for name, key, help in _COUNTERS:
            yield _counter(name, help, common, {None: self._count(key)})
        restarts = {None: float(self._restarts())}
        yield _counter("engine_restarts", "Times that the engine ended by itself, and another one was started.", common, restarts)
        kinds = {kind: self._count(f"preemptions_{kind}") for kind in ("recompute", "swap")}
        yield _counter("num_preemptions_by_kind", "Preemptions, by what becomes of the KV blocks.", common, kinds, "kind")
        reasons = {reason: self._count(f"preemptions_for_{reason}") for reason in PREEMPTIONS}
        yield _counter("num_preemptions_by_reason", "Preemptions, by why they were made.", common, reasons, "reason")
        rejected = {reason: float(self._rejected[reason]) for reason in REJECTIONS}
        rejected["queue_full"] += self._count("rejected_queue_full")
        yield _counter("admission_rejections", "Requests turned away, by the server or at the engine's queue.", common, rejected, "reason")
        for key, shares in self._shares.items():
            yield from shares.families(common, stats.get(key, {}))
        if facts := self._facts():
            config = {label: str(facts.get(fact, "")) for label, fact in _CONFIG.items()}
            yield _gauge("cache_config_info", "The KV cache and the limits, as labels; always 1.", {**common, **config}, {None: 1})

    def _count(self, key: str) -> float:
        """One of the engine's counters, with those of the engines before it."""
        now: float = self._stats().get(key, 0)
        newest = self._newest.get(key, 0)
        if now < newest:
            self._before[key] += newest
        self._newest[key] = now
        return self._before[key] + now


def _gauge(name: str, help: str, common: Mapping[str, str], values: Mapping[Any, float], label: str | None = None) -> _Family:
    return _filled(GaugeMetricFamily(f"chairlift_{name}", help, labels=[*common, *([label] if label else [])]), common, values)


def _counter(name: str, help: str, common: Mapping[str, str], values: Mapping[Any, float], label: str | None = None) -> _Family:
    return _filled(CounterMetricFamily(f"chairlift_{name}", help, labels=[*common, *([label] if label else [])]), common, values)


def _filled(family: _Family, common: Mapping[str, str], values: Mapping[Any, float]) -> _Family:
    """With one sample a label; None stands for the only one of a family without."""
    for label, value in values.items():
        family.add_metric([*common.values(), *([] if label is None else [label])], value)
    return family
