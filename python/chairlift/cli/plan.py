"""`chairlift plan`: how many users a machine can serve."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from chairlift.bench.arrivals import describe_gaps
from chairlift.cli import flags, shared_models, simulated_trace, values
from chairlift.cli.progress import progress_bar
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim import plan_report
from chairlift.sim.calibrate import SECONDS, calibrate
from chairlift.sim.devices import Device, Profile
from chairlift.sim.devices import device as known_device
from chairlift.sim.models import devices_of
from chairlift.sim.models_plan import plan_models
from chairlift.sim.plan import Targets, plan
from chairlift.sim.run import SETTINGS, basis, check_sizes, model_on
from chairlift.sim.sessions import DURATION, THINK_TIME
from chairlift.sim.sessions_plan import SessionsTarget, plan_sessions
from chairlift.sim.workload_spec import MIN_REQUESTS, WorkloadSpec

REQUESTS, INPUT_LEN, OUTPUT_LEN = 2000, 256, 128
"""Defaults: requests of a trace, and lengths without one."""
_TARGETS, _SESSIONS_TARGET = Targets(), SessionsTarget()
"""The default targets."""

_EXAMPLES = """\
examples:
  chairlift plan                                     this machine and the default model; measures for a minute first
  chairlift plan --input-len 1000 --output-len 200 --range-ratio 0.5 --ttft-ms 1000 --itl-ms 50
  chairlift plan --trace conv.csv --model Llama-3.1-8B --modelled-device H100 --report plan.html
  chairlift plan --trace mixed.csv --models models.toml --modelled-device H100
  chairlift plan --sessions agents.jsonl.gz --model Llama-3.1-8B --modelled-device H100
  chairlift calibrate -o here.json && chairlift plan --modelled-device here.json

Finds the largest request rate at which TTFT and ITL meet their targets, by simulation as in 'chairlift simulate --help', which
lists the known devices and models. Requests arrive as 'chairlift bench sweep' sends them, or at the trace's times. The same
command gives the same numbers for the same machine. docs/capacity.md has the accuracy of a plan.

