"""An engine without a model whose steps take `STEP_SECONDS` while the file named by `GATE` exists, and no time once it is gone.

Run as a script, this is `chairlift` with such an engine and with patience for clients that a busy machine slows down;
`python -m paced_engine FD FORMAT` runs the engine's own process.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from chairlift.engine import process

GATE = "PACED_ENGINE_GATE"
"""The environment variable that names the file."""

STEP_SECONDS = 0.2
"""A step gives each request one token: 2000 tokens take longer than any test may."""


def pace() -> None:
    """Makes every step of an engine in this process wait at the gate."""
    from chairlift.runner.null_runner import NullRunner

    gate, launch = Path(os.environ[GATE]), NullRunner.launch

    def paced(self: NullRunner, *arguments: Any) -> Any:
        end = time.monotonic() + STEP_SECONDS
        while gate.exists() and time.monotonic() < end:
            time.sleep(0.005)
        return launch(self, *arguments)

    NullRunner.launch = paced  # type: ignore[method-assign]


def serve() -> int:
    """Runs the command line with the paced engine."""
    from chairlift.cli.main import main
    from chairlift.engine import spawned_process
    from chairlift.engine.engine_process import EngineProcess
    from chairlift.server.http import body, protocol

    body.BODY_TIMEOUT = protocol.HEADERS_SECONDS = protocol.STALL_SECONDS = 1000  # type: ignore[misc]
    spawned_process.COMMAND = EngineProcess.command = ("-m", "paced_engine")
    return main()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(serve())
    pace()
    status = process.main(int(sys.argv[1]), partial(process.load, sys.argv[2]))
    sys.stdout.flush()
    os._exit(status)
