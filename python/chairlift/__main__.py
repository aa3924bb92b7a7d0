"""The entry of the command line, `chairlift` or `python -m chairlift`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs one command and returns the exit status.

    Until the command itself runs, and after it has ended, Ctrl-C ends the process without a traceback: an import has no handler that
    could catch KeyboardInterrupt, and C extensions turn it into other errors.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from chairlift.cli.main import main as run

    try:
        return run()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
