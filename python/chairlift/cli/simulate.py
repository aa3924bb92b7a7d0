"""`chairlift simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.bench.traces import read
from chairlift.config import EngineConfig, ServerConfig
from chairlift.sim import table
from chairlift.sim.devices import Profile, device
from chairlift.sim.report import SIMULATED, page
from chairlift.sim.result import Result
from chairlift.sim.run import basis, machine, ready
from chairlift.sim.run import run as simulated
from chairlift.sim.workload import Workload


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Simulates a trace and says how its requests would have fared."""
    workload = ready(Workload.of(read(given["trace"]), engine.tenant_weights), given["rate_scale"], given["num_requests"])
    on = device(given["machine"])
    settings, step_time = machine(given["model"], on, engine)
    result = simulated(workload, settings, step_time, replicas=given["replicas"], routing=given["routing"])
    rests = basis(given["model"], on, engine)
    if given["json"]:
        print(json.dumps(result.document() | _costs(result) | {"step_time": step_time.document(), "basis": rests}, indent=1))
    else:
        print(_told(result, rests))
    if given["report"]:
        model = on.model if isinstance(on, Profile) else engine.model
        title = f"Simulation: {model} on {given['machine']}" if model else f"Simulation: {given['machine']}"
        page({Path(given["trace"]).name: result}, title, [SIMULATED, rests, *_asked(given)]).write(given["report"])
    return 0


def _asked(given: Mapping[str, Any]) -> list[str]:
    """What was changed of the trace and of the machine, for the page."""
    changed = [f"{given['num_requests']:,} requests of it"] if given["num_requests"] else []
    changed += [f"{given['rate_scale']:g} times its rate"] if given["rate_scale"] != 1 else []
    changed += [f"{given['replicas']:,} replicas behind a {given['routing']} router"] if given["replicas"] > 1 else []
    return [f"The trace was simulated with {', '.join(changed)}."] if changed else []


def _told(result: Result, basis: str) -> str:
    """The figures in words, and what they rest on."""
    return "\n".join(
        [
            table.text(table.cells({"": result})[1:]),
            "",
            *([table.text(tenants), ""] if (tenants := table.tenants(result)) else []),
            f"Where a request's time went, on average: {table.causes(result)}",
            f"{result.span:,.0f} s simulated in {result.wall:.2f} s ({result.span / result.wall:,.0f} times real time), "
            f"{result.decisions / result.wall / 1e6:.1f} million decisions a second.",
            table.wrapped([basis]),
        ]
    )


def _costs(result: Result) -> dict[str, Any]:
    """What the simulation took, and what each replica did."""
    return {
        "replicas": [{"requests": len(one.requests), "tokens": one.stats["generated_tokens"]} for one in result.replicas],
        "wall_s": result.wall,
        "decisions": result.decisions,
    }
