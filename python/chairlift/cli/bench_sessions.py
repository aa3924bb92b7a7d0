"""`chairlift bench serve --sessions`: users run recorded sessions of agents in a closed loop, beside requests without a session."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace

from chairlift.bench.client import Target
from chairlift.bench.figures import Figures
from chairlift.bench.measure import measure_sessions
from chairlift.bench.session_report import GROUPS, block, grouped, others_block, session_figures
from chairlift.bench.sessions import read_sessions
from chairlift.bench.workload import Job
from chairlift.cli import bench_load, flags, values
from chairlift.errors import InvalidSetting
from chairlift.scheduling import TENANT

USERS = 8
"""Default of the number of users."""
THINK_TIME = 60.0
"""Default of the longest time between an answer and the next request, in seconds."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of recorded sessions."""
    group = parser.add_argument_group("sessions of agents")
    group.add_argument("--sessions", metavar="PATH", help=f"{flags.SESSIONS}, which users run in a closed loop")
    flags.add_value(group, "--users", values.whole(1, 10**5), "N", f"users of --sessions, one session each at a time (default: {USERS})")
    flags.add_max_think_time(group, THINK_TIME)
    flags.add_value(
        group, "--duration", values.number(1.0, 1e9), "S", "seconds to run --sessions again and again (default: until each was run once)"
    )


def reject(args: argparse.Namespace) -> None:
    """Raises InvalidSetting for flags of sessions without --sessions."""
    flags.reject("it is for --sessions", users=args.users, max_think_time=args.max_think_time, duration=args.duration)


def run(args: argparse.Namespace) -> int:
    """Runs the sessions and prints the report. Returns 1 if no request succeeded, 130 after an interrupt."""
    flags.reject("one process runs the sessions", processes=None if args.processes == 1 else args.processes)
    bench_load.check(args)
    target, longest = bench_load.connect(args)
    sessions = read_sessions(args.sessions, longest)
    users = args.users or USERS
    think = THINK_TIME if args.max_think_time is None else args.max_think_time
    arrivals = f"{users} users in a closed loop, gaps of at most {think:g} s"
    requests = f"sessions of {args.sessions}"
    _check_tenants(target, any(session.tenant for session in sessions))
    beside, description = _beside(args, longest)
    _check_tenants(target, any(job.tenant for job in beside))
    count = f"{len(sessions)} session{'s' * (len(sessions) > 1)}"
    print(f"{count} for {users} users to {target.model} at {target.url}{target.endpoint}: gaps of at most {think:g} s")
    if beside:
        print(f"Beside them {len(beside)} requests without a session: {description}")
        requests += f", and {bench_load.requests_text(args)}"
        arrivals += f"; without a session {description}"
    progress = "requests" if not args.disable_tqdm and sys.stderr.isatty() else None
    load = {"longest_think": think, "duration": args.duration, "beside": beside, "max_concurrency": args.max_concurrency}
    measured = measure_sessions(target, sessions, users, **load, seed=args.seed, warmups=args.num_warmups, progress=progress)
    result, replays = measured.run, measured.replays
    result.settings = bench_load.settings(args, target, arrivals, result.cpu_share) | {"requests": requests}
    figures = bench_load.print_figures(args, result.records)
    span = max((replay.ended for replay in replays), default=0.0)
    print(block(replays, span))
    fields = {
        "users": users,
        "max_think_time": think,
        **session_figures(replays, span),
        **{f"{group}s": grouped(replays, group, span) for group in GROUPS},
        "replays": [replay.to_json() for replay in replays],
    }
    if beside:
        others = Figures(measured.others, figures.goodput)
        print(others_block(others))
        fields["without_session"] = others.to_json(args.metric_percentiles)
    return bench_load.finish(args, target, result, figures, f"sessions-{users}users", fields)


def _check_tenants(target: Target, named: bool) -> None:
    if named and "x-tenant-id" in target.headers:
        raise InvalidSetting("--header X-Tenant-Id: the sessions, or the trace beside them, name their tenants; leave it out")


def _beside(args: argparse.Namespace, longest: int | None) -> tuple[list[Job], str]:
    """The requests without a session that the flags ask for, and a description of their arrivals.

    A trace's clients are tenants, as in `chairlift simulate`. Raises InvalidSetting for a client whose name no tenant may have.
    """
    rates = args.request_rate, args.max_concurrency, args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps
    if not any((args.dataset_path, args.dataset_name, args.num_prompts, args.self_timed, args.speedup != 1, *rates)):
        return [], ""
    count, rate = args.num_prompts, args.request_rate
    if count is None and not args.dataset_path and args.duration and rate and math.isfinite(rate):
        count = math.ceil(rate * args.duration)
    jobs, description = bench_load.schedule(args, bench_load.RequestSource(args, longest).jobs(count, args.seed))
    for job in jobs:
        if job.client is not None and not TENANT.fullmatch(job.client):
            raise InvalidSetting(f"{args.dataset_path}: the client {job.client!r:.40} is no name of a tenant")
    limit = "" if args.max_concurrency is None else f", at most {args.max_concurrency} at a time"
    before_end = [job for job in jobs if job.due is None or args.duration is None or job.due < args.duration]
    return [replace(job, tenant=job.client or "") for job in before_end], description + limit
