"""`chairlift calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.cli.flag_checks import refuse
from chairlift.cli.progress import bar
from chairlift.config import EngineConfig, ServerConfig
from chairlift.sim.calibrate import SECONDS, calibrate, from_journal


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Measures what steps take here, writes it, and says how well it is told."""
    journal = given["from_journal"]
    if journal:
        refuse("--from-journal runs nothing", seconds=given["seconds"])
        profile = from_journal(journal, given["model"] or "")
    else:
        with bar(f"calibrating with {engine.model}") as on_progress:
            profile = calibrate(engine, given["seconds"] or SECONDS, on_progress)
    profile.save(given["output"])
    errors = profile.errors
    print(
        f"{profile.measured['steps']:,} steps of up to {profile.measured['most_tokens']} tokens; what one takes is told to within "
        f"{errors['p50']:.1%} (p50) and {errors['p90']:.1%} (p90).\n"
        f"{given['output']} has it: chairlift simulate --device {given['output']} --trace FILE"
    )
    return 0
