"""Runs smoke.py, correct.py, serve.py and kernels.py one after another; a part that an earlier run has done is not run again.

Sizes follow the device: cards with less than 60 GB get smaller ones. Ends with 1 if a script found something wrong or did not end well.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import subprocess
import sys
import time
from pathlib import Path

SHARES = {"smoke": 1.5, "correct": 3.0, "serve": 3.3, "kernels": 2.3}
"""The scripts, in their order, and what share of the time each may take. What one leaves goes to the others."""
LEAST = 0.2
"""Minutes below which a script is not begun."""


def main() -> int:
    """Runs the scripts with this one's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="directory of the logs and pages (default: benches/results/gpu)")
    parser.add_argument("--minutes", type=float, default=28.0, help="time for all scripts together (default: 28)")
    parser.add_argument("--sweep", action="store_true", help="time attention with other launch settings too")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU: are the scripts in order?")
    parser.add_argument("--vllm", help="a Python that has vLLM, which is timed too (default: this one, if it has)")
    given = parser.parse_args()
    common = ["--dry"] * given.dry + (["--out", given.out] if given.out else [])
    own = {"serve": ["--vllm", given.vllm] if given.vllm else [], "kernels": ["--sweep"] * given.sweep}
    end, failed = time.monotonic() + 60 * given.minutes, []
    for name, share in SHARES.items():
        later = list(SHARES)[list(SHARES).index(name) :]
        minutes = (end - time.monotonic()) / 60 * share / sum(SHARES[other] for other in later)
        if minutes < LEAST and not given.dry:
            print(f"not run, for the time is over: {', '.join(later)}", file=sys.stderr)
            break
        print(f"== {name}, at most {minutes:.1f} minutes", flush=True)
        flags = [*common, *own.get(name, []), "--minutes", f"{minutes:.2f}"]
        if _run(Path(__file__).with_name(f"{name}.py"), flags, given.dry):
            failed.append(name)
    if failed:
        print(f"not all is well in: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _run(script: Path, flags: list[str], dry: bool) -> int:
    """Runs a script; its exit status."""
    if not dry:
        # In a process of its own: an error of a device stays with a process until it ends.
        return subprocess.run([sys.executable, str(script), *flags], check=False).returncode
    sys.argv = [str(script), *flags]
    with contextlib.suppress(ValueError):
        sys.path.remove(str(script.parent))
    sys.path.insert(0, str(script.parent))
    try:
        # In this process, which imports torch and transformers once.
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0) if not isinstance(end.code, str) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
