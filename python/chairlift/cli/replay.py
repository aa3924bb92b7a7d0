"""`chairlift replay`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from chairlift.cli import changes
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.replay import Recording, Replay, Run

_ROWS = (
    ("requests", "requests", "count"),
    ("finished", "finished", "count"),
    ("missed their deadline", "missed_deadline", "count"),
    ("refused", "refused", "count"),
    ("given up by their callers", "aborted", "rare"),
    ("failed", "failed", "rare"),
    ("unfinished at the end", "unfinished", "rare"),
    ("time to first token, p50", "ttft_p50_s", "time"),
    ("                     p90", "ttft_p90_s", "time"),
    ("                     p99", "ttft_p99_s", "time"),
    ("time in queue, p50", "queue_p50_s", "time"),
    ("               p99", "queue_p99_s", "time"),
    ("time per output token, p50", "time_per_output_token_p50_s", "time"),
    ("                       p99", "time_per_output_token_p99_s", "time"),
    ("arrival to end, p50", "end_to_end_p50_s", "time"),
    ("                p99", "end_to_end_p99_s", "time"),
    ("preemptions, computed again", "preemptions_recompute", "count"),
    ("             swapped", "preemptions_swap", "count"),
    ("tokens computed again", "recomputed_tokens", "count"),
    ("prompt tokens found in cache", "prefix_hit_share", "share"),
    ("steps", "steps", "count"),
    ("output tokens a second", "tokens_per_s", "rate"),
)
"""The table: label, figure, and how it is written; rare ones are left out where all are 0."""

_COMPARE = (
    "Compare the changed run with 'as recorded': both are simulated. What 'recorded' and 'as recorded' differ by, the model of\n"
    "step times misses. Requests that were refused when this was recorded are not in the journal."
)

_FREE_COPIES = "Copies to host blocks are taken to cost nothing, as none were recorded: --set swap_ns_per_block=N tells what one does."


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Replays a journal, simulates it under the changes asked for, and reports both; 1 if a decision came out otherwise."""
    asked = dict([*given["set"], *([given["policy"]] if given["policy"] else [])])
    if given["plot"]:
        from chairlift.cli import plot
    recording = Recording(given["file"])
    replay = recording.replay()
    runs = {"recorded": replay.run}
    if asked:
        config = replay.run.config
        # All that can be refused is refused before the first simulation.
        wanted = {name: changes.apply(config, changed) for name, changed in _combinations(asked).items()}
        runs["as recorded"] = recording.what_if({})
        runs |= {name: recording.what_if(settings) for name, settings in wanted.items()}
    if given["json"]:
        print(json.dumps(_document(given["file"], replay, runs), indent=1))
    else:
        print(_verdict(given["file"], replay))
        if asked:
            print(_changed(replay.run.config, asked))
        print()
        print(table(runs))
        if asked:
            print("\n" + _COMPARE)
        if any(run.config["host_blocks"] and not run.config["swap_ns_per_block"] for run in runs.values()):
            print(_FREE_COPIES)
    if given["plot"]:
        plot.write(given["plot"], runs)
        if not given["json"]:
            print(f"\nPlots: {given['plot']}")
    return 0 if replay.differs_at is None else 1


def _combinations(asked: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every combination of the values asked for, by a name that says what sets it apart."""
    many = [name for name, values in asked.items() if len(values) > 1]
    combined = [dict(zip(asked, values, strict=True)) for values in product(*asked.values())]
    return {", ".join(f"{name}={changes.shown(one[name])}" for name in many) or "changed": one for one in combined}


def _verdict(file: str, replay: Replay) -> str:
    run = replay.run
    lines = [f"{file}: {run.figures()['requests']:,} requests, {run.stats['steps']:,} steps in {run.span:,.3f} s"]
    if replay.truncated:
        lines.append("The last record is cut off, as after a crash: everything before it was replayed.")
    if replay.differs_at is None:
        lines.append(f"Every decision came out the same: hash {replay.hash}.")
    else:
        lines.append(
            f"The decisions differ, first at plan {replay.differs_at + 1:,}: another version of chairlift recorded this, or the file "
            "was changed.\nThe numbers below are the replay's."
        )
    return "\n".join(lines)


def _changed(config: Mapping[str, Any], asked: Mapping[str, Sequence[Any]]) -> str:
    before = changes.recorded(config)
    shown = {name: ", ".join(map(changes.shown, values)) for name, values in asked.items()}
    return "Changed: " + "; ".join(f"{name} {changes.shown(before[name])} → {values}" for name, values in shown.items())


def table(runs: Mapping[str, Run]) -> str:
    """The runs side by side, each after the second followed by its change from the second: that is the one as recorded."""
    figures = [run.figures() for run in runs.values()]
    lines = [["", *(cell for index, name in enumerate(runs) for cell in ([name, "change"] if index > 1 else [name]))]]
    for label, key, kind in _ROWS:
        values = [one[key] for one in figures]
        if kind == "rare" and not any(values):
            continue
        line = [label]
        for index, value in enumerate(values):
            line.append(_cell(value, kind, max(other or 0 for other in values)))
            if index > 1:
                line.append(_change(values[1], value, kind))
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def _cell(value: float | None, kind: str, most: float) -> str:
    """A value, in the unit that suits the greatest of its row."""
    if value is None:
        return "-"
    if kind == "time":
        return f"{value:,.2f} s" if most >= 1 else f"{value * 1000:,.2f} ms"
    return {"share": f"{value:.1%}", "rate": f"{value:,.1f}"}.get(kind, f"{value:,}")


def _change(before: float | None, after: float | None, kind: str) -> str:
    if before is None or after is None:
        return "-"
    if kind == "share":
        return f"{(after - before) * 100:+.1f} pp"
    if before == after:
        return "="
    return f"{after / before - 1:+.1%}" if before else "from 0"


def _document(file: str, replay: Replay, runs: Mapping[str, Run]) -> dict[str, Any]:
    """The same for programs, and each run's settings and counters as the scheduler names them."""
    return {
        "file": file,
        "same": replay.differs_at is None,
        "differs_at": replay.differs_at,
        "hash": replay.hash,
        "truncated": replay.truncated,
        "calls": replay.calls,
        "step_model_us": replay.step_model,
        "runs": [
            {"name": name, "figures": run.figures(), "causes_mean_s": run.causes(), "config": run.config, "stats": run.stats}
            for name, run in runs.items()
        ],
    }
