"""`chairlift bench serve --sessions`: users run recorded sessions of agents in a closed loop."""

from __future__ import annotations

import argparse
import sys

from chairlift.bench.measure import measure_sessions
from chairlift.bench.session_report import GROUPS, block, grouped, session_figures
from chairlift.bench.sessions import read_sessions
from chairlift.cli import bench_load, flags, values

USERS = 8
"""Default of the number of users."""
THINK_TIME = 60.0
"""Default of the longest time between an answer and the next request, in seconds."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of recorded sessions."""
    group = parser.add_argument_group("sessions of agents")
    group.add_argument("--sessions", metavar="PATH", help=f"{flags.SESSIONS}, which users run in a closed loop")
    group.add_argument(
        "--users", type=values.whole(1, 10**5), metavar="N", help=f"users of --sessions, one session each at a time (default: {USERS})"
    )
    flags.add_max_think_time(group, THINK_TIME)
    group.add_argument(
        "--duration",
        type=values.number(1.0, 1e9),
        metavar="S",
        help="seconds to run --sessions again and again (default: until each was run once)",
    )


def reject(args: argparse.Namespace) -> None:
    """Raises InvalidSetting for flags of sessions without --sessions."""
    flags.reject("it is for --sessions", users=args.users, max_think_time=args.max_think_time, duration=args.duration)


def run(args: argparse.Namespace) -> int:
    """Runs the sessions and prints the report. Returns 1 if no request succeeded, 130 after an interrupt."""
    reason = "sessions have requests and times of their own"
    flags.reject(reason, dataset_path=args.dataset_path, dataset_name=args.dataset_name, num_prompts=args.num_prompts)
    flags.reject(reason, request_rate=args.request_rate, max_concurrency=args.max_concurrency, ramp_up_strategy=args.ramp_up_strategy)
    flags.reject("one process runs the sessions", processes=None if args.processes == 1 else args.processes)
    bench_load.check(args)
    target, longest = bench_load.connect(args)
    sessions = read_sessions(args.sessions, longest)
    users = args.users or USERS
    think = THINK_TIME if args.max_think_time is None else args.max_think_time
    count = f"{len(sessions)} session{'s' * (len(sessions) > 1)}"
    print(f"{count} for {users} users to {target.model} at {target.url}{target.endpoint}: gaps of at most {think:g} s")
    progress = "requests" if not args.disable_tqdm and sys.stderr.isatty() else None
    load = {"longest_think": think, "duration": args.duration, "seed": args.seed, "warmups": args.num_warmups}
    result, replays = measure_sessions(target, sessions, users, **load, progress=progress)
    arrivals = f"{users} users in a closed loop, gaps of at most {think:g} s"
    result.settings = bench_load.settings(args, target, arrivals, result.cpu_share) | {"requests": f"sessions of {args.sessions}"}
    figures = bench_load.print_figures(args, result.records)
    print(block(replays, figures.duration))
    fields = {
        "users": users,
        "max_think_time": think,
        **session_figures(replays, figures.duration),
        **{f"{group}s": grouped(replays, group, figures.duration) for group in GROUPS},
        "replays": [replay.to_json() for replay in replays],
    }
    return bench_load.finish(args, target, result, figures, f"sessions-{users}users", fields)
