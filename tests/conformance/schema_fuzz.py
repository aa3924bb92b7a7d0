"""schemathesis against all routes of a server with a scripted engine: no answer may be a 5xx, and no callback long.

python tests/conformance/schema_fuzz.py SCHEMATHESIS [EXAMPLES]; `make schema-fuzz` calls it. Exits with 1 if a check failed.
"""

import gc
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from scripted_engine import ScriptedEngine
from server_here import serving

from chairlift.server.observability.loop_monitor import LoopMonitor

LIMIT = 0.02
LOOK_SECONDS = 30
"""Interval at which the longest callback is read: the monitor forgets it after one to two minutes."""


def longest_until_end(process: subprocess.Popen[bytes], monitor: LoopMonitor) -> tuple[float, str]:
    """CPU time in seconds of the longest callback until the process's end, and its name."""
    found = (0.0, "")
    ended = False
    while not ended:
        try:
            process.wait(LOOK_SECONDS)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        found = max(found, monitor.longest)
    return found


def main(schemathesis: str, examples: str = "100") -> int:
    """Runs the program; returns the exit status."""
    engine = ScriptedEngine()
    engine.describe(max_text_len=64, embedding_size=4)
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)  # as the server does while requests are open: server/garbage.py
    with tempfile.TemporaryDirectory() as data, serving(engine, data_dir=data) as (base, service):
        service.loop_monitor.reset()
        command = [schemathesis, "run", f"{base}/openapi.json", "--checks", "not_a_server_error", "--continue-on-failure"]
        command += ["--max-examples", examples, "--phases", "examples,coverage,fuzzing", "--generation-deterministic"]
        # A deadline of a millisecond is missed, which is 504 by design.
        with subprocess.Popen([*command, "--warnings", "off", "--no-shrink"]) as process:
            seconds, name = longest_until_end(process, service.loop_monitor)
    print(f"longest callback: {seconds * 1e3:.0f} ms of CPU time ({name or 'none took 5 ms'})")
    return 1 if process.returncode or seconds > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
