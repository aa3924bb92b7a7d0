"""Prometheus metrics: the server's own timings, beside what the engine counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.server.observability.engine_metrics import REJECTIONS, EngineMetrics
from chairlift.server.observability.latencies import LATENCY, AllLatencies, Latencies

_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_ANSWERS = (1, 2, 5, 10, 20, 50, 100)
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)

_FINISHES = ("stop", "length", "abort", "error", "deadline")

_SHOWN = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "queue": "request_queue_time", "e2e": "e2e_request_latency"}
"""The latencies that a dashboard shows percentiles of, by short name."""

_VLLM = frozenset(
    [
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc", "cache_config_info"),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"),
        *("request_success", "admission_rejections", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
        *("request_params_max_tokens", "request_num_preemptions", "request_prefill_kv_computed_tokens"),
    ]
)
"""Metrics that vLLM has too, under the same name after its prefix."""


class Metrics:
    """Every metric of one server; times are in seconds.

    `stats` and `facts` give the engine's newest word, and `restarts` how many engines have ended by themselves; with `alias` the
    metrics that vLLM has are shown under its names too.
    """

    def __init__(
        self,
        model: str,
        stats: Callable[[], Mapping[str, Any]],
        facts: Callable[[], Mapping[str, Any]] = dict,
        *,
        restarts: Callable[[], int] = lambda: 0,
        alias: bool = False,
    ) -> None:
        labels = {"model_name": model, "engine": "0"}
        self.registry = CollectorRegistry()
        self._alias = alias
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        self.registry.register(EngineMetrics(labels, stats, facts, self._rejected, restarts))

        self._latencies = AllLatencies(labels)
        self.registry.register(self._latencies)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"chairlift_{name}", help, list(labels), registry=self.registry, buckets=buckets).labels(**labels)

        self._prefill = histogram("request_prefill_time_seconds", "From an answer's first step to its first token.", LATENCY)
        self._decode = histogram("request_decode_time_seconds", "From an answer's first token to its last.", LATENCY)
        self._inference = histogram("request_inference_time_seconds", "From an answer's first step to its last token.", LATENCY)
        self._prompt = histogram("request_prompt_tokens", "Tokens of the prompt, once an answer.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._prefilled = histogram("request_prefill_kv_computed_tokens", "Tokens of the prompt that were not in the cache.", _TOKENS)
        self._preempted = histogram("request_num_preemptions", "How often an answer lost its blocks.", _PREEMPTIONS)
        self._longest = histogram("request_max_num_generation_tokens", "Most tokens that an answer may have.", _TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "The max_tokens of requests.", _TOKENS)
        self._answers = histogram("request_params_n", "The n of requests.", _ANSWERS)
        finished = Counter("chairlift_request_success", "Requests by how they ended.", [*labels, "finished_reason"], registry=self.registry)
        self._finished = {reason: finished.labels(**labels, finished_reason=reason) for reason in _FINISHES}

    def asked(self, params: SamplingParams) -> None:
        """Counts what a request asks for, before it comes to the engine's queue."""
        self._answers.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
            self._longest.observe(params.max_tokens)

    def latencies(self, tenant: str, priority: int) -> Latencies:
        """Where the times of such a request are noted."""
        return self._latencies.of(tenant, priority)

    def settled(self, output: RequestOutput, tokens: int, latencies: Latencies) -> None:
        """Counts where the time of an answer went, from its last increment; it had so many tokens in all."""
        timing = output.timing
        if timing is None:
            return
        self._inference.observe(timing.total - timing.started)
        if timing.first_token is not None:
            self._prefill.observe(timing.first_token - timing.started)
            self._decode.observe(timing.total - timing.first_token)
            if tokens > 1:
                latencies.per_token.observe((timing.total - timing.first_token) / (tokens - 1))
        self._prompt.observe(len(output.prompt_token_ids))
        self._prefilled.observe(len(output.prompt_token_ids) - output.cached_tokens)
        self._generated.observe(tokens)
        self._preempted.observe(output.preemptions)

    def ended(self, reason: str, seconds: float, latencies: Latencies) -> None:
        """Counts a request that ended as `stop`, `length`, `abort`, `error` or `deadline` after so many seconds."""
        self._finished[reason].inc()
        latencies.whole.observe(seconds)

    def rejected(self, reason: str) -> None:
        """Counts a request that the server turned away, for one of `REJECTIONS`; the engine counts those that it turned away itself."""
        self._rejected[reason] += 1

    def text(self, tenant: str = "") -> bytes:
        """The exposition format, for a scrape; a `tenant` is not told of the others."""
        return generate_latest(_Shown(self.registry, self._alias, tenant))

    def buckets(self) -> dict[str, dict[float, float]]:
        """How many observations each latency of a dashboard had up to each bucket's upper bound, by short name."""
        return {short: self._latencies.buckets(stem) for short, stem in _SHOWN.items()}


class _Shown(CollectorRegistry):
    """A registry as it is shown: without the times of creation and other tenants, and, if wanted, a second time under vLLM's names."""

    def __init__(self, registry: Collector, alias: bool, tenant: str) -> None:
        super().__init__()
        self._registry = registry
        self._alias = alias
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if self._is_shown(sample)]
            yield family
            stem = family.name.removeprefix("chairlift_")
            if self._alias and stem in _VLLM:
                yield _renamed(family, stem)

    def _is_shown(self, sample: Sample) -> bool:
        foreign = self._tenant and sample.labels.get("tenant", self._tenant) != self._tenant
        return not (foreign or sample.name.endswith("_created"))


def _renamed(family: Metric, stem: str) -> Metric:
    """The same values under vLLM's name, and with its labels."""
    alias = Metric(f"vllm:{stem}", family.documentation, family.type)
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if (stem, name) != ("admission_rejections", "engine")}
        alias.samples.append(sample._replace(name=sample.name.replace("chairlift_", "vllm:", 1), labels=labels))
    return alias
