"""`chairlift calibrate`: measures the step times of this machine."""

from __future__ import annotations

import argparse
from typing import Any

from chairlift.cli import flags, values
from chairlift.cli.progress import progress_bar
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.server.config import ServerConfig
from chairlift.sim.calibrate import SECONDS, calibrate, from_journal

_EXAMPLES = """\
examples:
  chairlift calibrate -o here.json                   a minute with the default model; leave the machine idle otherwise
  chairlift calibrate --model ./my-model --seconds 120 -o mine.json
  chairlift calibrate --from-journal day.journal -o day.json
                                                     the step times of an engine while it served
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "calibrate", summary, _EXAMPLES, run)
    flags.add_model(parser, f"{flags.MODEL_SOURCES} (default: {DEFAULT_MODEL}; unknown for a journal)")
    flags.add_value(parser, ("-o", "--output"), values.output, "FILE", "file to write", "profile.json")
    flags.add_value(parser, "--seconds", values.number(0.1, 86400), "N", f"seconds to measure (default: {SECONDS:.0f})")
    parser.add_argument("--from-journal", metavar="FILE", help="use the steps that --journal recorded, and run nothing")
    flags.add_fields(parser, EngineConfig)
    flags.add_fields(parser, ServerConfig, ("log_level",))


def run(args: argparse.Namespace) -> int:
    """Measures step times, writes them to a file, and prints the error of the fit."""
    if args.from_journal:
        flags.reject("--from-journal runs nothing", seconds=args.seconds)
        profile = from_journal(args.from_journal, args.model or "")
    else:
        with progress_bar(f"calibrating with {args.engine.model}") as on_progress:
            profile = calibrate(args.engine, args.seconds or SECONDS, on_progress)
    profile.save(args.output)
    errors = profile.errors
    spread = f"; repeats differ by {errors['spread']:.1%}" if "spread" in errors else ""
    print(
        f"{profile.measured['steps']:,} steps of up to {profile.measured['most_tokens']} tokens. Error of the predicted step times: "
        f"{errors['p50']:.1%} (p50), {errors['p90']:.1%} (p90){spread}.\n"
        f"Written to {args.output}. Use it: chairlift simulate --modelled-device {args.output} --trace FILE"
    )
    return 0
