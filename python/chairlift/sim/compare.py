"""Compares batching modes and scheduling policies: the same requests on the same batch slots, under each variant."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.traces import TraceRequest
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import Device, Profile
from chairlift.sim.policy import HELP
from chairlift.sim.result import Result
from chairlift.sim.run import machine, run
from chairlift.sim.workload import Workload

_TIMELINE = ("tag", "arrived", "started", "first_token", "ended", "output_tokens")
"""The fields of a request span that come from its timeline."""

REQUEST_SPAN = np.dtype([(name, "<i8") for name in (*_TIMELINE, "preempted")])
"""A request that got a batch slot: its times in microseconds since the first arrival, and how long it was preempted."""

LENGTH_RATIO = 16
"""The longest synthetic prompt or output relative to the shortest. Lengths are uniform on a log scale. The longest of eight outputs
is then 2.2 times the mean; in Azure's conversation trace it is 2.1 times."""

_TITLES = {
    "static": ("Static batching", "A batch starts with the requests that are waiting. None joins until the whole batch has finished."),
    "dynamic": (
        "Dynamic batching",
        "A batch starts when it is full{timeout}. None joins until the whole batch has finished.",
    ),
    "continuous": ("Continuous batching", "A waiting request joins at the next step, as soon as a batch slot is free."),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A batching mode and policy, with a short name, a title and a description."""

    name: str
    title: str
    description: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class VariantResult:
    """The result of one variant. `spans` is an array of `REQUEST_SPAN`, ordered by the time at which they started."""

    variant: Variant
    slots: int
    spans: NDArray[Any]
    unserved: int = 0
    """Requests that were rejected or failed. No other figure includes them."""
    refused_for: Mapping[str, int] = field(default_factory=dict)
    """Number of requests that the simulator refused, by reason."""
    policy_failure: str | None = None
    """What the policy raised, if it is one in Python and failed: see `Result`."""

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last end."""
        return float(self.spans["ended"].max(initial=0)) / 1e6

    @property
    def in_batches(self) -> bool:
        """Whether a free slot stays empty until the whole batch has finished."""
        return self.variant.config.batching != "continuous"

    def figures(self) -> dict[str, float]:
        """The figures to compare. Names that end in `_s` are seconds. Percentiles are nearest ranks."""
        spans, duration = self.spans, self.duration
        ttft = (spans["first_token"] - spans["arrived"]) / 1e6
        running = (spans["ended"] - spans["started"] - spans["preempted"]) / 1e6
        return {
            "served": len(spans),
            "unserved": self.unserved,
            "duration_s": duration,
            "tokens_per_s": float(spans["output_tokens"].sum()) / duration,
            "slot_utilisation": float(running.sum()) / (self.slots * duration),
            **{f"ttft_p{percent}_s": float(np.percentile(ttft, percent, method="inverted_cdf")) for percent in (50, 95)},
            "wait_mean_s": float((spans["started"] - spans["arrived"]).mean()) / 1e6,
        }

    def slot_free_at(self) -> NDArray[np.int64]:
        """For each span, the microsecond at which its slot can be used again: its own end, or the end of its batch.

        A batch starts only when all slots are free, so spans that overlap in time are one batch.
        """
        ended = np.maximum.accumulate(self.spans["ended"])
        if not self.in_batches:
            return self.spans["ended"].astype(np.int64)
        first = np.flatnonzero(np.append(True, self.spans["started"][1:] >= ended[:-1]))
        last = np.append(first[1:], len(ended)) - 1
        free_at: NDArray[np.int64] = np.repeat(ended[last], np.diff(np.append(first, len(ended))))
        return free_at

    def assign_slots(self) -> list[int] | None:
        """The slot of each span: the lowest free one. None if there are too few, which preemptions can cause."""
        free, free_at, busy = set(range(self.slots)), self.slot_free_at(), dict[int, int]()
        assigned = []
        for span, end in zip(self.spans, free_at, strict=True):
            released = [slot for slot, ends in busy.items() if ends <= span["started"]]
            free.update(released)
            for slot in released:
                del busy[slot]
            if not free:
                return None
            slot = min(free)
            free.remove(slot)
            busy[slot] = int(end)
            assigned.append(slot)
        return assigned


def variants(engine: EngineConfig, batchings: Sequence[str], policies: Sequence[str], batch: int | None, timeout: float) -> list[Variant]:
    """All combinations of batching modes and policies. Raises InvalidSetting for an impossible one.

    Static and dynamic batches have `batch` sequences (None: one for each slot). Dynamic batches wait up to `timeout` milliseconds.
    """
    result = []
    for batching, policy in product(batchings, policies):
        name = [batching] * (len(batchings) > 1) + [policy] * (len(policies) > 1)
        try:
            config = replace(
                engine,
                batching=batching,
                scheduling_policy=policy,
                static_batch_size=None if batching == "continuous" else batch,
                batch_timeout_ms=timeout if batching == "dynamic" else None,
            )
        except ValueError as error:
            raise InvalidSetting(str(error)) from None
        title, description = _TITLES[batching]
        description = description.format(timeout=f", or after {timeout / 1000:g} s")
        if set(policies) != {"fcfs"}:
            title, description = f"{title}, {policy}", f"Goes first: {HELP[policy]}."
        result.append(Variant(", ".join(name) or batching, title, description, config))
    if len({variant.name for variant in result}) < len(result):
        raise InvalidSetting("--batching, --policy: a name is given twice")
    return result


def synthetic_requests(count: int, prompt_tokens: int, output_tokens: int, rate: float) -> list[TraceRequest]:
    """Requests at even intervals, `rate` a second, with about these mean lengths, which vary by a factor of `LENGTH_RATIO`."""
    generator = random.Random(0)
    scale = math.log(LENGTH_RATIO) / (LENGTH_RATIO - 1)

    def length(mean: int) -> int:
        return max(1, round(mean * scale * math.pow(LENGTH_RATIO, generator.random())))

    return [TraceRequest(index / rate, length(prompt_tokens), length(output_tokens)) for index in range(count)]


def simulate_variant(workload: Workload, variant: Variant, model: str | None, on: str | Device | Profile) -> VariantResult:
    """Simulates a variant on a modelled device (see `sim.run.machine`). Raises InvalidSetting if it cannot be simulated."""
    settings, step_time = machine(model, on, variant.config)
    return from_simulation(variant, run(workload, settings, step_time))


def from_simulation(variant: Variant, result: Result) -> VariantResult:
    """The variant's result from that of its simulation."""
    done = result.finished
    preempted = done["preempted"] + done["swapped"]
    spans = zip(*(done[name].tolist() for name in _TIMELINE), preempted.tolist(), strict=True)
    unserved = len(result.requests) + len(result.refused) - len(done)
    made = variant_result(variant, result.config["max_num_seqs"], spans, unserved)
    return replace(made, refused_for=result.refused_for, policy_failure=result.policy_failure)


def variant_result(variant: Variant, slots: int, spans: Iterable[tuple[int, ...]], unserved: int) -> VariantResult:
    """A result from spans in any order, with times of any clock. Raises InvalidSetting if there are none."""
    ordered = np.sort(np.array(list(spans), REQUEST_SPAN), order=["started", "tag"])
    if not len(ordered):
        raise InvalidSetting(f"{variant.name}: none of {unserved:,} requests was served. They may exceed the context or the KV cache")
    start = ordered["arrived"].min()
    for name in ("arrived", "started", "first_token", "ended"):
        ordered[name] -= start
    return VariantResult(variant, min(slots, variant.config.static_batch_size or slots), ordered, unserved)


def request_span(timeline: Mapping[str, Any]) -> tuple[int, ...]:
    """The `REQUEST_SPAN` of a finished request's timeline, as the engine reports it."""
    states = timeline["states"]
    return (*(timeline[name] for name in _TIMELINE), states.get("preempted", 0) + states.get("swapped", 0))
