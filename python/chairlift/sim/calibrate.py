"""Measures step times: from a run of the engine under varying load, or from a journal."""

from __future__ import annotations

import platform
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.config import EngineConfig
from chairlift.sim.devices import SIZES, Profile
from chairlift.sim.fit import Fit, fit
from chairlift.sim.replay import Recording
from chairlift.sim.steps import Load

SECONDS = 60.0
"""The default duration of the measurement."""

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

    The first part has short prompts; the second part adds prompts of all lengths, one at a time. Nothing else should run on the machine.
    `on_progress` gets the completed share, from 0 to 1. Raises InvalidSetting if there were too few steps, or what the engine raises.
    """
    with tempfile.TemporaryDirectory(prefix="chairlift-") as directory:
        path = Path(directory) / "steps.journal"
        _run(replace(config, journal=str(path)), seconds, on_progress)
        return replace(from_journal(path, config.model), data_types={name: getattr(config, name) for name in DATA_TYPES})


def slowdown(path: str | Path, profile: Profile) -> float:
    """The total time of a journal's steps relative to the profile's prediction. Raises InvalidSetting.

    Steps that took ten times as long as predicted are ignored: the machine was suspended or busy.
    """
    _, steps = _busy_steps(path)
    predicted, measured = profile.step(Load(*steps[:, :4].T)), steps[:, 5]
    used = measured < 10 * predicted
    return float(measured[used].sum() / predicted[used].sum())


def from_journal(path: str | Path, model: str = "") -> Profile:
    """Fits step times to the steps of a journal, recorded with `model`. Raises InvalidSetting."""
    config, steps = _busy_steps(path)
    result = fit(Load(*steps[:, :4].T), steps[:, 5].astype(float))
    return _profile(result, model, {name: config[name] for name in SIZES}, steps)


def _busy_steps(path: str | Path) -> tuple[Mapping[str, Any], np.ndarray]:
    """The scheduler's settings in a journal, and its steps with their loads and times (see `Recording.steps`)."""
    config, steps = Recording(path).steps()
    steps = steps[_SKIPPED_STEPS:]
    # A step lasts until the next plan, because work between two steps delays the next one. Steps before a pause have no such time.
    return config, steps[steps[:, 5] > 0]


def _profile(result: Fit, model: str, sizes: Mapping[str, int], steps: np.ndarray) -> Profile:
    return Profile(
        name=f"{platform.machine()} {platform.node()}".strip(),
        model=model,
        step=result.step,
        sizes=dict(sizes),
        errors={"p50": round(result.error_p50, 4), "p90": round(result.error_p90, 4)},
        measured={"steps": result.steps, "outliers": result.outliers, "most_tokens": int(steps[:, :2].sum(axis=1).max())},
    )


def _run(config: EngineConfig, seconds: float, on_progress: Callable[[float], None]) -> None:
    from chairlift.engine.engine import Engine  # imports torch
    from chairlift.engine.engine_request import EngineRequest
    from chairlift.sampling import SamplingParams

    engine = Engine(config)
    info = engine.info
    generator, start = random.Random(0), time.monotonic()
    live: set[int] = set()
    prefilling: set[int] = set()
    tags = count()

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
        engine.close()
