"""Measures step times: from a run of the engine under varying load, or from a journal."""

from __future__ import annotations

import logging
import platform
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import SIZES, Profile
from chairlift.sim.fit import fit
from chairlift.sim.replay import Recording
from chairlift.sim.steps import Load, StepTime

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

log = logging.getLogger("chairlift")

SECONDS = 60.0
"""The default duration of the measurement."""

REPEATS, MAX_REPEATS = 2, 4
"""The measurement is made this often in its duration, and repeated up to the maximum until two repeats agree."""

MAX_SPREAD = 0.15
"""The largest relative difference of the step times of repeats that agree."""

MIN_PROMPT, MAX_PROMPT = 8, 2048
"""The lengths of synthetic prompts, in tokens, within the context."""

MAX_OUTPUT = 128
"""The longest outputs beside short prompts, in tokens."""

_SHORT_SHARE = 0.4
"""The share of the duration with short prompts only."""

_DECODE_STEPS = 6
"""Steps without prefill between two long prompts. The fit needs them to separate the cost of decoding from that of prefill."""

_SKIPPED_STEPS = 4
"""Steps at the start that are not used, because they touch memory for the first time."""

DATA_TYPES = ("dtype", "quantization", "kv_cache_dtype")
"""The settings for the data types of weights and KV cache."""


def calibrate(config: EngineConfig, seconds: float = SECONDS, on_progress: Callable[[float], None] = lambda done: None) -> Profile:
    """Runs the engine for `seconds` under loads from one request to a full batch, and fits its step times.

    It does so twice, in half of the time each. If the steps of the second repeat took longer or shorter than those of the first, other
    programs ran or the machine's speed changed: up to two more repeats follow, and those that agree are used. The first part of each has
    short prompts; the second part adds prompts of all lengths, one at a time. `on_progress` gets the completed share, from 0 to 1. Raises
    InvalidSetting if there were too few steps, or what the engine raises.
    """
    from chairlift.engine.engine import Engine  # imports torch

    with tempfile.TemporaryDirectory(prefix="chairlift-") as directory:
        path = Path(directory) / "steps.journal"
        engine = Engine(replace(config, journal=str(path)))
        ends: list[int] = []
        agreeing = Repeats([], 0.0)
        try:
            while len(ends) < MAX_REPEATS and len(agreeing.used) < REPEATS:
                if len(ends) == REPEATS:
                    log.warning("the machine's speed changed during the measurement: measuring for up to %.0f s more", seconds)
                _run(engine, len(ends), seconds / REPEATS, _progress(on_progress, len(ends)))
                settings, steps = Recording(path).steps()
                ends.append(len(steps))
                parts = [_busy(part) for part in np.split(steps, ends[:-1])]
                agreeing = agreement(parts) if len(ends) >= REPEATS else agreeing
        finally:
            engine.close()
        used = np.concatenate([parts[number] for number in agreeing.used or range(len(parts))])
        profile = _fitted(used, settings, config.model)
        return replace(
            profile,
            errors={**profile.errors, "spread": round(agreeing.spread, 4)},
            measured={**profile.measured, "repeats": len(parts)},
            data_types={name: getattr(config, name) for name in DATA_TYPES},
        )


def _progress(on_progress: Callable[[float], None], repeat: int) -> Callable[[float], None]:
    """Reports the completed share of the first repeats. During further ones the bar stands still."""
    return lambda done: on_progress((repeat + done) / REPEATS) if repeat < REPEATS else None


@dataclass(frozen=True, slots=True)
class Repeats:
    """The numbers of the repeats that agree, and the relative difference between the slowest and the fastest of these.

    None are used if no two agree; the difference is then that of all.
    """

    used: list[int]
    spread: float


