"""A machine's step times, measured: the real engine under loads of every size, or a journal that it wrote."""

from __future__ import annotations

import platform
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import Profile
from chairlift.sim.fit import Fit, fit
from chairlift.sim.steps import Load

SHORTEST, LONGEST = 8, 2048
"""Tokens of the prompts that are made up, unless the context is shorter."""

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


def calibrate(config: EngineConfig, seconds: float = 60.0, on_progress: Callable[[float], None] = lambda done: None) -> Profile:
    """Runs the engine for so many seconds under loads that grow from one request to as many as it seats, and fits what steps take.

    First with short prompts, then with prompts of all lengths; nothing else should run on the machine. `on_progress` hears which part is
    done. Raises InvalidSetting if too few steps were made, or what the engine raises.
    """
    with tempfile.TemporaryDirectory(prefix="chairlift-") as directory:
        path = Path(directory) / "steps.journal"
        _run(replace(config, journal=str(path)), seconds, on_progress)
        return from_journal(path, config.model)


def from_journal(path: str | Path, model: str) -> Profile:
    """Fits what steps take to those of a journal that 'chairlift serve --journal' wrote; raises InvalidSetting."""
    try:
        journal = Path(path).read_bytes()
        told = _core.replay(journal)["config"]
        steps = np.frombuffer(_core.step_times(journal), np.int64).reshape(-1, 6)[_FIRST_STEPS:]
    except OSError as error:
        raise InvalidSetting(f"{path}: cannot be read ({error.strerror}); name a file that --journal wrote") from None
    except ValueError as error:
        raise InvalidSetting(f"{path}: {error}") from None
    # To the next plan, for what a busy engine does between two steps delays the next; steps before a pause have no such end.
    steps = steps[steps[:, 5] > 0]
    found = fit(Load(*steps[:, :4].T), steps[:, 5].astype(float))
    return _profile(found, model, {name: told[core] for name, core in _SIZES.items()}, steps)


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
    dice, began, tag = random.Random(0), time.monotonic(), 0
    live: set[int] = set()
    most = min(LONGEST, facts["max_model_len"] // 2)
    try:
        while (done := (time.monotonic() - began) / seconds) < 1:
            on_progress(done)
            # Two sweeps from one request to all that have a seat.
            sweep, part = divmod(2 * done, 1)
            longest = most if sweep else min(most, 2 * SHORTEST)
            for _ in range(round(facts["max_num_seqs"] ** part) - len(live)):
                prompt = round(SHORTEST * (longest / SHORTEST) ** dice.random()) if longest > SHORTEST else longest
                output = max(1, min(round(8 * 16 ** dice.random()), facts["max_model_len"] - prompt))
                tokens = [dice.randrange(facts["vocab_size"]) for _ in range(prompt)]
                engine.add(tag, tokens, SamplingParams(max_tokens=output, ignore_eos=True))
                live.add(tag)
                tag += 1
            report = engine.step()
            if report is not None:
                live -= {ledger["tag"] for ledger in report.ended}
    finally:
        for one in live:
            engine.abort(one)
        engine.close()
