"""`chairlift calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.config import EngineConfig, ServerConfig
from chairlift.sim.calibrate import calibrate, from_journal
from chairlift.sim.devices import Profile


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Measures what steps take here, writes it, and says how well it is told."""
    journal = given["from_journal"]
    profile = from_journal(journal, engine.model) if journal else _with_bar(engine, given["seconds"])
    profile.save(given["output"])
    errors = profile.errors
    print(
        f"{profile.measured['steps']:,} steps of up to {profile.measured['most_tokens']} tokens; what one takes is told to within "
        f"{errors['p50']:.1%} (p50) and {errors['p90']:.1%} (p90).\n"
        f"{given['output']} has it: chairlift simulate --device {given['output']} --trace FILE"
    )
    return 0


def _with_bar(engine: EngineConfig, seconds: float) -> Profile:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"calibrating with {engine.model}", total=1.0)
        return calibrate(engine, seconds, lambda done: progress.update(task, completed=done))
