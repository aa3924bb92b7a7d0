"""The requests of `--trace`, for the commands that simulate them."""

from __future__ import annotations

import sys

from chairlift.config import EngineConfig
from chairlift.sim.run import ready, requests_of
from chairlift.sim.workload import Workload


def read(path: str, engine: EngineConfig, requests: int | None, rate_scale: float = 1.0) -> Workload:
    """The first `requests` of a trace or a journal, at `rate_scale` times the rate. Says on standard error if sessions are left out.

    Raises as `requests_of` and `ready`.
    """
    workload = ready(requests_of(path, engine), rate_scale, requests)
    if workload.lacks_sessions:
        print(f"{path}: sessions are left out; 'chairlift replay --set' simulates them at the recorded times.", file=sys.stderr)
    return workload
