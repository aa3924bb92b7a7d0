"""Runs correct.py, kernels.py and serve.py one after another, in under 30 minutes; what they leave is meant to be committed.

Sizes follow the device: cards with less than 60 GB get smaller ones. Ends with 1, and times nothing, if `correct.py` finds something wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SCRIPTS = {"correct": 8.0, "kernels": 8.0, "serve": 12.5}
"""The scripts, and the most minutes of each."""


def main() -> int:
    """Runs the scripts with this one's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="directory of the pages (default: benches/results/gpu)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU: are the scripts in order?")
    parser.add_argument("--vllm", help="a Python that has vLLM, which is timed too (default: this one, if it has)")
    given = parser.parse_args()
    flags = ["--dry"] * given.dry + (["--out", given.out] if given.out else [])
    for name, minutes in SCRIPTS.items():
        print(f"== {name}, at most {minutes:g} minutes", flush=True)
        own = ["--vllm", given.vllm] if name == "serve" and given.vllm else []
        script = Path(__file__).with_name(f"{name}.py")
        status = subprocess.run([sys.executable, str(script), "--minutes", str(minutes), *flags, *own], check=False).returncode
        if status:
            print(f"{name}.py ended with {status}: what follows it is not run", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
