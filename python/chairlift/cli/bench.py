"""`chairlift bench`: measures a server, or the engine in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.cli.remote import client_key
from chairlift.config import EngineConfig, ServerConfig


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Runs one command of `chairlift bench`; 1 if no request succeeded, 130 if it was interrupted."""
    if given["bench"] in ("latency", "throughput"):
        from chairlift.cli import bench_offline

        return bench_offline.run(given, engine)
    from chairlift.cli import bench_serve, bench_sweep

    bench_serve.check(given)
    target, longest = bench_serve.target_of(given, client_key(given))
    requests = bench_serve.Requests(given, longest)
    return (bench_sweep.run if given["bench"] == "sweep" else bench_serve.run)(given, target, requests)
