"""Prometheus metrics: the server's latencies, and the engine's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest

from chairlift.outputs import RequestOutput, Timing
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.server.cache_miss import CacheMiss, MissReason
from chairlift.server.keys import Reader
from chairlift.server.observability import engine_stats
from chairlift.server.observability.engine_metrics import NO_TENANT, REJECTIONS, AllEngineMetrics, merged
from chairlift.server.observability.latencies import LATENCY, AllLatencies, Buckets, Latencies
from chairlift.server.observability.session_totals import SessionTotals
from chairlift.server.observability.shadow import SHADOW_METRICS

if TYPE_CHECKING:
    from chairlift.engine.replica import Replica
    from chairlift.server.tiers import Tier

_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_ANSWERS = (1, 2, 5, 10, 20, 50, 100)
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)

_FINISHES = ("stop", "length", "abort", "error", "deadline")

DASHBOARD_LATENCIES = {
    "ttft": "time_to_first_token",
    "itl": "inter_token_latency",
    "queue": "request_queue_time",
    "e2e": "e2e_request_latency",
}
"""Latencies whose percentiles the dashboard shows, by short name."""

_VLLM = frozenset(
    [
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc", "cache_config_info"),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"),
        *("request_success", "admission_rejections", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
        *("request_params_max_tokens", "request_num_preemptions", "request_prefill_kv_computed_tokens"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        "spec_decode_num_accepted_tokens_per_pos",
    ]
)
"""Metrics that vLLM has under the same name after its prefix."""


_SHARED = frozenset({"cache_config_info", "engine_restarts", "saturation"})
"""Metrics without a tenant that a tenant may see."""
_HIDDEN = frozenset({"computed_tokens_by_tenant", *SHADOW_METRICS})
"""Metrics by tenant that only the operator may see: beside the prompt tokens, they tell which prompts others sent before."""


class Metrics:
    """All metrics of one model; times are in seconds.

    `replicas` returns the engines, whose metrics have the engine's number as their label `engine`. `alias` also exports the metrics that
    vLLM has under vLLM's names.
    """

    def __init__(
        self,
        model: str,
        replicas: Callable[[], Iterable[Replica]],
        *,
        alias: bool = False,
    ) -> None:
        labels = {"model_name": model, "engine": "0"}
        self.registry = CollectorRegistry()
        self._alias, self._labels = alias, labels
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        engines = AllEngineMetrics(labels, replicas, self._rejected)
        self.new_counters = engines.new_counters
        self.registry.register(engines)

        self._latencies = AllLatencies(labels)
        self.registry.register(self._latencies)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"chairlift_{name}", help, list(labels), registry=self.registry, buckets=buckets).labels(**labels)

        self._prefill = histogram("request_prefill_time_seconds", "From an answer's first step to its first token.", LATENCY)
        self._decode = histogram("request_decode_time_seconds", "From an answer's first token to its last.", LATENCY)
        self._inference = histogram("request_inference_time_seconds", "From an answer's first step to its last token.", LATENCY)
        self._prompt = histogram("request_prompt_tokens", "Tokens of the prompt, counted once for each answer.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._prefilled = histogram(
            "request_prefill_kv_computed_tokens", "Tokens of the prompt that were not in the prefix cache.", _TOKENS
        )
        self._preempted = histogram("request_num_preemptions", "Preemptions of an answer.", _PREEMPTIONS)
        self._longest = histogram("request_max_num_generation_tokens", "Maximum tokens that an answer may have.", _TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of requests.", _TOKENS)
        self._answers = histogram("request_params_n", "n of requests.", _ANSWERS)

        def counter(name: str, help: str, *further: str) -> Counter:
            return Counter(f"chairlift_{name}", help, [*labels, *further], registry=self.registry)

        self._targets = counter("service_tier_targets", "Answers of tiers with a target, by whether they met it.", "tier", "target", "met")
        finished = counter("request_success", "Finished requests, by reason.", "finished_reason")
        resumed = counter("requests_resumed", "Times that an engine went on with the answers of one that had ended.")
        self._resumed = resumed.labels(**labels)
        turns = "Turns that found less in the prefix cache than the turn before had left there, by reason."
        self._misses = counter("prompt_cache_misses", turns, "reason")
        self._missed = counter("prompt_cache_missed_tokens", "Tokens that these turns computed again.", "reason")
        evicted = "Tokens of sessions that were evicted between their requests, by whom the blocks were for."
        self._evicted = counter("prompt_cache_evicted_tokens", evicted, "taker")
        self.sessions = SessionTotals()
        """The totals of each session, which are no metrics, because there are too many."""
        self._finished = {reason: finished.labels(**labels, finished_reason=reason) for reason in _FINISHES}

    def observe_params(self, params: SamplingParams) -> None:
        """Records a request's parameters, before it enters the engine's queue."""
        self._answers.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
            self._longest.observe(params.max_tokens)

    def latencies(self, scheduling: Scheduling) -> Latencies:
        """Returns where to record the latencies of such a request."""
        return self._latencies.for_request(scheduling)

    def observe_answer(self, output: RequestOutput, tokens: int, latencies: Latencies) -> None:
        """Records an answer of `tokens` tokens by its last increment."""
        timing = output.timing
        if output.timeline is not None:
            for taker, evicted in output.timeline.evicted_for.items():
                self._evicted.labels(**self._labels, taker=taker).inc(evicted)
        if timing is None:
            return
        self._inference.observe(timing.total - timing.started)
        if timing.first_token is not None:
            self._prefill.observe(timing.first_token - timing.started)
            self._decode.observe(timing.total - timing.first_token)
            if tokens > 1:
                latencies.per_token.observe((timing.total - timing.first_token) / (tokens - 1))
        self.observe_lengths(len(output.prompt_token_ids), tokens)
        self._prefilled.observe(len(output.prompt_token_ids) - output.cached_tokens)
        self._preempted.observe(output.preemptions)

    def observe_lengths(self, prompt_tokens: int, tokens: int) -> None:
        """Records the lengths of an answer, which may not have ended, and of its prompt."""
        self._prompt.observe(prompt_tokens)
        self._generated.observe(tokens)

    def observe_targets(self, name: str, tier: Tier, timing: Timing | None, tokens: int) -> None:
        """Counts for an answer of the tier `name` which of the tier's targets it met."""
        if timing is None or timing.first_token is None:
            return
        figures = {"ttft": (timing.first_token, tier.ttft_ms)}
        if tokens > 1:
            figures["itl"] = (timing.total - timing.first_token) / (tokens - 1), tier.itl_ms
        for target, (seconds, most) in figures.items():
            if most is not None:
                self._targets.labels(**self._labels, tier=name, target=target, met=str(seconds * 1e3 <= most).lower()).inc()

    def count_finished(self, reason: str, seconds: float, latencies: Latencies) -> None:
        """Counts a request that ended as `stop`, `length`, `abort`, `error` or `deadline` after `seconds`."""
        self._finished[reason].inc()
        latencies.whole.observe(seconds)

    def count_resumed(self) -> None:
        """Counts a request whose answers another engine goes on with."""
        self._resumed.inc()

    def count_cache_miss(self, miss: CacheMiss, tenant: str, session: str | None) -> None:
        """Counts a turn that missed the prefix cache, for its session too if it has one."""
        labels = {**self._labels, "reason": str(miss.reason)}
        self._misses.labels(**labels).inc()
        self._missed.labels(**labels).inc(miss.missed_tokens)
        if session is not None:
            self.sessions.add_miss(tenant, session, miss)

    def cache_misses(self) -> list[dict[str, object]]:
        """Returns the turns that missed the prefix cache and the tokens they computed again, by reason, the most tokens first."""
        turns, tokens = (_by_reason(counter) for counter in (self._misses, self._missed))
        most_first = sorted(turns, key=lambda reason: -tokens[reason])
        return [{"reason": one, "turns": turns[one], "tokens": tokens[one], "what": one.what, "advice": one.advice} for one in most_first]

    def count_rejected(self, reason: str) -> None:
        """Counts a request that the server rejected, for one of `REJECTIONS`; the engine counts its own rejections."""
        self._rejected[reason] += 1

    def families(self) -> Iterator[Metric]:
        """Yields the metrics without creation times, and those that vLLM has again under its names."""
        for family in self.registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            stem = family.name.removeprefix("chairlift_")
            if self._alias and stem in _VLLM:
                yield _renamed(family, stem)

    def buckets(self, name: str, tier: str) -> Buckets:
        """Returns the cumulative bucket counts of one of `DASHBOARD_LATENCIES`, of the requests of a tier."""
        return self._latencies.buckets(DASHBOARD_LATENCIES[name], tier)

    def targets_met(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns how many answers have met (`true`) and missed (`false`) the targets of each tier, since the server's start."""
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for sample in next(iter(self._targets.collect())).samples:
            if sample.name.endswith("_total"):
                tier, target, met = (sample.labels[label] for label in ("tier", "target", "met"))
                counts.setdefault(tier, {}).setdefault(target, {"true": 0, "false": 0})[met] = int(sample.value)
        return counts


def _by_reason(counter: Counter) -> dict[MissReason, int]:
    samples = next(iter(counter.collect())).samples
    return {MissReason(sample.labels["reason"]): int(sample.value) for sample in samples if sample.name.endswith("_total")}


def collect(models: Iterable[Metrics]) -> list[Metric]:
    """Returns the metrics of all models, each once with the samples of all."""
    return merged(family for metrics in models for family in metrics.families())


def render(families: Iterable[Metric], reader: Reader = None) -> bytes:
    """Returns what `reader` may see of these metrics in the exposition format."""
    return generate_latest(_Families(families if reader is None else _of_tenant(families, reader)))


def tenants(families: Iterable[Metric]) -> set[str]:
    """Returns the tenants that have samples; "" is the anonymous one."""
    labels = {sample.labels["tenant"] for family in families for sample in family.samples if "tenant" in sample.labels}
    return {"" if label == NO_TENANT else label for label in labels}


class _Families(CollectorRegistry):
    """A registry of finished metrics."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _of_tenant(families: Iterable[Metric], tenant: str) -> Iterator[Metric]:
    """Yields what `tenant` may see: its own samples, and few without a tenant, which do not tell what others do when."""
    for family in families:
        stem = family.name.removeprefix("chairlift_").removeprefix("vllm:")
        seen = Metric(family.name, family.documentation, family.type)
        if stem == "saturation":
            seen.samples = [sample._replace(value=engine_stats.coarse(sample.value)) for sample in family.samples]
        elif stem in _SHARED:
            seen.samples = family.samples
        elif stem not in _HIDDEN:
            seen.samples = [sample for sample in family.samples if sample.labels.get("tenant") == (tenant or NO_TENANT)]
        if seen.samples:
            yield seen


def _renamed(family: Metric, stem: str) -> Metric:
    """Copies a family under vLLM's name and labels."""
    alias = Metric(f"vllm:{stem}", family.documentation, family.type)
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if (stem, name) != ("admission_rejections", "engine")}
        alias.samples.append(sample._replace(name=sample.name.replace("chairlift_", "vllm:", 1), labels=labels))
    return alias
