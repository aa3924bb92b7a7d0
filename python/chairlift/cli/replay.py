"""`chairlift replay`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from chairlift.cli import changes
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.scheduler_settings import to_flags
from chairlift.errors import InvalidSetting
from chairlift.sim import table
from chairlift.sim.replay import Recording, Replay
from chairlift.sim.report import page
from chairlift.sim.result import Result

_BASE = "as recorded"
"""The run that changes are told from."""

_RECORDED = "'recorded' is what really happened, with its own times. Requests that were refused then are not in the journal."

_COMPARE = (
    "'as recorded' is the same day simulated, with steps that take what a model fitted to the recorded ones says: what it and 'recorded' "
    "differ by, that model misses. Compare changed runs with 'as recorded'."
)

_FREE_COPIES = "Copies to host blocks are taken to cost nothing, as none were recorded: --set swap_ns_per_block=N tells what one does."


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Replays a journal, simulates it under the changes asked for, and reports both; 1 if a decision came out otherwise."""
    pairs = [*given["set"], *([given["policy"]] if given["policy"] else [])]
    asked = dict(pairs)
    if len(asked) < len(pairs):
        twice = next(name for name in asked if sum(other == name for other, _ in pairs) > 1)
        raise InvalidSetting(f"{twice} is set twice: name it once, with commas between its values (--set {twice}=A,B)")
    recording = Recording(given["file"])
    replay = recording.replay()
    runs = {"recorded": replay.result}
    if asked:
        config = replay.result.config
        # All that can be refused is refused before the first simulation.
        wanted = {name: changes.apply(config, changed) for name, changed in _combinations(asked).items()}
        runs[_BASE] = recording.what_if({})
        runs |= {name: recording.what_if(settings) for name, settings in wanted.items()}
    notes = [_RECORDED, _COMPARE] if asked else []
    if any(run.config["host_blocks"] and not run.config["swap_ns_per_block"] for run in runs.values()):
        notes.append(_FREE_COPIES)
    said = [*_verdict(given["file"], replay), *([_changed(replay.result.config, asked)] if asked else [])]
    base = _BASE if asked else None
    if given["json"]:
        print(json.dumps(_document(given["file"], replay, runs), indent=1))
    else:
        went = [f"{name}: {table.causes(run)}" for name, run in runs.items()]
        parts = [said, [table.text(table.cells(runs, base))], ["Where a request's time went, on average:", *went], [table.wrapped(notes)]]
        print("\n\n".join("\n".join(lines) for lines in parts).rstrip())
    if given["report"]:
        page(runs, f"Replay: {Path(given['file']).name}", [*said, *notes], base).write(given["report"])
    return 0 if replay.differs_at is None else 1


def _combinations(asked: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every combination of the values asked for, by a name that says what sets it apart."""
    many = [name for name, values in asked.items() if len(values) > 1]
    combined = [dict(zip(asked, values, strict=True)) for values in product(*asked.values())]
    return {", ".join(f"{name}={changes.shown(one[name])}" for name in many) or "changed": one for one in combined}


def _verdict(file: str, replay: Replay) -> list[str]:
    result = replay.result
    lines = [f"{file}: {result.figures()['requests']:,} requests, {result.steps:,} steps in {result.span:,.3f} s"]
    if replay.truncated:
        lines.append("The file is cut off, as after a crash: everything up to its last whole step was replayed.")
    if replay.differs_at is None:
        lines.append(f"Every decision came out the same: hash {replay.hash}.")
    else:
        lines.append(
            f"The decisions differ, first at plan {replay.differs_at + 1:,}: another version of chairlift recorded "
            "this. The numbers are the replay's."
        )
    return lines


def _changed(config: Mapping[str, Any], asked: Mapping[str, Sequence[Any]]) -> str:
    before = to_flags(config)
    shown = {name: ", ".join(map(changes.shown, values)) for name, values in asked.items()}
    return "Changed: " + "; ".join(f"{name} {changes.shown(before[name])} → {values}" for name, values in shown.items())


def _document(file: str, replay: Replay, runs: Mapping[str, Result]) -> dict[str, Any]:
    """The same for programs, and each run's settings and counters as the scheduler names them."""
    return {
        "file": file,
        "same": replay.differs_at is None,
        "differs_at": replay.differs_at,
        "hash": replay.hash,
        "truncated": replay.truncated,
        "calls": replay.calls,
        "step_model_us": replay.step_model,
        "runs": [{"name": name} | run.document() for name, run in runs.items()],
    }
