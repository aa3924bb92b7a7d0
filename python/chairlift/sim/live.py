"""Runs a workload on the engine in this process, with each request at its arrival time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chairlift.engine import clock
from chairlift.engine.engine_request import EngineRequest
from chairlift.errors import EngineDead, InvalidRequest, QueueFull
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.sim.compare import Variant, VariantResult, request_span, variant_result
from chairlift.sim.workload import Workload

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine
    from chairlift.engine.frames import StepOutputs

    OnStep = Callable[[Engine, StepOutputs], None]

_WARM_UP = 8
"""Prompt and output tokens of the warm-up request, which touches the memory for the first time."""


def run_live(workload: Workload, variant: Variant, on_step: OnStep = lambda engine, outputs: None) -> VariantResult:
    """Loads the model and runs the workload. Each request generates its full output length.

    Latencies count from the time at which a request was due. `on_step` gets the engine and each step's outputs. Raises what the engine
    raises.
    """
    from chairlift.engine.engine import Engine  # imports torch

    engine = Engine(variant.config)
    info = engine.info
    try:
        prompts = _prompts(workload, info.vocab_size)
        engine.add(EngineRequest.of(len(prompts), prompts[0][:_WARM_UP], SamplingParams(max_tokens=_WARM_UP, ignore_eos=True)))
        while engine.has_work:
            if engine.step() is None:
                _sleep([engine.wakes_in()])
        spans, unserved = _serve(engine, workload, prompts, on_step)
    finally:
        engine.close()
    return variant_result(variant, info.max_num_seqs, spans, unserved)


def _serve(engine: Engine, workload: Workload, prompts: list[NDArray[np.int32]], on_step: OnStep) -> tuple[list[tuple[int, ...]], int]:
    """The spans of the requests that finished, and the number of the others."""
    due, outputs, tenants = (workload.column(name).tolist() for name in ("arrival_us", "output", "tenant"))
    start, sent = clock.now(), 0
    spans: list[tuple[int, ...]] = []
    while sent < len(prompts) or engine.has_work:
        while sent < len(prompts) and due[sent] <= clock.now() - start:
            params = SamplingParams(max_tokens=outputs[sent], ignore_eos=True)
            scheduling = Scheduling(tenant=workload.tenants[tenants[sent]][0])
            with suppress(InvalidRequest, QueueFull):  # counted at the end
                engine.add(EngineRequest.of(sent, prompts[sent], params, scheduling, submitted=start + due[sent]))
            sent += 1
        report = engine.step() if engine.has_work else None
        if report is not None:
            on_step(engine, report)
            spans += [request_span(timeline) for timeline in report.ended if timeline["finish"] == "length"]
            continue
        until_due = [(due[sent] - (clock.now() - start)) / 1e6] if sent < len(prompts) else []
        _sleep([*until_due, *([engine.wakes_in()] if engine.has_work else [])])
    return spans, len(prompts) - len(spans)


def _sleep(waits: Sequence[float | None]) -> None:
    """Sleeps for the shortest of `waits`; None is unlimited. Raises EngineDead if all are unlimited."""
    seconds = [wait for wait in waits if wait is not None]
    if waits and not seconds:
        raise EngineDead("the engine has open requests but nothing to run")
    time.sleep(max(0.0, min(seconds, default=0.0)))


def _prompts(workload: Workload, vocabulary: int) -> list[NDArray[np.int32]]:
    """Random tokens. Prompt blocks with equal names have equal tokens."""
    names, at, prompts = workload.names.tolist(), 0, []
    lengths, named = workload.column("prompt").tolist(), workload.column("names").tolist()
    for index, (length, count) in enumerate(zip(lengths, named, strict=True)):
        seeds = [(1, abs(name), workload.name_block) for name in names[at : at + count]]
        unnamed = max(0, length - count * workload.name_block)
        pieces = [np.random.default_rng(seed[:2]).integers(0, vocabulary, seed[2]) for seed in (*seeds, (0, index, unnamed))]
        prompts.append(np.concatenate(pieces)[:length].astype(np.int32))
        at += count
    return prompts
