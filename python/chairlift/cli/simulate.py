"""`chairlift simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.bench.traces import read
from chairlift.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from chairlift.sim.report import page
from chairlift.sim.result import Result
from chairlift.sim.run import machine, ready
from chairlift.sim.run import run as simulated
from chairlift.sim.workload import Workload

_ROWS = (
    ("requests", "requests", "count"),
    ("finished", "finished", "count"),
    ("missed their deadline", "missed_deadline", "rare"),
    ("refused", "refused", "rare"),
    ("requests a second", "requests_per_s", "rate"),
    ("output tokens a second", "tokens_per_s", "rate"),
    ("prompt tokens a second", "prompt_tokens_per_s", "rate"),
    ("time to first token, p50", "ttft_p50_s", "time"),
    ("                     p90", "ttft_p90_s", "time"),
    ("                     p99", "ttft_p99_s", "time"),
    ("time between tokens, p50", "itl_p50_s", "time"),
    ("                     p90", "itl_p90_s", "time"),
    ("                     p99", "itl_p99_s", "time"),
    ("time per output token, p50", "time_per_output_token_p50_s", "time"),
    ("                       p99", "time_per_output_token_p99_s", "time"),
    ("time in queue, p50", "queue_p50_s", "time"),
    ("               p99", "queue_p99_s", "time"),
    ("arrival to end, p50", "end_to_end_p50_s", "time"),
    ("                p99", "end_to_end_p99_s", "time"),
    ("running at a time, mean", "batch_mean", "rate"),
    ("KV cache held, most seen", "kv_used_max", "share"),
    ("prompt tokens found in cache", "prefix_hit_share", "share"),
    ("preemptions, computed again", "preemptions_recompute", "rare"),
    ("             swapped", "preemptions_swap", "rare"),
    ("steps", "steps", "count"),
)
"""The table: label, figure, and how it is written; rare ones are left out where they are 0."""


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Simulates a trace and says how its requests would have fared."""
    workload = ready(Workload.of(read(given["trace"]), engine.tenant_weights), given["rate_scale"], given["num_requests"])
    settings, step_time = machine(given["model"], given["machine"], engine)
    result = simulated(workload, settings, step_time, replicas=given["replicas"], routing=given["routing"])
    if given["json"]:
        print(json.dumps(document(result) | {"step_time": step_time.document()}, indent=1))
    else:
        print(table(result))
    if given["report"]:
        page({Path(given["trace"]).name: result}, f"Simulation: {given['model'] or DEFAULT_MODEL} on {given['machine']}").write(
            given["report"]
        )
    return 0


def table(result: Result) -> str:
    """The figures in words, one a line."""
    figures = result.figures()
    rows = [(label, _cell(figures[key], kind)) for label, key, kind in _ROWS if kind != "rare" or figures[key]]
    left, right = (max(map(len, column)) for column in zip(*rows, strict=True))
    causes = sorted(result.causes().items(), key=lambda one: -one[1])
    return "\n".join(
        [
            *(f"{label.ljust(left)}  {cell.rjust(right)}" for label, cell in rows),
            "",
            "Where a request's time went, on average: " + ", ".join(f"{name} {_cell(mean, 'time')}" for name, mean in causes[:5]),
            f"{result.span:,.0f} s simulated in {result.wall:.2f} s ({result.span / result.wall:,.0f} times real time), "
            f"{result.decisions / result.wall / 1e6:.1f} million decisions a second.",
        ]
    )


def document(result: Result) -> dict[str, Any]:
    """The same for programs, with the settings, and the machine over time."""
    timeline = {str(name): result.timeline[name].tolist() for name in result.timeline.dtype.names or ()}
    return {
        "config": result.config,
        "figures": result.figures(),
        "causes_mean_s": result.causes(),
        "stats": result.stats,
        "timeline": timeline,
        "replicas": [{"requests": len(one.requests), "tokens": one.stats["generated_tokens"]} for one in result.replicas],
        "wall_s": result.wall,
        "decisions": result.decisions,
    }


def _cell(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    if kind == "time":
        return f"{value:,.2f} s" if value >= 1 else f"{value * 1000:,.2f} ms"
    return {"share": f"{value:.1%}", "rate": f"{value:,.1f}"}.get(kind, f"{value:,}")
