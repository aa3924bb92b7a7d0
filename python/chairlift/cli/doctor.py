"""`chairlift doctor`: this machine, what runs on it and why other things do not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from chairlift.cli import flags

SECONDS = 20.0
"""Time for the comparison of the GPU kernels with torch."""

_EXAMPLES = """\
examples:
  chairlift doctor                 describe this machine and check the GPU kernels, in plain text for an issue report
  chairlift doctor --json          the same as JSON
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "doctor", summary, _EXAMPLES, run)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the report. The exit status is 1 if a kernel differs from its reference."""
    from chairlift.runner import diagnosis

    report = diagnosis.machine() | {"what runs": diagnosis.what_runs()}
    kernels, wrong = {}, False
    reason = diagnosis.why_no_gpu()
    if reason is None:
        print(f"comparing the GPU kernels with torch, for at most {SECONDS:.0f} s ...", file=sys.stderr, flush=True)
        for check in diagnosis.check_gpu(SECONDS):
            kernels[check.name], wrong = check.says, wrong or not check.ok
    else:
        kernels = {"not checked": reason.text}
    report["GPU kernels"] = kernels
    print(json.dumps(report, indent=2) if args.json else text(report))
    return int(wrong)


def text(report: Mapping[str, Mapping[str, str]]) -> str:
    """The report as plain text: a heading for each section and a line for each fact."""
    width = max(len(name) for facts in report.values() for name in facts)
    sections = []
    for heading, facts in report.items():
        sections.append("\n".join([heading, *(f"  {name:{width}}  {value}" for name, value in facts.items())]))
    return "\n\n".join(sections)
