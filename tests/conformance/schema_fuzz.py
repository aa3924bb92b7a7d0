"""schemathesis against all routes of a server with a fake engine: no answer may be a 5xx, and no callback long.

python tests/conformance/schema_fuzz.py SCHEMATHESIS [EXAMPLES]; `make schema-fuzz` calls it. Exits with 1 if a check failed.
"""

import gc
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from fake_async_engine import FakeEngine, serving

LIMIT = 0.02


def main(schemathesis: str, examples: str = "100") -> int:
    """Runs the program; returns the exit status."""
    engine = FakeEngine()
    engine.facts |= {"max_text_len": 64, "hidden_size": 4}
    gc.freeze()
    with tempfile.TemporaryDirectory() as data, serving(engine, data_dir=data) as (base, service):
        service.loop_monitor.reset()
        command = [schemathesis, "run", f"{base}/openapi.json", "--checks", "not_a_server_error", "--continue-on-failure"]
        command += ["--max-examples", examples, "--phases", "examples,coverage,fuzzing", "--generation-deterministic"]
        # A deadline of a millisecond is missed, which is 504 by design.
        status = subprocess.run([*command, "--warnings", "off", "--no-shrink"], check=False).returncode
        seconds, name = service.loop_monitor.longest
    print(f"longest callback of the last minute or two: {seconds * 1e3:.0f} ms of CPU time ({name or 'none took 5 ms'})")
    return 1 if status or seconds > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