With --sessions, the plan is the largest number of agents whose sessions take at most --slowdown times as long as alone on the machine.
"""

_tokens = values.whole(1, 10**7)
_milliseconds = values.number(0.001, 1e9)


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "plan", summary, _EXAMPLES, run)
    flags.add_model(parser, flags.SIMULATED_MODEL)
    shared_models.add_flag(parser)
    parser.add_argument(
        "--modelled-device",
        metavar="NAME",
        help="device to plan for, or a file of 'chairlift calibrate' (default: this machine, measured for a minute)",
    )
    _add_targets(parser.add_argument_group("targets"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_sessions(parser.add_argument_group("sessions of agents"))
    group = parser.add_argument_group("results")
    flags.add_json(group)
    flags.add_report(group)
    flags.add_fields(parser, EngineConfig, SETTINGS)


def _add_targets(group: argparse._ArgumentGroup) -> None:
    flags.add_value(group, "--ttft-ms", _milliseconds, "MS", f"time to the first token (default: {1e3 * _TARGETS.ttft:g})")
    flags.add_value(group, "--itl-ms", _milliseconds, "MS", f"time between two tokens (default: {1e3 * _TARGETS.itl:g})")
    flags.add_value(group, "--percentile", values.number(1, 100), "X", "percentile that must meet the target", 95.0)


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", metavar="FILE", help="a trace's requests, in any format that 'chairlift bench' reads; or a journal")
    flags.add_value(
        group,
        "--num-requests",
        values.whole(1, 10**6),
        "N",
        f"the trace's first N requests; a shorter trace is repeated (default: {REQUESTS})",
    )
    group.add_argument(
        "--self-timed", action=argparse.BooleanOptionalAction, help="use the trace's arrival times, scaled to each rate (default: if any)"
    )
    flags.add_value(group, "--input-len", _tokens, "N", f"prompt length without a trace, in tokens (default: {INPUT_LEN})")
    flags.add_value(group, "--output-len", _tokens, "N", f"output length without a trace, in tokens (default: {OUTPUT_LEN})")
    flags.add_value(group, "--range-ratio", values.number(0, 0.999), "X", "lengths vary by this share up and down (default: 0)")
    flags.add_burstiness(group)
    flags.add_value(group, "--users-every", values.number(1e-3, 1e9), "S", "each user sends a request every S seconds", 30.0)


def _add_sessions(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sessions", metavar="PATH", help=f"{flags.SESSIONS}, in place of requests")
    slowdown = f"longest time of a session, as a multiple of its time alone (default: {_SESSIONS_TARGET.slowdown:g})"
    flags.add_value(group, "--slowdown", values.number(1.0, 1e6), "X", slowdown)
    flags.add_max_think_time(group, THINK_TIME)
    flags.add_value(group, "--duration", values.number(1.0, 1e9), "S", f"seconds to simulate (default: {DURATION / 3600:g} hours)")


def run(args: argparse.Namespace) -> int:
    """Plans the capacity and reports it."""
    if args.sessions is not None:
        return _run_sessions(args)
    flags.reject("it is for --sessions", slowdown=args.slowdown, max_think_time=args.max_think_time, duration=args.duration)
    spec, traffic = _workload_spec(args)
    limits = {"ttft": args.ttft_ms, "itl": args.itl_ms}
    targets = Targets(**{name: ms / 1e3 for name, ms in limits.items() if ms is not None}, percentile=args.percentile)
    if args.models is not None:
        return _run_models(args, spec, targets, traffic)
    on = _device(args)
    with progress_bar("planning") as on_progress:
        result = plan(spec, targets, device=on, model=args.model, config=args.engine, on_progress=on_progress)
    model = model_on(on, args.engine)
    summary = plan_report.summary(result, on, model, traffic, args.users_every, basis(args.model, on, args.engine))
    if args.json:
        users = result.users(args.users_every).rate
        document = result.document() | {"users": users, "machine": on.name, "model": model, "summary": summary}
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        print("\n".join(plan_report.text(result, summary)))
    if args.report:
        plan_report.page(result, summary).write(args.report)
    return 0


def _run_sessions(args: argparse.Namespace) -> int:
    """Plans the number of agents and reports it."""
    reason = "sessions have requests and times of their own"
    flags.reject(reason, trace=args.trace, models=args.models, num_requests=args.num_requests, self_timed=args.self_timed)
    flags.reject(reason, input_len=args.input_len, output_len=args.output_len, range_ratio=args.range_ratio)
    flags.reject("the target of --sessions is --slowdown", ttft_ms=args.ttft_ms, itl_ms=args.itl_ms)
    flags.reject("a plan for sessions has no page", report=args.report)
    target = SessionsTarget(slowdown=args.slowdown or _SESSIONS_TARGET.slowdown, percentile=args.percentile)
    on = _device(args)
    with progress_bar("planning") as on_progress:
        result = plan_sessions(
            args.sessions,
            target,
            device=on,
            model=args.model,
            config=args.engine,
            longest_think=THINK_TIME if args.max_think_time is None else args.max_think_time,
            duration=args.duration or DURATION,
            on_progress=on_progress,
        )
    model = model_on(on, args.engine)
    if args.json:
        print(json.dumps(result.document() | {"machine": on.name, "model": model}, indent=1))
    else:
        print("\n".join(plan_report.sessions_text(result, on, model, Path(args.sessions).name, basis(args.model, on, args.engine))))
    return 0


def _device(args: argparse.Namespace) -> Device | Profile:
    """The device to plan for, which is measured if none is named."""
    return known_device(args.modelled_device) if args.modelled_device else _measure(args.engine)


def _run_models(args: argparse.Namespace, spec: WorkloadSpec, targets: Targets, traffic: str) -> int:
    """Plans the capacity of several models and reports it."""
    models = shared_models.read(args)
    flags.reject("a plan of several models has no page", report=args.report)
    if args.modelled_device is None:
        raise InvalidSetting("--models needs a --modelled-device: a device, or NAME=FILE,NAME=FILE of 'chairlift calibrate'")
    on = devices_of(args.modelled_device)
    with progress_bar("planning") as on_progress:
        result = plan_models(spec, models, targets, device=on, on_progress=on_progress)
    if args.json:
        print(json.dumps(result.document() | {"users": result.capacity.rate * args.users_every, "traffic": traffic}, indent=1))
    else:
        print("\n".join(plan_report.models_text(result, args.modelled_device, traffic, args.users_every)))
    return 0


def _workload_spec(args: argparse.Namespace) -> tuple[WorkloadSpec, str]:
    """The requested traffic, and its description."""
    gaps = describe_gaps(args.burstiness)
    if args.trace:
        flags.reject("a --trace has its own lengths", input_len=args.input_len, output_len=args.output_len, range_ratio=args.range_ratio)
        trace = simulated_trace.read(args.trace, args.engine, args.num_requests)
        trace = trace if args.num_requests else trace.first(REQUESTS)
        timed = bool(trace.column("arrival_us")[-1]) if args.self_timed is None else args.self_timed
        short = f" (at least {MIN_REQUESTS} are better)" if timed and len(trace) < MIN_REQUESTS else ""
        arrivals = "at the trace's times, scaled" if timed else f"at random times ({gaps})"
        description = f"the first {len(trace):,} requests of {Path(args.trace).name}{short}, {arrivals}"
        return WorkloadSpec(trace=trace, timed=timed, burstiness=args.burstiness), description
    flags.reject("it is for the requests of a --trace", num_requests=args.num_requests, self_timed=args.self_timed)
    prompt, output, spread = args.input_len or INPUT_LEN, args.output_len or OUTPUT_LEN, args.range_ratio or 0.0
    description = f"prompts of {prompt:,} tokens, outputs of {output:,}{f' ± {spread:.0%}' if spread else ''}, at random times ({gaps})"
    return WorkloadSpec(prompt_tokens=prompt, output_tokens=output, spread=spread, burstiness=args.burstiness), description


def _measure(engine: EngineConfig) -> Profile:
    check_sizes(engine)
    seconds = f"{SECONDS:.0f} s"
    print(f"No --modelled-device: measuring this machine for {seconds} (to measure once: chairlift calibrate -o FILE).", file=sys.stderr)
    with progress_bar(f"calibrating with {engine.model}") as on_progress:
        return calibrate(engine, SECONDS, on_progress)
