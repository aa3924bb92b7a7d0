"""`chairlift replay`: replays a journal and simulates it under other settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from chairlift.cli import flags, replay_settings
from chairlift.cli.replay_settings import format_value
from chairlift.engine.scheduler_settings import to_flags
from chairlift.errors import InvalidSetting
from chairlift.sim import table
from chairlift.sim.replay import Recording, Replay
from chairlift.sim.report import page
from chairlift.sim.result import Result

_EXAMPLES = """\
examples:
  chairlift serve --journal day.journal              record lengths and times, but no text and no tokens
  chairlift replay day.journal                       check that every decision is the same, and report latencies
  chairlift replay day.journal --set max_num_seqs=64 --policy fair
  chairlift replay day.journal --set max_num_seqs=16,32,64
                                                     several values: one run each
  chairlift replay day.journal --set num_kv_blocks=2k --report day.html
  chairlift replay day.journal --json | jq '.runs[0].figures.ttft_p99_s'

With --set or --policy, the recorded requests and their recorded output lengths go through the same scheduler in simulated
time, first with the recorded settings and then with the changed ones. Step times come from a model fitted to the recorded
steps, so compare simulated runs with each other. The recorded run is shown beside them. Requests come at their recorded times,
also those of clients that wait for an answer before they send the next request.

Settings for --set. They take the values of the flags of 'chairlift serve', or 'none' for no limit; --swap-space is replaced
by its size in blocks and the time to copy one block: {names}.

Exit status: 0 if every recorded decision is reproduced, 1 if not.
"""

_BASE = "as recorded"
"""The simulated run with the recorded settings, with which the changed runs are compared."""

_RECORDED = "'recorded' is the recorded run with its real times. Requests that the server refused are not in the journal."

_COMPARE = (
    "'as recorded' is a simulation with the recorded settings and the fitted step times. Its difference from 'recorded' is the error of "
    "the simulation. Compare changed runs with 'as recorded'. Requests come at their recorded times in all runs: clients that wait for an "
    "answer before they send the next request would send it at another time."
)

_FREE_COPIES = "Swapping is simulated at no cost: the journal has no copy times. Set the cost with --set swap_ns_per_block=N."


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "replay", summary, _EXAMPLES.replace("{names}", ", ".join(replay_settings.NAMES)), run)
    parser.add_argument("file", metavar="FILE", help="a journal that --journal wrote; it may be cut off by a crash")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=replay_settings.parse,
        metavar="NAME=VALUE",
        help="simulate with this setting; may be repeated, and take several values: NAME=A,B,C",
    )
    replay_settings.add_policy(parser)
    flags.add_json(parser)
    flags.add_report(parser)


def run(args: argparse.Namespace) -> int:
    """Replays a journal, simulates the requested changes, and reports both. Returns 1 if a decision differs from the recorded one."""
    pairs = [*args.set, *([args.policy] if args.policy else [])]
    changes = dict(pairs)
    if len(changes) < len(pairs):
        twice = next(name for name in changes if sum(other == name for other, _ in pairs) > 1)
        raise InvalidSetting(f"{twice} is set twice: separate its values with commas (--set {twice}=A,B)")
    recording = Recording(args.file)
    replay = recording.replay()
    runs = {"recorded": replay.result}
    if changes:
        config = replay.result.config
        # All settings are checked before the first simulation.
        variants = {name: replay_settings.apply(config, changed) for name, changed in _combinations(changes).items()}
        runs[_BASE] = recording.what_if({})
        runs |= {name: recording.what_if(settings) for name, settings in variants.items()}
    notes = [_RECORDED, _COMPARE] if changes else []
    if any(run.config["host_blocks"] and not run.config["swap_ns_per_block"] for run in runs.values()):
        notes.append(_FREE_COPIES)
    summary = [*_summary(args.file, replay), *([_changed(replay.result.config, changes)] if changes else [])]
    base = _BASE if changes else None
    if args.json:
        print(json.dumps(_document(args.file, replay, runs), indent=1))
    else:
        states = [f"{name}: {table.states(run)}" for name, run in runs.items()]
        parts = [summary, [table.text(table.cells(runs, base))], ["Mean time in each state:", *states], [table.wrapped(notes)]]
        print("\n\n".join("\n".join(lines) for lines in parts).rstrip())
    if args.report:
        page(runs, f"Replay: {Path(args.file).name}", [*summary, *notes], base).write(args.report)
    return 1 if replay.differs_at is not None or any(run.policy_failure for run in runs.values()) else 0


def _combinations(changes: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """All combinations of the changed values. Their names have the settings that differ between them."""
    varied = [name for name, values in changes.items() if len(values) > 1]
    combined = [dict(zip(changes, values, strict=True)) for values in product(*changes.values())]
    return {", ".join(f"{name}={format_value(one[name])}" for name in varied) or "changed": one for one in combined}


def _summary(file: str, replay: Replay) -> list[str]:
    result = replay.result
    lines = [f"{file}: {result.figures()['requests']:,} requests, {result.steps:,} steps in {result.span:,.3f} s"]
    if replay.truncated:
        lines.append("The file is cut off, as after a crash. It was replayed up to its last complete step.")
    if replay.differs_at is None:
        lines.append(f"Every decision is the same: hash {replay.hash}.")
    else:
        lines.append(
            f"The decisions differ from plan {replay.differs_at + 1:,} on: another version of chairlift recorded "
            "this journal. The figures are the replay's."
        )
    return lines


def _changed(config: Mapping[str, Any], changes: Mapping[str, Sequence[Any]]) -> str:
    before = to_flags(config)
    shown = {name: ", ".join(map(format_value, values)) for name, values in changes.items()}
    return "Changed: " + "; ".join(f"{name} {format_value(before[name])} → {values}" for name, values in shown.items())


def _document(file: str, replay: Replay, runs: Mapping[str, Result]) -> dict[str, object]:
    """The replay and its runs as JSON, with each run's scheduler settings and counters."""
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
