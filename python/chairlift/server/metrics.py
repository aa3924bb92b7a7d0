"""Prometheus metrics: the server's own timings, and the engine's counters read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

# vLLM's buckets, with finer ones below: a small model answers within milliseconds.
_TTFT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
_LATENCY = (*_SHORT, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

_FINISHES = ("stop", "length", "abort", "error")


class _EngineCounters(Collector):
    """Turns the engine's newest counters into samples at each scrape."""

    def __init__(self, labels: Mapping[str, str], stats: Callable[[], Mapping[str, float]]) -> None:
        self._labels = labels
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yields one family a counter; all are zero until the engine has reported."""
        stats = self._stats()
        names, values = list(self._labels), list(self._labels.values())
        total = stats.get("total_blocks", 0)
        used = 1 - stats.get("free_blocks", 0) / total if total else 0.0
        for name, value, help in (
            ("num_requests_running", stats.get("running", 0), "Requests with a place in the batch."),
            ("num_requests_waiting", stats.get("waiting", 0), "Requests waiting for a place."),
            ("kv_cache_usage_perc", used, "Share of KV blocks that requests hold, 0 to 1."),
        ):
            gauge = GaugeMetricFamily(f"chairlift_{name}", help, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, key, help in (
            ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
            ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
            ("num_preemptions", "preemptions", "Times that a running request gave up its blocks."),
            ("prompt_tokens", "prompt_tokens", "Prompt tokens computed."),
            ("generation_tokens", "generated_tokens", "Tokens generated."),
            ("engine_steps", "steps", "Forward passes."),
        ):
            counter = CounterMetricFamily(f"chairlift_{name}", help, labels=names)
            counter.add_metric(values, stats.get(key, 0))
            yield counter


class Metrics:
    """Every metric of one server; times are in seconds."""

    def __init__(self, model: str, stats: Callable[[], Mapping[str, float]]) -> None:
        labels = {"model_name": model, "engine": "0"}
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCounters(labels, stats))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"chairlift_{name}", help, list(labels), registry=self.registry, buckets=buckets)
            return made.labels(**labels)

        self.first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT)
        self.between_tokens = histogram("inter_token_latency_seconds", "Between one request's consecutive tokens.", _ITL)
        self.whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", _LATENCY)
        self.queued = histogram("request_queue_time_seconds", "From the engine's door to the first step.", _LATENCY)
        finished = Counter("chairlift_request_success", "Requests by how they ended.", [*labels, "finished_reason"], registry=self.registry)
        self._finished = {reason: finished.labels(**labels, finished_reason=reason) for reason in _FINISHES}

    def ended(self, reason: str, seconds: float) -> None:
        """Counts a request that ended as `stop`, `length`, `abort` or `error` after so many seconds."""
        self._finished[reason].inc()
        self.whole.observe(seconds)

    def text(self) -> bytes:
        """The exposition format, for a scrape."""
        return generate_latest(self.registry)
