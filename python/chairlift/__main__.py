"""The entry point of `chairlift` and `python -m chairlift`."""

from __future__ import annotations

import gc
import signal
import sys


def main() -> int:
    """Runs one command and returns the exit status.

    During imports and after the command, Ctrl-C ends the process without a traceback: nothing catches KeyboardInterrupt in an import, and C
    extensions turn it into other errors.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # what is imported lasts, and need not be examined
    from chairlift.cli.main import main as run

    gc.freeze()
    gc.enable()

    try:
        return run()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
