"""The process that deploys a server's engines on a Ray cluster, and removes them when its standard input ends.

    python -m chairlift.fleet.placement '{"address": ..., "host": ..., "port": ..., "secret_file": ..., "files": {...}, "options": {...}}'

It is a process of its own because Ray ends the process of a driver whose cluster is lost.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from ray import serve

from chairlift.engine.machine_files import MachineFiles
from chairlift.engine.secret import read_secret
from chairlift.fleet.replica import application


def main() -> int:
    """Deploys, waits and removes. Returns the exit status; an error is one line on standard error."""
    order = json.loads(sys.argv[1])
    try:
        _connect(order["address"])
        name = f"chairlift-{order['host']}-{order['port']}"
        serve.start(proxy_location="Disabled")
        secret, files = read_secret(order["secret_file"]), MachineFiles(order["files"])
        engines = application(order["host"], order["port"], secret, files, order["options"])
        serve.run(engines, name=name, route_prefix=None)
        print("deployed", flush=True)
        sys.stdin.read()
        serve.delete(name)
    except Exception as error:  # Ray has many kinds; all mean that the engines are not placed
        print(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        return 1
    return 0


def _connect(address: str) -> None:
    """Connects to a cluster, or starts one on this machine for `local`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here sends no usage statistics
    options: dict[str, Any] = {"namespace": "serve", "log_to_driver": False, "logging_level": "error"}
    if address == "local":
        options["include_dashboard"] = False
    ray.init(address=address, **options)


if __name__ == "__main__":
    sys.exit(main())
