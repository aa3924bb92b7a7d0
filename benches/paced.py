"""Runs a command of Chairlift whose engine is that of paced_engine.py: `python paced.py serve ...`, in this folder."""

import sys

from chairlift.cli.main import main
from chairlift.engine import spawned_process
from chairlift.engine.engine_process import EngineProcess

if __name__ == "__main__":
    spawned_process.COMMAND = EngineProcess.command = ("-m", "paced_engine")
    sys.exit(main(sys.argv[1:]))
