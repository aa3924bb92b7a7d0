"""`chairlift shadow`: what a running server would do under other settings."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from chairlift.cli import flags, replay_settings
from chairlift.cli.printable import printable
from chairlift.cli.replay_settings import apply, format_value
from chairlift.errors import InvalidSetting

_EXAMPLES = """\
examples:
  chairlift serve --journal day.journal              a server, and beside it:
  chairlift shadow day.journal --policy fair
  chairlift shadow day.journal --policy mine.py:Mine --set max_num_seqs=64
  chairlift serve --journal day.journal --shadow-policy fair
                                                     the same by the server, for its metrics, dashboard and 'chairlift top'

The requests of the journal go through the scheduler in simulated time as they end, under the recorded settings ('simulated') and under
the others ('shadow'). Compare these two; 'recorded' is the server itself. Once an hour it proposes one change of settings, with its
effect and the uncertainty of that, if one would certainly have helped. It takes at most 2 % of a core.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "shadow", summary, _EXAMPLES, run)
    parser.add_argument("file", metavar="FILE", help="a journal that a server writes (--journal)")
    replay_settings.add_policy(parser)
    parser.add_argument(
        "--set", action="append", default=[], type=replay_settings.parse, metavar="NAME=VALUE", help="another setting; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON every ten seconds, instead of tables")


def run(args: argparse.Namespace) -> int:
    """Follows a journal until Ctrl-C, or until the process that started this one has ended."""
    from chairlift.sim.shadow import Shadow, follow

    changes = changes_of([*args.set, *([args.policy] if args.policy else [])])
    os.nice(19)
    shadow, parent = Shadow(args.file, lambda recorded: apply(recorded, changes)), os.getppid()
    settings = ", ".join(f"{name}={format_value(value)}" for name, value in changes.items())

    reports = sys.stdout

    def report(document: Mapping[str, Any]) -> None:
        print(json.dumps({"settings": settings, **document}) if args.json else text(document), file=reports, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # the server reads reports alone, and a policy may print
        follow(shadow, report, lambda: os.getppid() == parent)
    return 0


def changes_of(pairs: list[tuple[str, list[Any]]]) -> dict[str, Any]:
    """The changed settings, each with one value. Raises InvalidSetting."""
    if not pairs:
        raise InvalidSetting("a shadow needs another policy or setting: --policy NAME, or --set NAME=VALUE")
    if several := next((name for name, values in pairs if len(values) > 1), None):
        raise InvalidSetting(f"--set {several}: a shadow has one value of each setting; run one for each")
    return {name: values[0] for name, values in pairs}


def text(document: Mapping[str, Any]) -> str:
    """A report as tables and sentences."""
    from chairlift.sim import table

    covered = "no request yet" if document["covered"] is None else f"{document['covered']:.0%} of the requests"
    runs = table.runs(document["runs"])
    lines = [table.text(runs)]
    for group in ("tenants", "sessions"):
        if len(document[group]) > 1:
            rows = [[printable(name) or "(none)", *cells] for name, one in document[group].items() for cells in table.runs(one)[1:]]
            lines.append(table.text([[group.removesuffix("s"), *runs[0]], *rows]))
    lines.append(f"The last {document['window_s']:,.0f} s, {covered}, {document['cpu_share']:.1%} of a core.")
    if document["proposal"]:
        lines.append(table.wrapped([f"Proposal: {document['proposal']['text']}."]))
    if document["failure"]:
        lines.append(f"The policy failed, and the queue goes on in the order of arrival: {document['failure']}")
    return "\n\n".join(lines) + "\n"