def agreement(parts: Sequence[NDArray[Any]]) -> Repeats:
    """The largest group of repeats whose step times differ by at most `MAX_SPREAD`: of several such groups, the fastest.

    `parts` has the steps of each repeat (see `Recording.steps`). Their loads differ, so each is compared with a fit of all. Raises
    InvalidSetting if there were too few.
    """
    if not all(map(len, parts)):
        raise InvalidSetting("too few steps were measured: run for longer")
    every = np.concatenate(parts)
    step = fit(Load(*every[:, :4].T), every[:, 5].astype(float)).step
    speeds = [_relative(step, part) for part in parts]
    order = [int(number) for number in np.argsort(speeds)]
    groups = [[other for other in order[at:] if speeds[other] <= (1 + MAX_SPREAD) * speeds[first]] for at, first in enumerate(order)]
    best = max(groups, key=len)
    if len(best) < REPEATS:
        return Repeats([], speeds[order[-1]] / speeds[order[0]] - 1)
    return Repeats(sorted(best), speeds[best[-1]] / speeds[best[0]] - 1)


def slowdown(path: str | Path, profile: Profile) -> float:
    """The total time of a journal's steps relative to the profile's prediction. Raises InvalidSetting.

    Steps that took ten times as long as predicted are ignored: the machine was suspended or busy.
    """
    return _relative(profile.step, _busy(Recording(path).steps()[1]))


def from_journal(path: str | Path, model: str = "") -> Profile:
    """Fits step times to the steps of a journal, recorded with `model`. Raises InvalidSetting."""
    config, steps = Recording(path).steps()
    return _fitted(_busy(steps), config, model)


def _busy(steps: NDArray[Any]) -> NDArray[Any]:
    """The steps with a time (see `Recording.steps`), without the first ones."""
    steps = steps[_SKIPPED_STEPS:]
    # A step lasts until the next plan, because work between two steps delays the next one. Steps before a pause have no such time.
    return steps[steps[:, 5] > 0]


def _relative(step: StepTime, steps: NDArray[Any]) -> float:
    """The total time of steps relative to the predicted one."""
    predicted, measured = step(Load(*steps[:, :4].T)), steps[:, 5]
    used = measured < 10 * predicted
    return float(measured[used].sum() / predicted[used].sum())


def _fitted(steps: NDArray[Any], config: Mapping[str, Any], model: str) -> Profile:
    result = fit(Load(*steps[:, :4].T), steps[:, 5].astype(float))
    return Profile(
        name=f"{platform.machine()} {platform.node()}".strip(),
        model=model,
        step=result.step,
        sizes={name: config[name] for name in SIZES},
        errors={"p50": round(result.error_p50, 4), "p90": round(result.error_p90, 4)},
        measured={"steps": result.steps, "outliers": result.outliers, "most_tokens": int(steps[:, :2].sum(axis=1).max())},
    )


def _run(engine: Engine, number: int, seconds: float, on_progress: Callable[[float], None]) -> None:
    from chairlift.engine.engine_request import EngineRequest
    from chairlift.sampling import SamplingParams

    info = engine.info
    generator, start = random.Random(number), time.monotonic()  # equal prompts would be found in the cache
    live: set[int] = set()
    prefilling: set[int] = set()
    tags = count(number << 32)

    def add_request(longest: int, output: int) -> None:
        tag, prompt = next(tags), round(MIN_PROMPT * (longest / MIN_PROMPT) ** generator.random())
        tokens = [generator.randrange(info.vocab_size) for _ in range(prompt)]
        engine.add(EngineRequest.of(tag, tokens, SamplingParams(max_tokens=output, ignore_eos=True)))
        live.add(tag)
        prefilling.add(tag)

    slots, longest, decode_steps = info.max_num_seqs, info.max_model_len // 2, 0
    try:
        while (done := (time.monotonic() - start) / seconds) < 1:
            on_progress(done)
            if done < _SHORT_SHARE:
                for _ in range(round(slots ** (done / _SHORT_SHARE)) - len(live)):
                    add_request(
                        min(2 * MIN_PROMPT, longest), round(MIN_PROMPT * (min(MAX_OUTPUT, longest) / MIN_PROMPT) ** generator.random())
                    )
            elif len(live) < slots and decode_steps >= _DECODE_STEPS:
                add_request(min(MAX_PROMPT, longest), longest)
            report = engine.step()
            if report is not None:
                prefilling.difference_update(np.frombuffer(report.tags, np.uint64).tolist())
                live.difference_update(timeline["tag"] for timeline in report.ended)
            decode_steps = 0 if prefilling else decode_steps + 1
    finally:
        for tag in live:
            engine.abort(tag)
    while engine.step() is not None:  # steps in progress
        pass
