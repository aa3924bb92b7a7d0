"""The workload of a simulation, really run: the engine in this process, and requests at their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import EngineDead, InvalidRequest, QueueFull
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.sim.compare import Side, Variant, ride, side
from chairlift.sim.workload import Workload

if TYPE_CHECKING:
    from chairlift.engine.loop import Engine

_WARM_UP = 8
"""Tokens of a prompt and of its answer that are run before, and not counted: memory is touched for the first time."""


def really_run(workload: Workload, variant: Variant, on_step: Callable[[Any], None] = lambda report: None) -> Side:
    """Loads the model, gives the engine each request when it is due, and has it generate as many tokens as were asked for.

    Latencies count from when a request was due; `on_step` hears each step's report. Raises what the engine raises.
    """
    from chairlift.engine.loop import Engine  # here, for it brings torch

    engine = Engine(variant.config)
    facts: dict[str, Any] = engine.facts
    try:
        prompts = _prompts(workload, facts["vocab_size"])
        engine.add(len(prompts), prompts[0][:_WARM_UP], SamplingParams(max_tokens=_WARM_UP, ignore_eos=True))
        while engine.has_work:
            if engine.step() is None:
                _sleep([engine.wakes_in()])
        rides, unserved = _served(engine, workload, prompts, on_step)
    finally:
        engine.close()
    return side(variant, facts["max_num_seqs"], rides, unserved)


def _served(
    engine: Engine, workload: Workload, prompts: list[NDArray[np.int32]], on_step: Callable[[Any], None]
) -> tuple[list[tuple[int, ...]], int]:
    """The rides of the requests, and how many there were of which none came."""
    due, outputs, tenants = (workload.column(name).tolist() for name in ("arrival_us", "output", "tenant"))
    began, sent = _now(), 0
    rides: list[tuple[int, ...]] = []
    while sent < len(prompts) or engine.has_work:
        while sent < len(prompts) and due[sent] <= _now() - began:
            params = SamplingParams(max_tokens=outputs[sent], ignore_eos=True)
            treated = Scheduling(tenant=workload.tenants[tenants[sent]][0])
            with suppress(InvalidRequest, QueueFull):  # counted at the end
                engine.add(sent, prompts[sent], params, treated, submitted=began + due[sent])
            sent += 1
        report = engine.step() if engine.has_work else None
        if report is not None:
            on_step(report)
            rides += [ride(ledger) for ledger in report.ended if ledger["finish"] == "length"]
            continue
        until_due = [(due[sent] - (_now() - began)) / 1e6] if sent < len(prompts) else []
        _sleep([*until_due, *([engine.wakes_in()] if engine.has_work else [])])
    return rides, len(prompts) - len(rides)


def _sleep(waits: Sequence[float | None]) -> None:
    """Sleeps for the shortest of some times, None being for ever; raises EngineDead where that would be all."""
    seconds = [wait for wait in waits if wait is not None]
    if waits and not seconds:
        raise EngineDead("the engine found nothing to run, with requests open")
    time.sleep(max(0.0, min(seconds, default=0.0)))


def _prompts(workload: Workload, vocabulary: int) -> list[NDArray[np.int32]]:
    """Made-up tokens, equal as far as prompts' blocks have equal names."""
    names, at, prompts = workload.names.tolist(), 0, []
    lengths, named = workload.column("prompt").tolist(), workload.column("names").tolist()
    for index, (length, count) in enumerate(zip(lengths, named, strict=True)):
        seeds = [(1, abs(name), workload.name_block) for name in names[at : at + count]]
        own = max(0, length - count * workload.name_block)
        pieces = [np.random.default_rng(seed[:2]).integers(0, vocabulary, seed[2]) for seed in (*seeds, (0, index, own))]
        prompts.append(np.concatenate(pieces)[:length].astype(np.int32))
        at += count
    return prompts


def _now() -> int:
    return time.monotonic_ns() // 1000
