"""A machine's step times, measured: the real engine under loads of every size, or a journal that it wrote."""

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
from chairlift.sim.devices import Profile
from chairlift.sim.fit import Fit, fit
from chairlift.sim.replay import Recording
from chairlift.sim.steps import Load

SECONDS = 60.0
"""To measure for where nobody says."""

SHORTEST, LONGEST = 8, 2048
"""Tokens of the prompts that are made up, unless the context is shorter."""

ANSWER = 128
"""Tokens of the longest answers among short prompts."""

_SHORT = 0.4
"""The part of the time for short prompts."""

_REST = 6
"""Steps without a prompt, before the next long one comes: what a batch takes alone, with ever more context, is to be told apart from
what a prompt adds."""

_FIRST_STEPS = 4
"""Steps that are not timed: memory is touched for the first time."""

_SIZES = {
    "num_kv_blocks": "num_blocks",
    "block_size": "block_size",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "max_tokens",
}
"""The sizes of a profile, and what the scheduler calls them."""

KEPT = ("dtype", "quantization", "kv_cache_dtype")
"""The settings that say how weights and KV cache are kept."""


def calibrate(config: EngineConfig, seconds: float = SECONDS, on_progress: Callable[[float], None] = lambda done: None) -> Profile:
    """Runs the engine for so many seconds under loads that grow from one request to as many as it seats, and fits what steps take.

    First with short prompts, then with prompts of all lengths, one at a time; nothing else should run on the machine. `on_progress` hears
    which part is done. Raises InvalidSetting if too few steps were made, or what the engine raises.
    """
    with tempfile.TemporaryDirectory(prefix="chairlift-") as directory:
        path = Path(directory) / "steps.journal"
        _run(replace(config, journal=str(path)), seconds, on_progress)
        return replace(from_journal(path, config.model), kept={name: getattr(config, name) for name in KEPT})


def pace(path: str | Path, profile: Profile) -> float:
    """How many times as long the steps of a journal took, in all, as a profile says; raises InvalidSetting.

    Steps that took ten times as long do not count: the machine slept, or somebody else had it.
    """
    _, steps = _timed(path)
    told, took = profile.step(Load(*steps[:, :4].T)), steps[:, 5]
    kept = took < 10 * told
    return float(took[kept].sum() / told[kept].sum())


def from_journal(path: str | Path, model: str = "") -> Profile:
    """Fits what steps take to those of a journal that 'chairlift serve --journal' wrote with that model; raises InvalidSetting."""
    told, steps = _timed(path)
    found = fit(Load(*steps[:, :4].T), steps[:, 5].astype(float))
    return _profile(found, model, {name: told[core] for name, core in _SIZES.items()}, steps)


def _timed(path: str | Path) -> tuple[Mapping[str, Any], np.ndarray]:
    """What a journal says of the scheduler's settings, and its steps: their loads, and microseconds to the end and to the next plan."""
    told, steps = Recording(path).steps()
    steps = steps[_FIRST_STEPS:]
    # To the next plan, for what a busy engine does between two steps delays the next; steps before a pause have no such end.
    return told, steps[steps[:, 5] > 0]


def _profile(found: Fit, model: str, sizes: Mapping[str, int], steps: np.ndarray) -> Profile:
    return Profile(
        name=f"{platform.machine()} {platform.node()}".strip(),
        model=model,
        step=found.step,
        sizes=dict(sizes),
        errors={"p50": round(found.error_p50, 4), "p90": round(found.error_p90, 4)},
        measured={"steps": found.steps, "held_up": found.dropped, "most_tokens": int(steps[:, :2].sum(axis=1).max())},
    )


def _run(config: EngineConfig, seconds: float, on_progress: Callable[[float], None]) -> None:
    from chairlift.engine.loop import Engine  # here, for it brings torch
    from chairlift.sampling import SamplingParams

    engine = Engine(config)
    facts: Mapping[str, Any] = engine.facts
    dice, began = random.Random(0), time.monotonic()
    live: set[int] = set()
    silent: set[int] = set()  # those of whose answers nothing is there yet
    tags = count()

    def join(longest: int, answer: int) -> None:
        tag, prompt = next(tags), round(SHORTEST * (longest / SHORTEST) ** dice.random())
        tokens = [dice.randrange(facts["vocab_size"]) for _ in range(prompt)]
        engine.add(tag, tokens, SamplingParams(max_tokens=answer, ignore_eos=True))
        live.add(tag)
        silent.add(tag)

    seats, most, rested = facts["max_num_seqs"], facts["max_model_len"] // 2, 0
    try:
        while (done := (time.monotonic() - began) / seconds) < 1:
            on_progress(done)
            if done < _SHORT:
                for _ in range(round(seats ** (done / _SHORT)) - len(live)):
                    join(min(2 * SHORTEST, most), round(SHORTEST * (min(ANSWER, most) / SHORTEST) ** dice.random()))
            elif len(live) < seats and rested >= _REST:
                join(min(LONGEST, most), most)
            report = engine.step()
            if report is not None:
                silent.difference_update(np.frombuffer(report.tags, np.uint64).tolist())
                live.difference_update(ledger["tag"] for ledger in report.ended)
            rested = 0 if silent else rested + 1
    finally:
        for one in live:
            engine.abort(one)
        engine.close()
