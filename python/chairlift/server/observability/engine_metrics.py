"""The engine's counters as Prometheus metrics, read at each scrape."""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from chairlift.engine.stats import COUNTERS, Stats
from chairlift.server.observability import engine_stats
from chairlift.timeline import PREEMPTION_REASONS, WAITING

if TYPE_CHECKING:
    from chairlift.engine.replica import Replica

_REASONS = tuple(state.removeprefix("wait_") for state in WAITING)
"""Label values for what a waiting request waits for."""

MAX_TENANTS = 100
"""Tenants with a label of their own; all others are summed as `other`."""

_CONFIG = {
    "block_size": "block_size",
    "num_gpu_blocks": "num_kv_blocks",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
"""Labels of `cache_config_info` (vLLM's names where it has them), each with the name of the field of `EngineInfo`."""

MAX_LABELS = 10_000
"""Tenants whose sums are kept in case they get a label again; clients can invent any number of names."""

REJECTIONS = ("queue_full", "tenant_limit", "draining", "not_ready", "invalid", "unauthorized", "too_large", "session_wait", "upstream")
"""Label values for why a request was rejected."""

_USED = (
    ("requests", "requests", 1.0, "Requests that ended"),
    ("prompt_tokens", "prompt_tokens", 1.0, "Prompt tokens"),
    ("prompt_tokens_cached", "cached_tokens", 1.0, "Prompt tokens found in the prefix cache"),
    ("generation_tokens", "output_tokens", 1.0, "Tokens generated"),
    ("computed_tokens", "computed_tokens", 1.0, "Tokens that the model computed"),
    ("compute_seconds", "compute_ns", 1e-9, "Parts of the times of steps"),
    ("energy_joules", "energy_uj", 1e-6, "Energy that the meter measured for these parts; 0 without a meter"),
    ("kv_block_seconds", "block_us", 1e-6, "KV blocks held, multiplied by the time held"),
    ("num_preemptions", "preemptions", 1.0, "Preemptions of running requests"),
    ("request_queue_seconds", "queued_us", 1e-6, "Time that finished requests waited for their first step"),
)
"""Counters by tenant and by class as (name, key in the engine's usage, unit, help)."""

_USED_BY_TENANT = (*_USED, ("held_kv_block_seconds", "held_block_us", 1e-6, "KV blocks of live sequences, multiplied by the time held"))


_PRESENT = (
    ("num_requests_running", "running", "Requests in a batch slot"),
    ("num_requests_waiting", "waiting", "Requests in the queue"),
)
"""Gauges by tenant and by class as (name, key in the engine's usage, help)."""

_PRESENT_BY_TENANT = (*_PRESENT, ("num_held_sequences", "held", "Live sequences that the engine holds"))

NO_TENANT = "none"
"""The label of requests without a tenant."""

CLASSES = ("high", "default", "low")
"""The results of `priority_class`."""


def priority_class(priority: int) -> str:
    """Returns the class of a priority as a label: clients choose among billions of priorities."""
    return "high" if priority < 0 else "low" if priority else "default"


_Family = CounterMetricFamily | GaugeMetricFamily
_Usage = Mapping[Any, Mapping[str, float]]


class _UsageByLabel:
    """Usage by tenant or by class, as sums by label that never decrease.

    Usage counts for the label that its tenant has at the time: a tenant may get a label of its own late, or lose it.
    """

    def __init__(
        self,
        by: str,
        label: str,
        select: Callable[[_Usage], Mapping[Any, str]],
        gauges: Sequence[tuple[str, str, str]] = _PRESENT,
        counters: Sequence[tuple[str, str, float, str]] = _USED,
    ) -> None:
        self._by = by
        self._label = label
        self._choose = select
        self._gauges, self._counters = gauges, counters
        self._sums: dict[str, dict[str, float]] = {}
        self._before: _Usage = {}

    def families(self, common: Mapping[str, str], usage: _Usage) -> Iterator[_Family]:
        """Adds the engine's newest usage; yields one family for each gauge and counter."""
        labels = self._choose(usage)
        now: dict[str, dict[str, float]] = {label: {key: 0 for _, key, _ in self._gauges} for label in labels.values()}
        for who, used in usage.items():
            label, before = labels[who], self._before.get(who, {})
            for key, count in now[label].items():
                now[label][key] = count + used[key]
            sums = self._sums.setdefault(label, defaultdict(float))
            for _, key, _, _ in self._counters:
                # The engine restarts the count of a tenant that it has forgotten.
                sums[key] += engine_stats.increase(before.get(key, 0), used.get(key, 0))
        self._before = usage
        if len(self._sums) > MAX_LABELS:
            self._sums = {label: sums for label, sums in self._sums.items() if label in now}
        for name, key, help in self._gauges:
            values = {label: counts[key] for label, counts in now.items()}
            yield gauge(f"{name}_by_{self._by}", f"{help}, by {self._by}.", common, values, self._label)
        for name, key, unit, help in self._counters:
            values = {label: self._sums[label][key] * unit for label in now}
            yield _counter(f"{name}_by_{self._by}", f"{help}, by {self._by}.", common, values, self._label)

    def end(self) -> None:
        """Takes the next usage for that of another engine, which counts from 0."""
        self._before = {}


def _tenants(usage: _Usage) -> dict[Any, str]:
    largest = set(heapq.nlargest(MAX_TENANTS, usage, key=lambda name: usage[name]["computed_tokens"]))
    return {name: (name or NO_TENANT) if name in largest else "other" for name in usage}


def _classes(usage: _Usage) -> dict[Any, str]:
    return {priority: priority_class(priority) for priority in usage}


class AllEngineMetrics(Collector):
    """The metrics of all engines of a model.

    `rejected` counts, by reason, the requests that never reached an engine; the first engine's metrics have them. The counters of an engine
    that is gone stay: see `new_counters`.
    """

    def __init__(self, labels: Mapping[str, str], replicas: Callable[[], Iterable[Replica]], rejected: Mapping[str, int]) -> None:
        self._labels = labels
        self._replicas = replicas
        self._engines = {0: EngineMetrics(labels, rejected)}
        self._lock = threading.Lock()  # metrics are collected in a thread of their own

    def collect(self) -> Iterator[Metric]:
        """Yields one family for each metric, with the samples of all engines."""
        with self._lock:
            present = {replica.number: replica for replica in self._replicas()}
            for number in present:
                self._engine(number)
            engines = sorted(self._engines.items())
            families = merged(family for number, engine in engines for family in engine.families(present.get(number)))
        yield from families

    @contextmanager
    def new_counters(self, replica: Replica) -> Iterator[None]:
        """Keeps what an engine has counted; in the context it counts from 0 again, or goes."""
        with self._lock:
            self._engine(replica.number).end(replica)
            yield

    def _engine(self, number: int) -> EngineMetrics:
        if number not in self._engines:
            self._engines[number] = EngineMetrics({**self._labels, "engine": str(number)}, dict.fromkeys(REJECTIONS, 0))
        return self._engines[number]


def merged(families: Iterable[Metric]) -> list[Metric]:
    """Returns the metrics, each once with the samples of all families of its name."""
    by_name: dict[str, Metric] = {}
    for family in families:
        if (first := by_name.setdefault(family.name, family)) is not family:
            first.samples += family.samples
    return list(by_name.values())


class EngineMetrics:
    """Converts one engine's newest counters to samples at each scrape.

    A restarted engine counts from 0: its counters are added to those of its predecessors. `rejected` counts, by reason, the requests that
    never reached the engine.
    """

    def __init__(self, labels: Mapping[str, str], rejected: Mapping[str, int]) -> None:
        self._labels = labels
        self._rejected = rejected
        self._stats = Stats()
        self._restarts = 0
        self._newest: dict[str, float] = {}
        self._before: dict[str, float] = defaultdict(float)
        self._usage_by_label = {
            "tenants": _UsageByLabel("tenant", "tenant", _tenants, _PRESENT_BY_TENANT, _USED_BY_TENANT),
            "classes": _UsageByLabel("class", "priority", _classes),
        }

    def families(self, replica: Replica | None) -> Iterator[_Family]:
        """Yields one family for each metric; all are zero until the engine has reported. None stands for an engine that is gone."""
        if replica is not None:
            self._restarts = replica.restarts
        stats, common = Stats() if replica is None else replica.engine.stats(), self._labels
        self._stats = stats
        for name, value, help in (
            ("num_requests_running", stats.running, "Requests in a batch slot."),
            ("num_requests_waiting", stats.waiting, "Requests in the queue."),
            ("num_requests_swapped", stats.swapped, "Preempted requests whose KV blocks are in host memory."),
            ("batch_slots_usage_perc", stats.batch_slots, "Share of the batch slots in use, 0 to 1."),
            ("kv_cache_usage_perc", stats.kv_cache, "Share of the KV blocks that requests hold, 0 to 1."),
            ("kv_cache_fragmentation_perc", stats.fragmentation, "Share of the held KV slots without a token, 0 to 1."),
            ("swap_usage_perc", stats.swap, "Share of the host's KV blocks in use, 0 to 1."),
            (
                "saturation",
                stats.saturation,
                "Work that arrived in the last 10 s over the work that could be done; above 1 the queue grows.",
            ),
            ("predicted_wait_seconds", stats.predicted_wait_us / 1e6, "Expected wait of a request that arrives now."),
            ("predicted_step_seconds", stats.predicted_step_us / 1e6, "Expected duration of the newest step."),
        ):
            yield gauge(name, help, common, {None: value})
        waiting = dict.fromkeys(_REASONS, 0)
        waiting |= {state.removeprefix("wait_"): count for state, count in stats.waiting_by_state.items()}
        yield gauge("num_requests_waiting_by_reason", "Requests in the queue, by what they wait for.", common, waiting, "reason")
        for name, key, help in COUNTERS:
            yield _counter(name, help, common, {None: self._count(key)})
        if stats.energy_uj is not None:
            joules = {key: {None: self._count(key) / 1e6} for key in ("energy_uj", "idle_energy_uj")}
            yield _counter("energy_joules", "Energy that the meter measured.", common, joules["energy_uj"])
            yield _counter("idle_energy_joules", "The part of it that no request took.", common, joules["idle_energy_uj"])
        yield _counter("engine_step_seconds", "Time of forward passes.", common, {None: self._count("step_us") / 1e6})
        name, help = "spec_decode_num_accepted_tokens_per_pos", "Proposed tokens that were accepted, by position in the draft."
        accepted = enumerate(stats.accepted_draft_tokens_by_position)
        by_position = {str(position): self._total(f"{name} {position}", count) for position, count in accepted}
        yield _counter(name, help, common, by_position, "position")
        restarts = {None: float(self._restarts)}
        yield _counter("engine_restarts", "Times that the engine died and was restarted.", common, restarts)
        kinds = {kind: self._count(f"preemptions_{kind}") for kind in ("recompute", "swap")}
        yield _counter("num_preemptions_by_kind", "Preemptions, by recompute or swap.", common, kinds, "kind")
        reasons = {reason: self._count(f"preemptions_for_{reason}") for reason in PREEMPTION_REASONS}
        yield _counter("num_preemptions_by_reason", "Preemptions, by reason.", common, reasons, "reason")
        rejected = {reason: float(self._rejected[reason]) for reason in REJECTIONS}
        rejected["queue_full"] += self._count("rejected_queue_full")
        yield _counter("admission_rejections", "Requests rejected by the server or by the engine's queue.", common, rejected, "reason")
        for key, usage_by_label in self._usage_by_label.items():
            yield from usage_by_label.families(common, getattr(stats, key))
        if replica is not None and (info := replica.engine.info).model:
            config = {label: str(getattr(info, name)) for label, name in _CONFIG.items()}
            yield gauge("cache_config_info", "Size of the KV cache and limits, as labels; always 1.", {**common, **config}, {None: 1})

    def end(self, replica: Replica) -> None:
        """Keeps the last counters of an engine."""
        for _ in self.families(replica):
            pass  # reads them
        for key, count in self._newest.items():
            self._before[key] += count
        self._newest.clear()
        for usage_by_label in self._usage_by_label.values():
            usage_by_label.end()

    def _count(self, key: str) -> float:
        """Returns one of the engine's counters, summed over all engines."""
        return self._total(key, getattr(self._stats, key))

    def _total(self, key: str, now: float) -> float:
        """Returns a counter that stands at `now` in this engine, summed over all engines."""
        self._newest[key] = now
        return self._before[key] + now


def gauge(name: str, help: str, common: Mapping[str, str], values: Mapping[Any, float], *labels: str) -> _Family:
    """Returns a gauge with a sample for each of `values`, by the values of its `labels`: one, or a tuple; None without labels."""
    return _filled(GaugeMetricFamily(f"chairlift_{name}", help, labels=[*common, *labels]), common, values)


def _counter(name: str, help: str, common: Mapping[str, str], values: Mapping[Any, float], *labels: str) -> _Family:
    return _filled(CounterMetricFamily(f"chairlift_{name}", help, labels=[*common, *labels]), common, values)


def _filled(family: _Family, common: Mapping[str, str], values: Mapping[Any, float]) -> _Family:
    for key, value in values.items():
        own = () if key is None else key if isinstance(key, tuple) else (key,)
        family.add_metric([*common.values(), *own], value)
    return family
