"""Ways to batch side by side: the same requests on the same seats, and how they fared under each."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.traces import TraceRequest
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.result import Result
from chairlift.sim.run import machine, run
from chairlift.sim.workload import Workload

_LEDGER = ("tag", "arrived", "started", "first_token", "ended", "output_tokens")
"""The numbers that a ride has from its ledger."""

RIDE = np.dtype([(name, "<i8") for name in (*_LEDGER, "away")])
"""A request that took a seat: its times in microseconds since the first arrival, and how long it had lost its seat in between."""

SPREAD = 16
"""How many times as long as the shortest the longest of made-up prompts and answers may be, evenly by their logarithm: of eight
answers the longest is then 2.2 times the mean, and 2.1 times in Azure's trace of conversations."""

_TITLES = {
    "static": ("Static batching: the bus", "It leaves with whoever is there. Nobody gets on until its last rider has got off."),
    "dynamic": (
        "Dynamic batching: the bus that waits to fill",
        "It leaves when it is full{timeout}. Nobody gets on until its last rider has got off.",
    ),
    "continuous": ("Continuous batching: the chairlift", "It never stops. Every chair takes the next rider as soon as it is free."),
}

_NEXT = {
    "fcfs": "who came first, if it fits",
    "priority": "who is of the most urgent class",
    "fair": "whose tenant was served least",
    "deadline": "who has the least slack",
    "shortest": "who has the least left to do",
    "vtc": "whose tenant was served least",
    "prefix": "whose prompt is cached furthest",
}
"""Who is next in line, by policy."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to batch, what it is called among those that it is compared with, and what it does in plain words."""

    name: str
    title: str
    words: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Side:
    """What came of the requests under one variant: `rides` is an array of `RIDE`, by the time at which they took a seat."""

    variant: Variant
    seats: int
    rides: NDArray[Any]
    unserved: int = 0
    """Requests that were turned away or failed: they are in no other number."""

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last end."""
        return float(self.rides["ended"].max(initial=0)) / 1e6

    @property
    def in_batches(self) -> bool:
        """Whether a seat that falls free stays so until all are."""
        return self.variant.config.batching != "continuous"

    def figures(self) -> dict[str, float]:
        """The numbers by which sides are compared: names that end in `_s` are seconds. Percentiles are nearest ranks."""
        rides, span = self.rides, self.span
        first = (rides["first_token"] - rides["arrived"]) / 1e6
        aboard = (rides["ended"] - rides["started"] - rides["away"]) / 1e6
        return {
            "served": len(rides),
            "unserved": self.unserved,
            "all_done_s": span,
            "tokens_per_s": float(rides["output_tokens"].sum()) / span,
            "seats_used": float(aboard.sum()) / (self.seats * span),
            **{f"ttft_p{percent}_s": float(np.percentile(first, percent, method="inverted_cdf")) for percent in (50, 95)},
            "wait_mean_s": float((rides["started"] - rides["arrived"]).mean()) / 1e6,
        }

    def held(self) -> NDArray[np.int64]:
        """Until when each ride's seat is kept from others, in microseconds: its end, or that of its batch.

        A batch boards when nobody is aboard, so batches are what overlaps in time.
        """
        ended = np.maximum.accumulate(self.rides["ended"])
        if not self.in_batches:
            return self.rides["ended"].astype(np.int64)
        first = np.flatnonzero(np.append(True, self.rides["started"][1:] >= ended[:-1]))
        lasts = np.append(first[1:], len(ended)) - 1
        until: NDArray[np.int64] = np.repeat(ended[lasts], np.diff(np.append(first, len(ended))))
        return until

    def seating(self) -> list[int] | None:
        """The seat of each ride: the lowest that is free; None if they are too few, as after preemptions."""
        free, until, taken = set(range(self.seats)), self.held(), dict[int, int]()
        seating = []
        for ride, end in zip(self.rides, until, strict=True):
            left = [seat for seat, ends in taken.items() if ends <= ride["started"]]
            free.update(left)
            for seat in left:
                del taken[seat]
            if not free:
                return None
            seat = min(free)
            free.remove(seat)
            taken[seat] = int(end)
            seating.append(seat)
        return seating


def variants(engine: EngineConfig, batchings: Sequence[str], policies: Sequence[str], batch: int | None, timeout: float) -> list[Variant]:
    """Every combination of ways to batch and policies, named by what sets it apart; raises InvalidSetting for what can't be.

    Static and dynamic batches are of `batch` sequences (None: of as many as there are seats); dynamic ones wait `timeout` milliseconds.
    """
    found = []
    for batching, policy in product(batchings, policies):
        apart = [batching] * (len(batchings) > 1) + [policy] * (len(policies) > 1)
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
        title, words = _TITLES[batching]
        words = words.format(timeout=f", or after {timeout / 1000:g} s")
        if set(policies) != {"fcfs"}:
            title, words = f"{title}, {policy}", f"The next rider is the one {_NEXT[policy]}."
        found.append(Variant(", ".join(apart) or batching, title, words, config))
    if len({variant.name for variant in found}) < len(found):
        raise InvalidSetting("--batching, --policy: the same is named twice; name each once")
    return found


def made_up(count: int, prompt_tokens: int, output_tokens: int, rate: float) -> list[TraceRequest]:
    """Requests at even intervals, `rate` a second, whose lengths have these means, about, and vary by a factor of `SPREAD`."""
    dice = random.Random(0)
    scale = math.log(SPREAD) / (SPREAD - 1)

    def length(mean: int) -> int:
        return max(1, round(mean * scale * math.pow(SPREAD, dice.random())))

    return [TraceRequest(index / rate, length(prompt_tokens), length(output_tokens)) for index in range(count)]


def simulated(workload: Workload, variant: Variant, model: str | None, on: str) -> Side:
    """Runs the requests in virtual time on a machine (see `sim.run.machine`); raises InvalidSetting where it can't be."""
    settings, step_time = machine(model, on, variant.config)
    return of(variant, run(workload, settings, step_time))


def of(variant: Variant, result: Result) -> Side:
    """The side of a simulation."""
    done = result.finished
    away = done["preempted"] + done["swapped"]
    rides = zip(*(done[name].tolist() for name in _LEDGER), away.tolist(), strict=True)
    return side(variant, result.config["max_seqs"], rides, len(result.requests) + len(result.refused) - len(done))


def side(variant: Variant, seats: int, rides: Iterable[tuple[int, ...]], unserved: int) -> Side:
    """A side of rides in any order, with times by any clock; raises InvalidSetting if there are none."""
    found = np.sort(np.array(list(rides), RIDE), order=["started", "tag"])
    if not len(found):
        raise InvalidSetting(
            f"{variant.name}: none of {unserved:,} requests was served: are they longer than the context, or the KV cache?"
        )
    began = found["arrived"].min()
    for name in ("arrived", "started", "first_token", "ended"):
        found[name] -= began
    return Side(variant, min(seats, variant.config.static_batch_size or seats), found, unserved)


def ride(ledger: Mapping[str, Any]) -> tuple[int, ...]:
    """The `RIDE` of a request's ledger, as the engine gives it."""
    causes = ledger["states"]
    return (*(ledger[name] for name in _LEDGER), causes.get("preempted", 0) + causes.get("swapped", 0))
