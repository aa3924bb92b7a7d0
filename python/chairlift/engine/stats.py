"""The counters and gauges of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _counter(metric: str, help: str) -> Any:
    """A counter since the engine's start that /metrics has under the name `metric`."""
    return field(default=0, metadata={"metric": metric, "help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The counters and gauges of an engine, or of several that serve one model. An engine that has not reported has the defaults.

    See docs/scheduling/reference.md for the meanings. `tenants` and `classes` have the usage of each tenant and each priority by name.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    slots: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    used_tokens: int = 0
    held_kv_slots: int = 0
    host_blocks: int = 0
    free_host_blocks: int = 0
    state_slots: int = 0
    saved_states: int = 0
    queued_prompt_tokens: int = 0
    saturation: float = 0.0
    """Work that arrived in the last ten seconds over the work that could be done: above 1 the queue grows."""
    stall: str | None = None
    predicted_wait_us: int = 0
    predicted_turn_us: int = 0
    """Expected wait of a session that is not active for its turn."""
    predicted_prefill_us: int = 0
    predicted_step_us: int = 0
    waiting_by_state: Mapping[str, int] = field(default_factory=dict)
    prefix_queries: int = _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    prefix_hits: int = _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
    lost_hit_tokens: int = _counter(
        "prefix_cache_lost_hits", "Prompt tokens whose KV was cached, but computed again because no recurrent state was saved after them."
    )
    disk_blocks_read: int = _counter("prefix_cache_disk_reads", "KV blocks read from --prefix-cache-dir.")
    disk_blocks_written: int = _counter("prefix_cache_disk_writes", "KV blocks written to --prefix-cache-dir.")
    disk_blocks_evicted: int = _counter("prefix_cache_disk_evictions", "KV blocks deleted from --prefix-cache-dir because of its limit.")
    preemptions: int = _counter("num_preemptions", "Preemptions of running requests.")
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    preemptions_for_kv_blocks: int = 0
    preemptions_for_priority: int = 0
    preemptions_for_fairness: int = 0
    preemptions_for_shortest: int = 0
    prompt_tokens: int = _counter("prompt_tokens", "Prompt tokens of requests that were started, including cached ones.")
    generated_tokens: int = _counter("generation_tokens", "Tokens generated.")
    computed_tokens: int = _counter("computed_tokens", "Tokens that the model computed, of prompts and answers.")
    computed_prompt_tokens: int = 0
    recomputed_tokens: int = _counter("recomputed_tokens", "Tokens that the model computed again after a preemption.")
    swapped_blocks: int = _counter("swapped_blocks", "KV blocks copied to host memory.")
    drafts: int = _counter("spec_decode_num_drafts", "Drafts verified: one for each sequence and step with proposed tokens.")
    draft_tokens: int = _counter("spec_decode_num_draft_tokens", "Proposed tokens that the model computed.")
    accepted_draft_tokens: int = _counter("spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.")
    accepted_draft_tokens_by_position: Sequence[int] = field(default_factory=list)
    steps: int = _counter("engine_steps", "Forward passes.")
    steps_short_of_memory: int = _counter("engine_steps_short_of_memory", "Steps that were split because the device had too little memory.")
    step_us: int = 0
    expired: int = 0
    rejected_queue_full: int = 0
    energy_uj: int | None = None
    """This and `idle_energy_uj` are None without a meter."""
    idle_energy_uj: int | None = None
    tenants: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    classes: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def batch_slots(self) -> float:
        """Share of the batch slots in use."""
        return _share(self.running, self.slots)

    @property
    def kv_cache(self) -> float:
        """Share of the KV blocks that requests hold."""
        return _share(self.total_blocks - self.free_blocks, self.total_blocks)

    @property
    def fragmentation(self) -> float:
        """Share of the held KV slots without a token."""
        return _share(self.held_kv_slots - self.used_tokens, self.held_kv_slots)

    @property
    def swap(self) -> float:
        """Share of the host's KV blocks in use."""
        return _share(self.host_blocks - self.free_host_blocks, self.host_blocks)

    @classmethod
    def merged(cls, reports: Sequence[Stats]) -> Stats:
        """The stats of several engines as those of one. Engines that have not reported do not count.

        Counters and gauges are summed. The saturation is the mean; of predictions, the shortest waits and the longest step count.
        """
        reported = [one for one in reports if one.slots]
        if len(reported) <= 1:
            return reported[0] if reported else cls()
        merged = _summed([{item.name: getattr(one, item.name) for item in fields(cls)} for one in reported])
        merged["saturation"] /= len(reported)
        merged["predicted_wait_us"] = min(one.predicted_wait_us for one in reported)
        merged["predicted_turn_us"] = min(one.predicted_turn_us for one in reported)
        merged["predicted_step_us"] = max(one.predicted_step_us for one in reported)
        return cls(**merged)

    def pack(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    def counters(self) -> dict[str, Any]:
        """The fields as plain data, without `tenants` and `classes`."""
        return {name: value for name, value in self.pack().items() if name not in ("tenants", "classes")}


COUNTERS = tuple((item.metadata["metric"], item.name, item.metadata["help"]) for item in fields(Stats) if item.metadata)
"""The counters that /metrics has under a name of their own: name, field, help."""


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _summed(reports: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Adds numbers, lists by position and dicts by key. Of anything else, the first that is not None."""
    merged: dict[Any, Any] = {}
    for report in reports:
        for name, value in report.items():
            known = merged.get(name)
            if known is None or isinstance(value, str):
                merged[name] = value if known is None else known
            elif isinstance(value, Mapping):
                merged[name] = _summed([known, value])
            elif isinstance(value, Sequence):
                longest = max(len(known), len(value))
                merged[name] = [sum(one[at] for one in (known, value) if at < len(one)) for at in range(longest)]
            elif value is not None:
                merged[name] = known + value
    return merged
