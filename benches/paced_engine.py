"""The engine's process of benches/streams.py: no model, and a step each PACED_MS milliseconds, as a real model would take them."""

import os
import sys
import time

from chairlift.engine import process
from chairlift.engine.engine import Engine
from chairlift.engine.frames import StepOutputs

STEP = float(os.environ.get("PACED_MS", "0")) / 1e3


class PacedEngine(Engine):
    """Waits for its time before it gives a step's tokens."""

    due = 0.0

    def step(self) -> StepOutputs | None:
        """Runs one step, no sooner than STEP after the one before."""
        report = super().step()
        if report is not None and STEP:
            now = time.monotonic()
            self.due = max(self.due + STEP, now)
            time.sleep(self.due - now)
        return report


if __name__ == "__main__":
    os._exit(process.main(int(sys.argv[1]), lambda: PacedEngine))
